"""Custom loops and sessions on real ranks: passes over a Dataset, metrics that are reset, and who may stop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands import distribute as tf_distribute
from manyhands.distribute import train
from manyhands.errors import ManyhandsError
from manyhands.testing import RankPool
from tests.distribute.test_replica_loops import Replicas
from tests.training.setup.keras_workloads import import_keras, warm_up

FEATURES = 2


def passes() -> dict[str, Any]:
    """Two passes over Datasets; values that have no usual form."""
    strategy = Replicas()
    shuffled = strategy.experimental_distribute_dataset(mh.Dataset.range(24).shuffle("full").batch(6))

    def dataset(context: tf_distribute.InputContext) -> mh.Dataset:
        part = mh.Dataset.range(24).shard(context.num_input_pipelines, context.input_pipeline_id)
        return part.shuffle(24).batch(context.get_per_replica_batch_size(6))

    own = strategy.distribute_datasets_from_function(dataset)
    context = strategy.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
    return {
        "global": [[strategy.gather(one, 0).tolist() for one in shuffled] for _ in range(2)],
        "own": [[strategy.gather(one, 0).tolist() for one in own] for _ in range(2)],
        "value": context,
        "dict": strategy.reduce("SUM", {"a": torch.tensor(1.0), "b": 2}),
        "gathered": strategy.run(
            lambda: tf_distribute.get_replica_context().all_gather(torch.ones(2), axis=0)
        ).tolist(),  # type: ignore[union-attr]
    }


def test_each_pass_over_a_dataset_is_another_epoch(ranks: RankPool) -> None:
    [alone] = ranks(1, passes)
    for rank, found in enumerate(ranks(2, passes)):
        assert found["global"] == alone["global"]
        for name in ("global", "own"):
            first, second = ([row for batch in one for row in batch] for one in found[name])
            assert sorted(first) == sorted(second) == list(range(24)) and first != second
        assert found["value"] == rank and found["dict"] == {"a": 2.0, "b": 4} and found["gathered"] == [1.0] * 4


def resets() -> list[float]:
    """A metric that begins anew in each run."""
    keras = import_keras()
    strategy, accuracy = Replicas(), keras.metrics.BinaryAccuracy()

    def step(targets: torch.Tensor) -> None:
        accuracy.reset_state()
        accuracy.update_state(targets, torch.ones_like(targets))

    found = []
    for right in (2, 1, 0, 3):
        targets = torch.tensor([1.0] * right + [0.0] * (4 - right))
        for batch in strategy.experimental_distribute_dataset([targets]):
            strategy.run(step, (batch,))
        found.append(float(accuracy.result()))
    return found


def test_a_metric_that_replicas_reset_begins_anew(ranks: RankPool) -> None:
    ranks(2, warm_up)
    assert ranks(2, resets) == [[0.5, 0.25, 0.0, 0.75]] * 2


class OwnGradients(torch.optim.SGD):
    def get_gradients(self, loss: Any, params: Any) -> Any:
        return torch.autograd.grad(loss, params)


class OwnReduction(torch.optim.SGD):
    calls = 0

    def reduce_grad(self, gradients: Any) -> Any:
        self.calls += 1
        return [largest(one) for one in gradients]


def largest(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(gradients).amax(0)


def refused() -> list[str]:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    strategy = Replicas(mh.Mirrored(reducer=largest))  # one: joining again takes a while
    calls = [
        lambda: strategy.run(OwnGradients([weight], lr=0.1).step),
        lambda: strategy.run(OwnReduction([weight], lr=0.1).step),
        lambda: strategy.reduce("SUM", torch.tensor(1.0), axis=0),
        lambda: strategy.gather(torch.tensor(1.0), axis=0),
    ]
    found = []
    for call in calls:
        try:
            call()
        except ManyhandsError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_what_a_replica_cannot_do_is_refused(ranks: RankPool) -> None:
    words = [
        "NotHere: OwnGradients has get_gradients",
        "NotHere: OwnReduction has reduce_grad, and the strategy a reducer",
        "SpecError: axis is 0, and this replica's value has 0 dimensions",
        "SpecError: axis is 0, and this replica's value has 0 dimensions",
    ]
    for found in ranks(2, refused):
        assert [said.startswith(one) for one, said in zip(words, found, strict=True)] == [True] * 4


def own_reduction(how: str) -> tuple[list[float], list[float], int]:
    """Replicas 0 and 1 have the gradients (1, 0) and (2, -5); the second weight is used by replica 1 alone."""
    strategy = Replicas(mh.Mirrored(reducer=largest if how == "reducer" else None))
    rank = strategy._replicas().rank
    weight, other, unused = (nn.Parameter(torch.zeros(size)) for size in (2, 1, 1))
    make: Any = OwnReduction if how == "optimizer" else torch.optim.SGD
    optimizer = make([weight, other, unused], lr=1.0)

    def step() -> None:
        optimizer.zero_grad()
        (weight * torch.tensor([[1.0, 0.0], [2.0, -5.0]][rank])).sum().backward()
        if rank == strategy._replicas().size - 1:
            (other * 3.0).sum().backward()
        optimizer.step()

    strategy.run(step)
    return weight.tolist(), other.tolist(), getattr(optimizer, "calls", 0)


def test_a_reduction_of_the_users_own_gets_every_replicas_gradients_once_per_step(ranks: RankPool) -> None:
    assert ranks(2, own_reduction, "sum") == [([-3.0, 5.0], [-3.0], 0)] * 2
    assert ranks(2, own_reduction, "reducer") == [([-2.0, 0.0], [-3.0], 0)] * 2
    assert ranks(2, own_reduction, "optimizer") == [([-2.0, 0.0], [-3.0], 1)] * 2
    assert ranks(1, own_reduction, "optimizer") == [([-1.0, 0.0], [-3.0], 1)], "with one replica, too"


def mean_loss(model: nn.Module, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, 1)


def stops(how: str, directory: str) -> tuple[int, int]:
    """The steps of a session of 8 that one worker ends."""
    x = torch.arange(64.0).view(32, FEATURES) / 64
    train_op = train.GradientDescentOptimizer(0.1).minimize(
        mean_loss, model=make, data=(x, x.sum(1, keepdim=True)), batch_size=4
    )
    chief_only = [train.StopAtStepHook(last_step=5)] if how == "chief" else []
    with train.MonitoredTrainingSession(
        checkpoint_dir=directory, chief_only_hooks=chief_only, save_summaries_steps=None
    ) as session:
        while not session.should_stop():
            session.run(train_op)
            if how == "coord" and session.global_step == 3 and session.hands.rank == 1:
                session.coord.request_stop()
    return session.global_step, session.hands.world_size


@pytest.mark.parametrize(("how", "steps"), [("chief", [5, 5]), ("coord", [5, 4])])
def test_a_session_ends_on_all_workers_when_the_chief_or_one_of_them_says(
    ranks: RankPool, tmp_path: Any, how: str, steps: list[int]
) -> None:
    found = ranks(2, stops, how, str(tmp_path))
    assert found[0] == found[1] and found[0][0] in steps and found[0][1] == 2
