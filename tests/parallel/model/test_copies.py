"""Large copies hold what plain ones do, from tensors of any layout and type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from manyhands.parameter_server.memory.versioned_memory import LARGE_BYTES, copy_large_

LARGE = LARGE_BYTES // 4


@pytest.mark.parametrize(
    "source",
    [
        torch.randn(5),
        torch.randn(LARGE + 7),
        torch.randn(LARGE + 40)[3:],
        torch.randn(1024, 1025).t(),
        torch.randn(LARGE + 9, dtype=torch.float64),
        torch.randn(64, 64, 20, 20).to(memory_format=torch.channels_last),
    ],
    ids=["small", "large", "unaligned", "turned", "of another type", "channels last"],
)
def test_a_copy_is_what_was_copied_and_nothing_beside_it(source: Tensor) -> None:
    around = torch.full((source.numel() + 34,), -1.0)
    target = around[17:-17].view(source.shape)
    copy_large_(target, source)
    assert torch.equal(target, source.to(torch.float32))
    assert torch.equal(around[:17], around[-17:]) and around[0] == -1
