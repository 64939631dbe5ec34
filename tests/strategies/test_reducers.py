"""Training with gradients that travel as bf16 or int8: replicas stay equal, runs resume, and the result is as good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.checkpoint.reader import load, newest_valid
from manyhands.errors import CheckpointMismatch, Preempted
from manyhands.testing import RankPool
from tests.training.workloads import FEATURES, MODELS, OPTIMIZERS, data, make_trainer, mean_loss, weights_of
from tests.variants import variants

Weights = dict[str, np.ndarray]
LOSSY = ("bf16", "int8")
LONG = pytest.mark.long


class WithUnusedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = MODELS["plain"]()
        self.unused = nn.Linear(FEATURES, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        return result


def assert_same(left: Weights, right: Weights) -> None:
    for name, value in left.items():
        assert value.tobytes() == right[name].tobytes(), name


def assert_close(left: Weights, right: Weights, tolerance: float) -> None:
    for name, value in left.items():
        np.testing.assert_allclose(value, right[name], rtol=0, atol=tolerance, err_msg=name)


def train_with_unused(reducer: str) -> Weights:
    trainer = mh.Trainer(
        WithUnusedParameter, mean_loss, OPTIMIZERS["momentum"], mh.Mirrored(reducer=reducer), slices=5, clip_norm=1.0
    )
    trainer.fit(data(), epochs=3, batch_size=24)
    return weights_of(trainer)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=LONG), 3, pytest.param(5, marks=LONG)])
def test_replicas_are_bitwise_equal_and_near_the_exact_ones(ranks: RankPool, world_size: int) -> None:
    """Momentum, weight decay, clipping, accumulation, a short last batch, and an unused parameter."""
    exact = ranks(world_size, train_with_unused, "exact")[0]
    for reducer in LOSSY:
        first, *others = ranks(world_size, train_with_unused, reducer)
        for other in others:
            assert_same(first, other)
        assert_close(first, exact, tolerance=0.03)
        assert any(value.tobytes() != exact[name].tobytes() for name, value in first.items()), "it was lossy"
        for name in ("unused.weight", "unused.bias"):
            assert first[name].tobytes() == exact[name].tobytes(), "no gradient, no weight decay"


class Ending:
    """Ends the script as asked: as a SIGTERM would, or by an exception after step `at`."""

    def __init__(self, how: str | None, at: int) -> None:
        self._how, self._at = how, at

    def before_step(self, trainer: Any, step: int) -> None:
        if step == self._at and self._how == "preempted":
            trainer._run.worker.session.stop_requested = "preempt"

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        if step == self._at and self._how == "failed":
            raise RuntimeError("as if killed")


def train(run_dir: str, model: str, reducer: str, how: str | None, at: int = 0) -> Weights:
    make = {**MODELS, "unused parameter": WithUnusedParameter}[model]
    strategy = mh.Mirrored(reducer=reducer)
    hooks = [Ending(how, at)]
    trainer = mh.Trainer(make, mean_loss, OPTIMIZERS["momentum"], strategy, slices=6, run_dir=run_dir, hooks=hooks)
    try:
        trainer.fit(data(), epochs=3, batch_size=24, checkpoint=mh.Checkpoints(every_steps=3))
    except (Preempted, RuntimeError):
        assert how is not None
    return weights_of(trainer)


@pytest.mark.parametrize(
    ("reducer", "model", "how"),
    [
        ("int8", "unused parameter", "preempted"),
        pytest.param("int8", "unused parameter", "failed", marks=LONG),
        ("int8", "dropout and BatchNorm", "failed"),
        pytest.param("bf16", "unused parameter", "preempted", marks=LONG),
    ],
)
def test_a_resumed_run_is_as_if_it_had_not_stopped(
    ranks: RankPool, tmp_path: Path, reducer: str, model: str, how: str
) -> None:
    """Preempted, it saves where it stopped; failed in step 5, it has the checkpoint that all agreed on after step 3.

    An unused parameter is last in the order that the run settles on, but not in the one that it begins with.
    """
    undisturbed = ranks(2, train, str(tmp_path / "one"), model, reducer, None, run_dir=tmp_path / "one")[0]
    home = tmp_path / "two"
    ranks(2, train, str(home), model, reducer, how, 5, run_dir=home)
    found = newest_valid(home / "checkpoints")
    assert found is not None
    assert found.step == (5 if how == "preempted" else 3)
    for weights in ranks(2, train, str(home), model, reducer, None, run_dir=home):
        assert_same(undisturbed, weights)


# Buckets of one block of int8: many of them, and none is split between hosts unevenly.
ON_HOSTS = {"comm.bucket_bytes": 4096}


def train_on_hosts(run_dir: str, reducer: str, how: str | None, at: int = 0) -> tuple[Weights, bool]:
    """Also whether weights were shared inside hosts. An optimizer that holds a frozen parameter runs in full, alone."""
    trainer = mh.Trainer(
        WithUnusedParameter,
        mean_loss,
        OPTIMIZERS["momentum"],
        mh.Mirrored(reducer=reducer),
        slices=6,
        clip_norm=1.0,
        run_dir=run_dir,
        hooks=[Ending(how, at)],
    )
    shared = False
    try:
        trainer.fit(data(), epochs=2, batch_size=24)
        shared = trainer._run.ready().engine.held.common is not None
        with trainer.editing() as model:
            model.unused.bias.requires_grad_(False)
            model.used[0].weight.mul_(0.5)
        trainer.fit(data(), epochs=1, batch_size=24)
    except Preempted:
        assert how is not None
    return weights_of(trainer), shared


@pytest.mark.parametrize("reducer", variants(LOSSY, "int8"))
def test_hosts_share_memory_inside_and_resume_after_a_stop(ranks: RankPool, tmp_path: Path, reducer: str) -> None:
    """Two workers on each of two hosts, with an unused parameter, and another set of trained ones half-way."""

    def run(name: str, kind: str, how: str | None, at: int = 0) -> list[Weights]:
        home = tmp_path / name
        found = ranks(4, train_on_hosts, str(home), kind, how, at, run_dir=home, flags=ON_HOSTS, hosts=2)
        assert how or all(shared for _, shared in found)
        return [weights for weights, _ in found]

    exact, (undisturbed, *others) = run("exact", "exact", None)[0], run("one", reducer, None)
    for other in others:
        assert_same(undisturbed, other)
    assert_close(undisturbed, exact, tolerance=0.03)
    assert any(value.tobytes() != exact[name].tobytes() for name, value in undisturbed.items()), "it was lossy"
    run("two", reducer, "preempted", 5)
    found = newest_valid(tmp_path / "two" / "checkpoints")
    assert found is not None
    if reducer == "int8":
        rows = load(found.path).tensors["training/strategy/residuals/used.0.weight"]
        assert len(rows) == 2 and all(bool(row.any()) for row in rows), "one for each host"
    for weights in run("two", reducer, None):
        assert_same(undisturbed, weights)


def test_another_number_of_workers_resumes_with_the_residuals(ranks: RankPool, tmp_path: Path) -> None:
    lives = [
        ranks(workers, train, str(tmp_path), "plain", "int8", how, at, run_dir=tmp_path)
        for workers, how, at in ((3, "preempted", 3), (2, "preempted", 6), (1, None, 0))
    ]
    for life in lives:
        for other in life[1:]:
            assert_same(life[0], other)
    exact = ranks(1, train, str(tmp_path / "exact"), "plain", "exact", None, run_dir=tmp_path / "exact")[0]
    assert_close(lives[-1][0], exact, tolerance=0.03)


def test_a_checkpoint_holds_every_worker_s_residuals(ranks: RankPool, tmp_path: Path) -> None:
    ranks(3, train, str(tmp_path), "plain", "int8", "preempted", 4, run_dir=tmp_path)
    found = newest_valid(tmp_path / "checkpoints")
    assert found is not None
    tensors = load(found.path).tensors
    for name, weights in ((n.removeprefix("model/"), t) for n, t in tensors.items() if n.startswith("model/")):
        rows = tensors[f"training/strategy/residuals/{name}"]
        assert rows.shape == (3, *weights.shape)
        assert all(bool(row.any()) for row in rows if row.numel() > 10), name


def refused(run_dir: str, reducer: str) -> str:
    with pytest.raises(CheckpointMismatch) as error:
        train(run_dir, "plain", reducer, None)
    return str(error.value)


@pytest.mark.parametrize(("first", "then"), [("int8", "exact"), ("exact", "bf16")])
def test_a_run_keeps_the_reducer_that_it_began_with(ranks: RankPool, tmp_path: Path, first: str, then: str) -> None:
    ranks(1, train, str(tmp_path), "plain", first, "preempted", 2, run_dir=tmp_path)
    (text,) = ranks(1, refused, str(tmp_path), then, run_dir=tmp_path)
    assert f"reducer={first}" in text


def own_loop(run_dir: str, stop_after: int | None) -> tuple[Weights, int]:
    """Two slices for three workers in the short batch at the end of each epoch: the third has nothing to do in it."""
    hands = mh.join(mh.Mirrored(reducer="int8"), slices=3, run_dir=run_dir)
    torch.manual_seed(0)
    model = MODELS["plain"]()
    model, _ = hands.setup(model, OPTIMIZERS["momentum"](model.parameters()))
    hands.resume()
    for batch in hands.batches(data(34), batch_size=10, epochs=3):
        hands.backward(mean_loss(model, batch))
        hands.step()
        if hands.stepped and hands.steps_done == stop_after:
            break
        if hands.stepped and hands.steps_done == 6:
            hands.save()
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}, hands.steps_done


def test_a_user_loop_saves_with_the_next_step_and_resumes(ranks: RankPool, tmp_path: Path) -> None:
    undisturbed = ranks(3, own_loop, str(tmp_path / "one"), None, run_dir=tmp_path / "one")[0]
    assert undisturbed[1] == 12
    home = tmp_path / "two"
    ranks(3, own_loop, str(home), 9, run_dir=home)
    found = newest_valid(home / "checkpoints")
    assert found is not None
    assert found.step == 7
    for weights, steps in ranks(3, own_loop, str(home), None, run_dir=home):
        assert steps == 12
        assert_same(undisturbed[0], weights)


def overflow_in_fp16(reducer: str) -> tuple[Weights, list[bool], float]:
    """The first scale of 2**16 is too large for the second step's data."""
    skipped: list[bool] = []

    class Watch:
        def after_step(self, trainer: Any, step: int, stats: Any) -> None:
            skipped.append(stats.skipped)

    x, y = data(48)
    x = x.clone()
    x[:, 0] *= 1e3
    strategy = mh.Mirrored(reducer=reducer)
    trainer = make_trainer("plain", "SGD", strategy=strategy, precision="fp16", hooks=[Watch()], slices=2)
    trainer.fit((x, y), epochs=4, batch_size=12)
    scale = trainer._run.ready().engine._precision.scale
    assert scale is not None
    return weights_of(trainer), skipped, scale.value


def test_an_overflow_is_skipped_by_all_and_the_scale_comes_down(ranks: RankPool) -> None:
    exact = ranks(2, overflow_in_fp16, "exact")[0]
    assert exact[1].count(True) in range(1, len(exact[1]))
    for reducer in LOSSY:
        first, second = ranks(2, overflow_in_fp16, reducer)
        assert_same(first[0], second[0])
        assert first[1:] == second[1:] == exact[1:]
        assert all(np.isfinite(value).all() for value in first[0].values())


def lbfgs(reducer: str) -> None:
    make_trainer("plain", "LBFGS", strategy=mh.Mirrored(reducer=reducer), slices=2).fit(data(), steps=2, batch_size=30)


def test_optimizers_that_compare_gradients_within_a_step_refuse_residuals(ranks: RankPool) -> None:
    ranks(2, lbfgs, "bf16")
    with pytest.raises(AssertionError, match="LBFGS compares gradients within a step"):
        ranks(2, lbfgs, "int8")


def digits_right(reducer: str) -> float:
    from manyhands.recipes.digits import load, right

    training, held_out = load()
    trainer = mh.Trainer(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)),
        mean_loss,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        mh.Mirrored(reducer=reducer),
        metrics={"accuracy": right},
        slices=2,
    )
    trainer.fit(training, epochs=12, batch_size=64)
    return trainer.evaluate(held_out)["accuracy"]


@pytest.mark.slow
@pytest.mark.long
def test_digits_are_learned_as_well_as_with_exact_sums(ranks: RankPool) -> None:
    exact = ranks(2, digits_right, "exact")[0]
    assert exact > 0.95
    for reducer in LOSSY:
        found = ranks(2, digits_right, reducer)
        assert found[0] == found[1]
        assert found[0] > exact - 0.005, reducer
