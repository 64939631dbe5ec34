"""Several trainings in one script: each is what it would be in a separate script."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.errors import Preempted
from manyhands.events import StepDone
from manyhands.observe.run_audit import audit
from manyhands.spec.training_directory import home_of
from manyhands.testing import RankFailed, RankPool
from manyhands.training.elastic.recovery_decision import WorkerProgress, decide
from tests.stopping import StopAt
from tests.training.workloads import CLASSES, OPTIMIZERS, data, mean_loss


def rows() -> Any:
    return data(24)


def make(seed: int, strategy: str, model: Any = None) -> mh.Trainer:
    choices: dict[str, Any] = {
        "mirrored": "mirrored",
        "tensor": mh.TensorParallel(),
        "parameters": mh.Sharded("parameters"),
        "averaged": mh.LocalSGD(every=2),
    }
    net = model or (lambda: nn.Sequential(nn.Linear(rows()[0].shape[1], 16), nn.Tanh(), nn.Linear(16, CLASSES)))
    return mh.Trainer(net, mean_loss, OPTIMIZERS["AdamW"], choices[strategy], seed=seed, slices=4)


def losses(history: Any) -> list[float]:
    return [row["loss"] for row in history]


def one_alone(seed: int, strategy: str) -> list[float]:
    return losses(make(seed, strategy).fit(rows(), epochs=2, batch_size=8))


def two_in_turns(strategy: str) -> list[list[float]]:
    """Two that take turns: the first trains an epoch, then the second two, then the first its second."""
    first, second = make(1, strategy), make(2, strategy)
    begun = losses(first.fit(rows(), epochs=1, batch_size=8))
    other = losses(second.fit(rows(), epochs=2, batch_size=8))
    return [begun + losses(first.fit(rows(), epochs=1, batch_size=8)), other]


@pytest.mark.parametrize("strategy", ["mirrored", "tensor", "parameters", "averaged"])
def test_trainings_that_take_turns_are_each_what_they_are_alone(ranks: RankPool, strategy: str) -> None:
    alone = [ranks(2, one_alone, seed, strategy)[0] for seed in (1, 2)]
    for together in ranks(2, two_in_turns, strategy):
        assert together == [pytest.approx(one, rel=1e-6) for one in alone]


def one_model_in_two(run_dir: str) -> tuple[list[float], list[float], list[float]]:
    """A second training trains the first one's model; then the first evaluates it."""
    first = make(1, "mirrored")
    first.fit(rows(), epochs=1, batch_size=8)
    second = make(2, "mirrored", first.model)
    history = losses(second.fit(rows(), epochs=1, batch_size=8))
    return history, list(first.evaluate(rows()).values()), list(second.evaluate(rows()).values())


def copied_model() -> list[float]:
    first = make(1, "mirrored")
    first.fit(rows(), epochs=1, batch_size=8)
    net = nn.Sequential(nn.Linear(rows()[0].shape[1], 16), nn.Tanh(), nn.Linear(16, CLASSES))
    net.load_state_dict(first.model.state_dict())
    return losses(make(2, "mirrored", net).fit(rows(), epochs=1, batch_size=8))


def evaluate_a_copy(run_dir: str, stop_at: int | None) -> list[float]:
    """The first training continues after a copy of it was evaluated, and is stopped then."""
    inputs = rows()[0].shape[1]
    first = mh.Trainer(
        lambda: nn.Linear(inputs, CLASSES),
        mean_loss,
        OPTIMIZERS["SGD"],
        slices=2,
        run_dir=run_dir,
        hooks=[StopAt(stop_at)],
    )
    first.fit(rows(), epochs=1, batch_size=8)
    copy = nn.Linear(inputs, CLASSES)
    copy.load_state_dict(first.model.state_dict())
    found = mh.Trainer(copy, mean_loss, OPTIMIZERS["SGD"], slices=2).evaluate(rows())
    with contextlib.suppress(Preempted):
        first.fit(rows(), epochs=2, batch_size=8)
    return list(found.values())


def test_a_copy_that_was_only_evaluated_is_the_same_after_a_resume(ranks: RankPool, tmp_path: Path) -> None:
    before = ranks(2, evaluate_a_copy, str(tmp_path), 7, run_dir=tmp_path)
    after = ranks(2, evaluate_a_copy, str(tmp_path), None, run_dir=tmp_path)
    assert after == before


def test_a_model_goes_from_one_training_to_the_next(ranks: RankPool, tmp_path: Path) -> None:
    alone, *_ = ranks(1, copied_model)
    for history, by_first, by_second in ranks(2, one_model_in_two, str(tmp_path)):
        assert history == pytest.approx(alone, rel=1e-6)
        assert by_first == by_second


def trainer_and_join(order: str) -> list[float]:
    x, y = rows()

    def by_trainer() -> list[float]:
        return losses(make(1, "mirrored").fit((x, y), epochs=1, batch_size=8))

    def by_hand() -> list[float]:
        hands = mh.join("mirrored", seed=5, slices=4)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(x.shape[1], 16), nn.Tanh(), nn.Linear(16, CLASSES))
        model, _ = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        found = []
        for batch in hands.batches((x, y), batch_size=8, epochs=1):
            hands.backward(mean_loss(model, batch))
            hands.step()
            if hands.stepped:
                found.append(hands.loss)
        return found

    turns = {"t": by_trainer, "h": by_hand}
    return sorted(value for turn in order for value in turns[turn]())


def test_a_join_may_come_before_a_trainer_or_after_it(ranks: RankPool) -> None:
    alone = sorted([*ranks(1, trainer_and_join, "t")[0], *ranks(1, trainer_and_join, "h")[0]])
    for order in ("th", "ht"):
        for found in ranks(2, trainer_and_join, order):
            assert found == pytest.approx(alone, rel=1e-6)


def made_on_one(used: bool) -> None:
    from manyhands.training.worker.worker import _current_session

    if _current_session.get()[0].identity.rank == 0:
        extra = make(1, "mirrored")
        if used:
            extra.fit(rows(), epochs=1, batch_size=8)
    make(1, "mirrored").fit(rows(), epochs=1, batch_size=8)


@pytest.mark.parametrize("used", [True, False])
def test_trainings_that_differ_between_workers_are_an_error_that_names_both(ranks: RankPool, used: bool) -> None:
    with pytest.raises(RankFailed, match=r"on rank 0 training .*; on rank 1 training"):
        ranks(2, made_on_one, used)


def test_the_first_training_keeps_the_run_directory_itself() -> None:
    assert home_of(Path("run"), 1) == Path("run")
    assert home_of(Path("run"), 3) == Path("run/trainings/3")


def test_no_state_is_taken_from_one_training_for_another() -> None:
    ended = WorkerProgress(call=2, step=8, use=1, operation=3, doing="something else", done=True, has_state=True)
    begun = WorkerProgress(call=2, step=0, use=2, operation=1, doing="steps", done=False, has_state=False)
    source, needed, arrival = decide([ended, begun], 0)
    assert (source, needed, arrival.all_done) == (None, False, True)
    assert not decide([ended, begun], 1)[2].received


def step_of(training: int, step: int) -> StepDone:
    start = (0, 8 * (step - 1))
    return StepDone(
        step=step, epoch=0, loss=1.0, rows=8, samples_per_s=1.0, phases={}, start=start, training=training, time_s=step
    )


@pytest.mark.forged_record
def test_the_ledger_counts_the_steps_of_each_training_separately() -> None:
    sound = audit([step_of(1, 1), step_of(1, 2), step_of(2, 1), step_of(2, 2), step_of(2, 3)])
    assert (sound.problems, sound.last_step, sound.recorded) == ([], 5, 5)
    torn = audit([step_of(1, 1), step_of(2, 1), step_of(2, 1)])
    assert torn.recorded == 2
    lost = audit([step_of(1, 1), step_of(2, 1), step_of(2, 3)])
    assert lost.unrecorded == 1
