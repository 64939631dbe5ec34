"""A compiled model is the same model: its files have the names of the uncompiled one, and each loads the other's."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.checkpoint.export import export, save_tensors
from manyhands.checkpoint.reader import newest_valid
from manyhands.checkpoint.state_packing import load_model_state, model_state
from manyhands.checkpoint.tensor_file import read_tensors
from manyhands.checkpoint.tensor_names import plain_name
from manyhands.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointSaveFailed, Preempted, SpecError
from manyhands.events import Warned
from manyhands.parallel.model.layer_dtypes import set_dtypes_
from manyhands.parallel.model.per_part_optimizers import divide_parameters
from manyhands.testing import RankPool
from manyhands.training.setup.user_model import check_ending, load_weights, read_weights, save_model
from tests.stopping import StopAt
from tests.training.workloads import CLASSES, FEATURES, OPTIMIZERS, data, mean_loss, weights_of


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))


def compiled() -> nn.Module:
    return torch.compile(plain(), backend="eager")  # type: ignore[return-value]


def compiled_in_part() -> nn.Module:
    model = plain()
    model[2] = torch.compile(model[2], backend="eager")
    return model


MAKERS: dict[str, Callable[[], nn.Module]] = {"plain": plain, "compiled": compiled, "in part": compiled_in_part}
NAMES = sorted(plain().state_dict())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_orig_mod.0.weight", "0.weight"),
        ("a._orig_mod.b._orig_mod.c", "a.b.c"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("0.weight", "0.weight"),
        ("_orig_mod", ""),
    ],
)
def test_only_whole_parts_of_a_name_are_left_out(name: str, expected: str) -> None:
    assert plain_name(name) == expected


@pytest.mark.parametrize("written", MAKERS)
@pytest.mark.parametrize("read", MAKERS)
def test_each_loads_what_the_other_has_saved(tmp_path: Path, written: str, read: str) -> None:
    model, other = MAKERS[written](), MAKERS[read]()
    assert sorted(model_state(model)[0]) == NAMES
    for name in ("m.safetensors", "m.pt"):
        save_model(model, tmp_path / name)
        assert sorted(read_weights(tmp_path / name)) == NAMES
        load_weights(other, tmp_path / name)
        for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(one, two)
    raw = MAKERS[written]().state_dict()  # as torch's own users, and earlier versions, wrote them
    load_model_state(other, raw)
    assert all(torch.equal(one, two) for one, two in zip(raw.values(), other.state_dict().values(), strict=True))


def test_other_names_are_refused_as_before(tmp_path: Path) -> None:
    save_tensors(tmp_path / "m.safetensors", {"elsewhere.weight": torch.ones(2)})
    with pytest.raises(CheckpointMismatch):
        load_weights(compiled(), tmp_path / "m.safetensors")
    (tmp_path / "m.pt").write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointCorrupt, match=r"m\.pt"):
        load_weights(plain(), tmp_path / "m.pt")


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_users_name_layers_as_they_wrote_them(make: Callable[[], nn.Module]) -> None:
    divided = divide_parameters(make(), {"0": None, "1": None, "2": None})  # type: ignore[dict-item]
    assert {name: len(params) for name, params in divided.items()} == {"0": 2, "1": 2, "2": 2}
    assert set_dtypes_(make(), {"2": "bf16"}) == {"2": "bf16"}


@pytest.mark.parametrize("name", ["model.onnx", "model", "model.bin", "model.ckpt", "model.keras"])
def test_an_ending_that_says_nothing_is_refused_with_what_to_write(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_ending(plain(), tmp_path / name)
    assert ".safetensors, .pt, .pth" in str(refused.value)
    assert "model.safetensors" in str(refused.value)
    check_ending(plain(), tmp_path / "MODEL.PT")


def train(run_dir: str, kind: str, stop_at: int | None) -> dict[str, Any]:
    trainer = mh.Trainer(
        MAKERS[kind], mean_loss, OPTIMIZERS["AdamW"], slices=2, run_dir=run_dir, hooks=[StopAt(stop_at)]
    )
    with contextlib.suppress(Preempted):
        trainer.fit(data(), steps=4, batch_size=30)
        trainer.save(Path(run_dir) / "m.safetensors")
    with pytest.raises(SpecError):
        trainer.save(Path(run_dir) / "m.onnx")
    return {plain_name(name): value for name, value in weights_of(trainer).items()}


@pytest.mark.long  # torch's compiler takes seconds to be imported
@pytest.mark.parametrize("kinds", [("compiled", "plain"), ("plain", "in part")], ids=" then ".join)
def test_a_run_resumes_compiled_or_not(ranks: RankPool, tmp_path: Path, kinds: tuple[str, str]) -> None:
    (whole,) = ranks(1, train, str(tmp_path / "whole"), "plain", None, run_dir=tmp_path / "whole")
    first, then = kinds
    ranks(1, train, str(tmp_path / "run"), first, 2, run_dir=tmp_path / "run")
    found = newest_valid(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert "_orig_mod" not in (found.path / "MANIFEST.json").read_text()
    assert "_orig_mod" not in json.dumps(json.loads((found.path / "state.json").read_text()))
    export(found.path, tmp_path / "exported.safetensors")
    assert sorted(read_tensors(tmp_path / "exported.safetensors")) == NAMES
    (after,) = ranks(1, train, str(tmp_path / "run"), then, None, run_dir=tmp_path / "run")
    assert sorted(after) == NAMES
    for name, value in whole.items():
        assert after[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert sorted(read_tensors(tmp_path / "run" / "m.safetensors")) == NAMES
    assert not (tmp_path / "run" / "m.onnx").exists()


# Where a strategy divides the model.


class Residual(nn.Module):
    """Not a chain of layers, so that a pipeline has to trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.relu(self.up(x))
        return self.head(seen + torch.relu(self.down(seen)))


def residual(kind: str) -> nn.Module:
    model = Residual()
    if kind == "in part":
        model.down = torch.compile(model.down, backend="eager")  # type: ignore[assignment]
    if kind == "in place":
        model.down.compile(backend="eager")
    return torch.compile(model, backend="eager") if kind == "compiled" else model  # type: ignore[return-value]


STRATEGIES = {
    "tensor": mh.TensorParallel(2, rules={"head": "whole"}),
    "pipeline": mh.PipelineParallel(2, cuts=["down"]),
}


def train_divided(kind: str, strategy: str, folder: str) -> list[str]:
    trainer = mh.Trainer(
        lambda: residual(kind), mean_loss, OPTIMIZERS["AdamW"], STRATEGIES[strategy], slices=2, seed=1, run_dir=folder
    )
    trainer.fit(data(), steps=3, batch_size=30, validation=data(20))
    trainer.save(Path(folder) / "m.safetensors")
    session: Any = trainer._run.worker.session
    return [event.text for event in session.events if isinstance(event, Warned) and "torch.compile" in event.text]


@pytest.mark.long  # torch's compiler takes seconds to be imported
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_compiled_model_is_divided_by_the_names_that_its_user_knows_and_saved_under_them(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    found = {}
    for kind in ("plain", "compiled", "in part", "in place"):
        folder = tmp_path / kind
        warned = ranks(2, train_divided, kind, strategy, str(folder), run_dir=folder)[0]
        assert bool(warned) == (kind != "plain" and (strategy == "tensor" or kind == "compiled")), (kind, warned)
        found[kind] = read_tensors(folder / "m.safetensors")
        checkpoint = newest_valid(folder / "checkpoints")
        assert checkpoint is not None and "_orig_mod" not in (checkpoint.path / "MANIFEST.json").read_text()
        export(checkpoint.path, tmp_path / f"{kind}.safetensors")
        exported = read_tensors(tmp_path / f"{kind}.safetensors")
        for name, whole in found["plain"].items():
            torch.testing.assert_close(found[kind][name], whole, rtol=1e-5, atol=1e-6)
            assert torch.equal(exported[name], found[kind][name])
        assert sorted(found[kind]) == sorted(exported) == sorted(Residual().state_dict())


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt"])
def test_a_file_that_the_disk_does_not_take_is_a_named_failure_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(CheckpointSaveFailed, match=name):
            save_tensors(tmp_path / name, {"a": torch.zeros(20_000)}, "pt" if name.endswith("pt") else "safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
