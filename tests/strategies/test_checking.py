"""A bit that flips in one worker's weights or states: seen within `check_every` steps, named, healed or stopped at."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.checkpoint.reader import newest_valid
from manyhands.errors import Diverged, MemoryChanged
from manyhands.events import CopiesDiverged, Warned
from manyhands.native import why_not
from manyhands.observe.recorder import read_events
from manyhands.testing import RankPool
from tests.training.workloads import data, make_trainer, weights_of
from tests.variants import variants

OVER_GLOO = {"comm.plane": "gloo", "train.check_every": 3}
SHARED = {"train.check_every": 3}
UNCHECKED = {"comm.plane": "gloo", "train.check_every": 0}
needs_native = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")


def flip(tensor: torch.Tensor) -> None:
    """One bit of the mantissa, written past torch, as a broken memory would."""
    ctypes.c_uint32.from_address(tensor.data_ptr() + 4 * (tensor.numel() // 2)).value ^= 1 << 9


class Unhurried:
    """No save is left out because the one before it is still being written."""

    def after_step(self, trainer: mh.Trainer, step: int, stats: Any) -> None:
        assert trainer._lifecycle is not None
        writer = trainer._lifecycle.saver._writer
        deadline = time.monotonic() + 100
        while writer is not None and writer.busy:
            assert time.monotonic() < deadline
            time.sleep(0.001)


class Flip:
    """Once, after a step, on one rank."""

    def __init__(self, rank: int, step: int, where: str) -> None:
        self.rank, self.step, self.where = rank, step, where

    def after_step(self, trainer: mh.Trainer, step: int, stats: Any) -> None:
        if step != self.step or trainer._run.worker.rank != self.rank:
            return
        weight = trainer.model.get_parameter("0.weight")
        if self.where == "weight":
            flip(weight)
        elif self.where == "state":
            flip(trainer.optimizer.state[weight]["exp_avg"])
        else:
            flip(trainer.model.get_buffer("1.running_mean"))


def train(flips: tuple[int, int, str] | None, steps: int = 12, every_steps: int = 3) -> dict[str, Any]:
    """AdamW on BatchNorm and dropout, checkpoints now and then; its weights, and its events."""
    hooks = [Unhurried(), *([Flip(*flips)] if flips is not None else [])]
    trainer = make_trainer("dropout and BatchNorm", "AdamW", slices=6, hooks=hooks)
    error = ""
    try:
        trainer.fit(data(), steps=steps, batch_size=24, checkpoint=mh.Checkpoints(every_steps=every_steps, keep_last=2))
    except (Diverged, MemoryChanged) as raised:
        error = f"{type(raised).__name__}: {raised}"
    events = list(trainer._run.worker.session.events)
    moments = {k: v["exp_avg"].numpy().copy() for k, v in trainer.optimizer.state_dict()["state"].items()}
    return {"weights": weights_of(trainer), "moments": moments, "error": error, "step": trainer.step, "events": events}


def events_of(result: dict[str, Any], kind: type) -> list[Any]:
    return [event for event in result["events"] if isinstance(event, kind)]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    pairs = [(left[kind][name], right[kind][name]) for kind in ("weights", "moments") for name in left[kind]]
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("where", variants(["weight", "state", "buffer"], "state"))
@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
def test_of_three_copies_the_odd_one_is_named_and_healed_and_nothing_is_lost(
    ranks: RankPool, where: str, rank: int, tmp_path: Path
) -> None:
    undisturbed = ranks(3, train, None, flags=OVER_GLOO)
    assert not events_of(undisturbed[0], CopiesDiverged)
    results = ranks(3, train, (rank, 6, where), flags=OVER_GLOO, run_dir=tmp_path / "run")
    for result in results:
        assert result["error"] == "" and result["step"] == 12
        assert same(result, undisturbed[0])
    (diverged,) = events_of(results[0], CopiesDiverged)
    assert (diverged.step, diverged.ranks, diverged.healed, diverged.agreed_step) == (6, [rank], True, 3)
    assert diverged.workers[0].startswith(f"rank {rank} on ")
    assert any(f"rank {rank} on " in event.text for event in events_of(results[0], Warned))
    assert list(read_events(tmp_path / "run" / "events" / "chief.jsonl")), "and all of it is on record"
    aside = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("*.set-aside"))
    assert aside == (["step-00000006.set-aside"] if rank == 0 else []), "it holds the chief's copy"


def test_a_flip_between_two_checks_is_healed_too_though_its_steps_are_not_taken_back(ranks: RankPool) -> None:
    results = ranks(3, train, (1, 4, "weight"), flags=OVER_GLOO)
    (diverged,) = events_of(results[0], CopiesDiverged)
    assert (diverged.step, diverged.ranks) == (6, [1]), "within check_every steps"
    assert same(results[0], results[1]) and same(results[0], results[2])


@pytest.mark.parametrize("where", variants(["weight", "state", "buffer"], "buffer"))
def test_two_copies_that_differ_stop_the_run_at_the_last_checkpoint_on_which_they_agreed(
    ranks: RankPool, where: str, tmp_path: Path
) -> None:
    (undisturbed, _) = ranks(2, train, None, flags=OVER_GLOO)
    for result in ranks(2, train, (1, 5, where), flags=OVER_GLOO, run_dir=tmp_path / "run"):
        assert result["step"] == 6
        assert result["error"].startswith("Diverged: After step 6 ")
        assert "rank 0 on " in result["error"] and "rank 1 on " in result["error"]
        assert "step-00000003 is the newest now" in result["error"]
    found = newest_valid(tmp_path / "run" / "checkpoints")
    assert found is not None and found.step == 3
    assert "step-00000003" in (tmp_path / "run" / "checkpoints" / "LATEST").read_text()
    for result in ranks(2, train, None, flags=OVER_GLOO, run_dir=tmp_path / "run"):
        assert result["error"] == "" and same(result, undisturbed), "resumed from there"


def test_unchecked_a_flipped_bit_survives_to_the_end(ranks: RankPool) -> None:
    """Without the check, everything above would go unseen."""
    results = ranks(3, train, (1, 6, "weight"), flags=UNCHECKED)
    assert all(result["error"] == "" and not events_of(result, CopiesDiverged) for result in results)
    assert not same(results[0], results[1])
    assert same(results[0], results[2])


def test_copies_are_compared_when_training_ends(ranks: RankPool) -> None:
    undisturbed = ranks(3, train, None, 11, flags=OVER_GLOO)
    results = ranks(3, train, (1, 11, "state"), 11, flags=OVER_GLOO)
    (diverged,) = events_of(results[0], CopiesDiverged)
    assert (diverged.step, diverged.ranks) == (11, [1])
    assert all(same(result, undisturbed[0]) for result in results)


@needs_native
def test_what_workers_do_not_share_is_compared_where_they_share_weights(ranks: RankPool) -> None:
    undisturbed = ranks(3, train, None, flags=SHARED)
    results = ranks(3, train, (2, 6, "buffer"), flags=SHARED)
    assert events_of(results[0], CopiesDiverged)[0].ranks == [2]
    assert all(same(result, undisturbed[0]) for result in results)


@needs_native
@pytest.mark.parametrize("where", ["weight", "state"])
def test_shared_weights_that_something_else_changed_are_named_on_every_worker(
    ranks: RankPool, where: str, tmp_path: Path
) -> None:
    """With the settings that a run has by default."""
    undisturbed = ranks(2, train, None)
    for result in ranks(2, train, (1, 6, where), run_dir=tmp_path / "run"):
        assert result["step"] == 6, "seen in the next update"
        assert result["error"].startswith("MemoryChanged: 0.weight, or its optimizer state, changed")
    found = newest_valid(tmp_path / "run" / "checkpoints")
    assert found is not None and found.step == 3, "that of step 6 holds what was changed"
    for result in ranks(2, train, None, run_dir=tmp_path / "run"):
        assert same(result, undisturbed[0])
    (result, _) = ranks(2, train, (1, 6, where), flags={"train.check_every": 0})
    assert result["error"] == "" and not same(result, undisturbed[0]), "unwatched, it survives"


class Scribble:
    """Writes to a shared weight after every step, in a way that torch does not count."""

    def after_step(self, trainer: mh.Trainer, step: int, stats: Any) -> None:
        if trainer.is_chief:
            trainer.model.get_parameter("0.weight").data[0, 0] += 1e-3


def train_scribbling(optimizer: str) -> tuple[str, int]:
    makers = {"AdamW": torch.optim.AdamW, "NAdam": torch.optim.NAdam}
    trainer = mh.Trainer(
        lambda: torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Linear(300, 2)),
        lambda model, x: model(x).square().mean(),
        lambda params: makers[optimizer](params, lr=1e-3),
        hooks=[Scribble()],
    )
    try:
        trainer.fit(torch.randn(64, 100, generator=torch.Generator().manual_seed(0)), steps=40, batch_size=8)
    except MemoryChanged as raised:
        return str(raised), trainer.step
    return "", trainer.step


@needs_native
@pytest.mark.parametrize(("optimizer", "every", "latest"), [("AdamW", 100, 2), ("NAdam", 10, 10)])
def test_a_script_that_writes_to_shared_weights_is_found_out(
    ranks: RankPool, optimizer: str, every: int, latest: int
) -> None:
    """Fused, in the first step that can be looked at, the third; with torch's own optimizers, after check_every."""
    for error, step in ranks(2, train_scribbling, optimizer, flags={"train.check_every": every}):
        assert error.startswith("0.weight, or its optimizer state") and "trainer.editing()" in error
        assert step <= latest


def loop_of_their_own(flipping: int) -> dict[str, Any]:
    hands = mh.join(slices=6)
    torch.manual_seed(0)
    model = torch.nn.Linear(12, 4)
    model, _ = hands.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    flipped = False
    for x, y in hands.batches(data(), batch_size=24, steps=12):
        if hands.steps_done == 6 and hands.rank == flipping and not flipped:
            flip(model.weight.data)  # in the middle of a step, before it computes anything
            flipped = True
        hands.backward(torch.nn.functional.cross_entropy(model(x), y))
        hands.step()
    events = list(hands._worker.session.events)
    weights = {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
    return {"weights": weights, "moments": {}, "events": events}


def test_a_loop_of_ones_own_is_healed_too(ranks: RankPool) -> None:
    every_step = {**OVER_GLOO, "train.check_every": 1}
    undisturbed = ranks(3, loop_of_their_own, -1, flags=every_step)
    results = ranks(3, loop_of_their_own, 1, flags=every_step)
    (diverged,) = events_of(results[0], CopiesDiverged)
    assert (diverged.step, diverged.ranks, diverged.healed) == (7, [1], True), "the step after it looks again"
    assert same(results[0], results[1]) and same(results[0], results[2])
    assert all(not events_of(result, CopiesDiverged) for result in undisturbed)


@needs_native
@pytest.mark.long
def test_a_host_whose_shared_weights_are_odd_is_healed_from_another(ranks: RankPool) -> None:
    """Flipped by the worker whose part it is: its hash, taken after its own hooks, is sure to see it."""
    on_hosts = {"train.strategy": "mirrored", "train.check_every": 3}
    undisturbed = ranks(6, train, None, flags=on_hosts, hosts=3)
    results = ranks(6, train, (2, 6, "weight"), flags=on_hosts, hosts=3)
    (diverged,) = events_of(results[0], CopiesDiverged)
    assert (diverged.step, diverged.ranks, diverged.healed) == (6, [2, 3], True), "both workers of the second host"
    assert all(same(result, undisturbed[0]) for result in results)


@needs_native
@pytest.mark.slow
def test_two_hosts_whose_shared_weights_differ_stop(ranks: RankPool) -> None:
    on_hosts = {"train.strategy": "mirrored", "train.check_every": 3}
    for result in ranks(4, train, (2, 6, "state"), flags=on_hosts, hosts=2):
        assert result["error"].startswith("Diverged: After step 6 "), "two hosts are two copies"
