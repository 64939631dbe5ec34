"""A session's loop on real ranks: it ends where a loop by hand ends, and each hook leaves what it is for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.distribute import train
from manyhands.errors import ManyhandsError
from manyhands.testing import RankPool
from tests.training.workloads import data, mean_loss, plain

STEPS, BATCH = 6, 24


def seeded() -> nn.Module:
    torch.manual_seed(3)
    return plain()


def arrays(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


class Counting(train.SessionRunHook):
    """Writes down the calls that it gets, and asks for values beside the user's."""

    def __init__(self, train_op: Any) -> None:
        self.calls: list[str] = []
        self.seen: list[tuple[float, int]] = []
        self._fetches = [train_op.loss, train.get_or_create_global_step()]

    def begin(self) -> None:
        self.calls.append("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.calls.append("created")

    def before_run(self, run_context: train.SessionRunContext) -> train.SessionRunArgs:
        return train.SessionRunArgs(self._fetches)

    def after_run(self, run_context: train.SessionRunContext, run_values: train.SessionRunValues) -> None:
        self.seen.append(tuple(run_values.results))

    def end(self, session: Any) -> None:
        self.calls.append("end")


def operation(**arguments: Any) -> Any:
    optimizer = train.MomentumOptimizer(0.1, 0.9)
    step = train.get_or_create_global_step()
    return optimizer.minimize(
        mean_loss, step, **{"model": seeded, "data": data(), "batch_size": BATCH, "epochs": 2, **arguments}
    )


def session(directory: str) -> dict[str, Any]:
    """As article 002's programs print it."""
    train_op = operation(model=(model := seeded()))
    hook = Counting(train_op)
    hooks = [
        hook,
        train.StopAtStepHook(last_step=STEPS),
        train.NanTensorHook(train_op.loss),
        train.LoggingTensorHook({"loss": train_op.loss}, every_n_iter=2),
    ]
    bodies, fetched = 0, []
    saver = train.Saver(model)
    with train.MonitoredTrainingSession(
        master="",
        is_chief=True,
        checkpoint_dir=directory,
        hooks=hooks,
        save_checkpoint_steps=2,
        save_summaries_steps=2,
        log_step_count_steps=2,
        config=train.ConfigProto(allow_soft_placement=True, log_device_placement=True),
    ) as sess:
        while not sess.should_stop():
            _, loss = sess.run([train_op, train_op.loss])
            fetched.append(loss)
            bodies += 1
            path = saver.save(sess, Path(directory) / "weights", global_step=sess.global_step)
    return {
        "weights": arrays(model),
        "bodies": bodies,
        "calls": hook.calls,
        "seen": hook.seen,
        "loss": fetched,
        "path": path,
        "placement": placement.read_text() if (placement := sess.hands.run_dir / "placement.log").exists() else "",
        "files": sorted({one.name.partition(".")[0] for one in sess.hands.run_dir.rglob("*")}),
    }


def by_hand() -> tuple[dict[str, np.ndarray], list[float]]:
    hands = mh.join()
    model = seeded()
    model, _ = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for batch in hands.batches(data(), batch_size=BATCH, steps=STEPS):
        hands.backward(mean_loss(model, batch))
        hands.step()
        losses.append(hands.loss)
    return arrays(model), losses


@pytest.fixture
def hand(ranks: RankPool) -> tuple[dict[str, np.ndarray], list[float]]:
    return ranks(1, by_hand)[0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_session_ends_where_a_loop_by_hand_ends(
    ranks: RankPool, world_size: int, hand: tuple[dict[str, np.ndarray], list[float]], tmp_path: Path
) -> None:
    weights, losses = hand
    directory = tmp_path / "run"
    found = ranks(world_size, session, str(directory))
    for one in found:
        assert one["bodies"] == STEPS and one["calls"] == ["begin", "created", "end"]
        assert [step for _, step in one["seen"]] == list(range(1, STEPS + 1))
        np.testing.assert_allclose([loss for loss, _ in one["seen"]], losses, rtol=1e-5)
        assert one["loss"] == [loss for loss, _ in one["seen"]]
        for name, value in weights.items():
            np.testing.assert_allclose(one["weights"][name], value, rtol=0, atol=1e-6, err_msg=name)
    assert train.latest_checkpoint(directory) == found[0]["path"] == str(directory / f"weights-{STEPS}.safetensors")
    kept = seeded()
    train.Saver(kept).restore(None, found[0]["path"])
    assert all(value.tobytes() == arrays(kept)[name].tobytes() for name, value in found[0]["weights"].items())
    assert "0.weight: /device:CPU" in found[0]["placement"]
    assert {"checkpoints", "summaries"} <= set(found[0]["files"])


class StopAt(train.SessionRunHook):
    def __init__(self, step: int) -> None:
        self._step = step

    def after_run(self, run_context: train.SessionRunContext, run_values: train.SessionRunValues) -> None:
        if run_context.session.global_step >= self._step:
            run_context.request_stop()


def until_the_data_ends() -> tuple[int, int]:
    train_op, bodies = operation(), 0
    sess = train.MonitoredTrainingSession()
    with sess:
        while not sess.should_stop():
            sess.run(train_op)
            bodies += 1
    return sess.global_step, bodies


def test_a_session_ends_with_its_data(ranks: RankPool) -> None:
    assert ranks(2, until_the_data_ends) == [(8, 8)] * 2


def both_stopped() -> tuple[int, bool]:
    train_op, sess = operation(epochs=50), train.MonitoredTrainingSession(chief_only_hooks=[StopAt(3)])
    with sess:
        while not sess.should_stop():
            sess.run(train_op)
    return sess.global_step, sess.coord.should_stop()


def test_a_stop_that_one_worker_requests_ends_all_after_one_more_step(ranks: RankPool) -> None:
    assert ranks(2, both_stopped) == [(4, True)] * 2


def not_a_number(model: nn.Module, batch: Any) -> Tensor:
    loss = mean_loss(model, batch)
    not_a_number.calls += 1  # type: ignore[attr-defined]
    return loss * (math.nan if not_a_number.calls > 3 else 1.0)  # type: ignore[attr-defined]


def with_nan(fails: bool) -> Any:
    not_a_number.calls = 0  # type: ignore[attr-defined]
    optimizer = train.GradientDescentOptimizer(0.1)
    train_op = optimizer.minimize(not_a_number, model=seeded, data=data(), batch_size=BATCH, epochs=3)
    sess = train.MonitoredTrainingSession(hooks=[train.NanTensorHook(train_op.loss, fail_on_nan_loss=fails)])
    try:
        with sess:
            while not sess.should_stop():
                sess.run(train_op)
    except ManyhandsError as error:
        return type(error).__name__
    return sess.global_step


def test_a_loss_that_is_no_number_fails_or_ends_as_the_hook_says(ranks: RankPool) -> None:
    assert ranks(1, with_nan, True) == ["NonFinite"]
    [step] = ranks(1, with_nan, False)
    assert 1 <= step <= 3, "the update of the bad step was not made"


def refused() -> list[str]:
    def feed(sess: Any, op: Any) -> None:
        sess.run(op, feed_dict={"x": 1})

    def another(sess: Any, op: Any) -> None:
        sess.run(op)
        sess.run(operation())

    def text(sess: Any, op: Any) -> None:
        sess.run([op, "loss:0"])

    def restore_late(sess: Any, op: Any) -> None:
        sess.run(op)
        train.Saver(plain()).restore(sess, "weights-1")

    def early(sess: Any, op: Any) -> None:
        sess.run(train.get_global_step())

    def other_hook(sess: Any, op: Any) -> None:
        sync = train.SyncReplicasOptimizer(train.GradientDescentOptimizer(0.1), 2)
        with train.MonitoredTrainingSession(hooks=[sync.make_session_run_hook(True)]) as mine:
            mine.run(operation())

    said = []
    for use in (feed, another, text, restore_late, early, other_hook):
        try:
            with train.MonitoredTrainingSession() as sess:
                use(sess, operation())
        except ManyhandsError as error:
            said.append(str(error).splitlines()[0])
    return said


def test_what_a_session_cannot_do_is_refused_with_words(ranks: RankPool) -> None:
    words = [
        "placeholders",
        "one training operation",
        "cannot be fetched",
        "change in steps only",
        "knows its training",
    ]
    words.append("runs another optimizer")
    for word, said in zip(words, ranks(1, refused)[0], strict=True):
        assert word in said
