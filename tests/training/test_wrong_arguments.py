"""What `mh.Trainer` and its calls refuse, with the argument's name, before a step is taken."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.data.sources.as_source import as_source
from manyhands.errors import SpecError
from manyhands.launcher.worker_process.process_settings import asked_device
from manyhands.training.loop.setting_checks import by_step, check_counts
from manyhands.training.setup.user_model import load_weights, save_model
from manyhands.training.worker.strategy_lookup import in_place_of

DATA = torch.zeros(8, 4), torch.zeros(8, 1)


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., mh.Trainer]:
    def make(**changes: Any) -> mh.Trainer:
        arguments: dict[str, Any] = {"loss": mse, "optimizer": sgd, "run_dir": tmp_path / "run"}
        return mh.Trainer(nn.Linear(4, 1), **(arguments | changes))

    return make


class Misnamed:
    def on_step_end(self, trainer: Any) -> None:
        raise AssertionError("never called")


def test_another_strategy_in_its_place_has_what_all_of_them_have() -> None:
    shared = {"devices": ("cpu",), "threads": 2, "dtypes": {"0": "fp64"}, "memory_limit": "2GB"}
    asked = mh.Mirrored(workers=3, **shared)
    assert in_place_of(asked, "sharded", level="optimizer") == mh.Sharded("optimizer", **shared)
    assert in_place_of(asked, "diloco") == mh.LocalSGD(outer="nesterov", **shared)


def test_one_device_is_for_all_workers() -> None:
    assert [asked_device("cpu", rank).type for rank in range(3)] == ["cpu"] * 3
    assert [asked_device(("cuda:0", "cuda:1"), rank).index for rank in range(3)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("changes", "said", "tried"),
    [
        ({"strategy": 3}, "strategy is 3", 'strategy="mirrored"'),
        ({"strategy": mh.Mirrored}, "the class Mirrored", "strategy=mh.Mirrored(...)"),
        ({"strategy": mh.Single(devices=("tpu:0",))}, "devices has 'tpu:0'", 'devices=("cuda:0", "cuda:1")'),
        ({"loss": "mse"}, "loss is 'mse'", "loss=lambda model, batch"),
        ({"optimizer": "adam"}, "optimizer is 'adam'", "optimizer=lambda params"),
        ({"metrics": mse}, "must be functions by name", 'metrics={"accuracy"'),
        ({"hooks": [Misnamed]}, "The hook Misnamed is a class", "hooks=[Misnamed()]"),
        ({"hooks": [Misnamed()]}, "after_step", "def after_step(self, trainer, step, stats)"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(
    trainer: Callable[..., mh.Trainer], changes: dict[str, Any], said: str, tried: str
) -> None:
    with pytest.raises(SpecError) as refused:
        trainer(**changes)
    assert said in refused.value.what
    assert tried in refused.value.fix[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 0},
        {"batch_size": -4},
        {"batch_size": 4.0},
        {"batch_size": "4"},
        {"batch_size": None, "batch_per_worker": 0},
        {"epochs": -1},
        {"epochs": 1.5},
        {"epochs": None, "steps": 2.5},
        {"num_workers": -1},
    ],
)
def test_a_count_that_is_no_whole_number_is_named(trainer: Callable[..., mh.Trainer], changes: dict[str, Any]) -> None:
    (name, value), *_ = reversed(changes.items())
    with pytest.raises(SpecError, match=f"{name} is {value!r}, but must be a whole number from [01] on"):
        trainer().fit(DATA, **({"epochs": 1, "batch_size": 4} | changes))


def test_a_count_may_be_another_librarys_integer() -> None:
    check_counts(epochs=numpy.int64(1), batch_size=numpy.int32(4), steps=None)


def test_evaluation_needs_a_row_in_each_batch(trainer: Callable[..., mh.Trainer]) -> None:
    with pytest.raises(SpecError, match="batch_size is 0"):
        trainer().evaluate(DATA, batch_size=0)


def test_checkpoints_are_checked_where_they_are_made(trainer: Callable[..., mh.Trainer]) -> None:
    with pytest.raises(SpecError, match="every_steps is 0"):
        mh.Checkpoints(every_steps=0)
    with pytest.raises(SpecError, match="checkpoint is 5") as refused:
        trainer().fit(DATA, epochs=1, batch_size=4, checkpoint=5)
    assert "mh.Checkpoints" in refused.value.fix[0]


def test_a_schedule_that_waits_for_results_is_stepped_by_epochs() -> None:
    optimizer = sgd(nn.Linear(4, 1).parameters())
    with pytest.raises(SpecError, match="ReduceLROnPlateau") as refused:
        by_step(torch.optim.lr_scheduler.ReduceLROnPlateau)(optimizer)
    assert 'scheduler_every="epoch"' in refused.value.fix[0]
    assert by_step(torch.optim.lr_scheduler.ConstantLR)(optimizer).last_epoch == 0


def test_a_loader_that_drops_rows_gets_a_warning_that_none_are_dropped() -> None:
    with pytest.warns(UserWarning, match="drop_last=True is ignored"):
        source = as_source(DataLoader(TensorDataset(*DATA), batch_size=3, drop_last=True))
    assert source.num_rows == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_source(DataLoader(TensorDataset(*DATA), batch_size=3))


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.safetensors"])
def test_weights_are_read_back_from_a_file_with_any_ending(tmp_path: Path, name: str) -> None:
    saved, fresh = nn.Linear(4, 1), nn.Linear(4, 1)
    save_model(saved, tmp_path / name)
    load_weights(fresh, tmp_path / name)
    assert torch.equal(fresh.weight, saved.weight)
    if name.startswith("model.pt"):
        assert torch.equal(torch.load(tmp_path / name, weights_only=True)["weight"], saved.weight)


def test_weights_that_torch_has_written_load_under_any_name(tmp_path: Path) -> None:
    saved, fresh = nn.Linear(4, 1), nn.Linear(4, 1)
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    load_weights(fresh, tmp_path / "pytorch_model.bin")
    assert torch.equal(fresh.weight, saved.weight)
