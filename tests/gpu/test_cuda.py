"""On CUDA devices the same strategies over NCCL. Run by `make test-gpu`; never run by us so far."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.testing import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT SHOWN HERE: no CUDA device"),
]


def train_on(devices: tuple[str, ...]) -> dict[str, Any]:
    from torch import nn

    import manyhands as mh

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    trainer = mh.Trainer(
        model,
        lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1]),
        lambda params: torch.optim.AdamW(params, lr=0.01),
        mh.Mirrored(devices=devices),
        slices=4,
        clip_norm=1.0,
    )
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(64, 8, generator=generator), torch.randint(0, 3, (64,), generator=generator)
    trainer.fit(data, epochs=2, batch_size=16)
    return {name: value.cpu().numpy().copy() for name, value in trainer.model.state_dict().items()}


def assert_close(left: dict[str, Any], right: dict[str, Any]) -> None:
    for name, value in left.items():
        torch.testing.assert_close(torch.from_numpy(value), torch.from_numpy(right[name]), rtol=1e-3, atol=1e-4)


def test_a_cuda_device_ends_where_the_cpu_ends(ranks: RankPool) -> None:
    (on_cpu,), (on_cuda,) = ranks(1, train_on, ("cpu",)), ranks(1, train_on, ("cuda:0",))
    assert_close(on_cpu, on_cuda)


def test_two_devices_end_where_one_ends(ranks: RankPool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NOT SHOWN HERE: NCCL needs a device per worker, and there is one device")
    (alone,) = ranks(1, train_on, ("cuda:0",))
    for result in ranks(2, train_on, ("cuda:0", "cuda:1")):
        assert_close(alone, result)
