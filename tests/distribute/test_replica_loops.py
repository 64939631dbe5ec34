"""Loops with `strategy.run` on real ranks: they end where one process on the whole batch ends, or say why not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands import distribute as tf_distribute
from manyhands.distribute.replica_exchange import CHECK_EVERY
from manyhands.distribute.replica_strategy import ReplicaStrategy
from manyhands.errors import ManyhandsError
from manyhands.testing import RankPool
from tests.training.setup.keras_workloads import import_keras, warm_up

ROWS, BATCH, FEATURES = 50, 20, 6


class Replicas(ReplicaStrategy):
    """A strategy without Keras's scope."""

    def __init__(self, choice: Any = None, **joined: Any) -> None:
        self.choice, self.joined = choice or mh.Mirrored(), joined


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return x, (x[:, 0] > 0).long()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = rows()
    return [(x[low : low + BATCH], y[low : low + BATCH]) for low in range(0, ROWS, BATCH)]


def torch_loop(make_unlike: bool = False, choice: Any = None) -> dict[str, Any]:
    """The last batch has 10 rows; with three replicas 20 rows do not divide."""
    strategy = Replicas(choice)
    torch.manual_seed(1 + (strategy._replicas().rank if make_unlike else 0))
    model = nn.Linear(FEATURES, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, sizes, ids = [], [], []

    def step(x: torch.Tensor, y: torch.Tensor, size: int) -> torch.Tensor:
        context = tf_distribute.get_replica_context()
        ids.append((context.replica_id_in_sync_group, context.num_replicas_in_sync))
        sizes.append(len(x))
        optimizer.zero_grad()
        loss = tf_distribute.compute_average_loss(
            nn.functional.cross_entropy(model(x), y, reduction="none"), global_batch_size=size
        )
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = strategy.experimental_distribute_dataset(batches())
    for _ in range(2):
        for (x, y), whole in zip(data, batches(), strict=True):
            loss = strategy.experimental_run_v2(step, args=(x, y, len(whole[0])))
            losses.append(float(strategy.reduce(tf_distribute.ReduceOp.SUM, loss, axis=None)))
    mine = torch.arange(3.0) + 10 * ids[0][0]
    return {
        "weights": model.weight.detach().numpy().copy(),
        "losses": losses,
        "sizes": sizes[:3],
        "ids": ids[0],
        "mean": float(strategy.reduce("MEAN", mine[: 1 + ids[0][0]], axis=0)),
        "list": float(strategy.reduce("SUM", [torch.tensor(1.0), torch.tensor(2.0)], axis=None)),
        "gathered": strategy.gather(mine, axis=0).tolist(),
        "state": len(optimizer.state),
        "outside": tf_distribute.get_strategy().num_replicas_in_sync,
    }


def test_replicas_of_a_torch_loop_end_where_one_process_ends(ranks: RankPool) -> None:
    alone = ranks(1, torch_loop)[0]
    for world_size in (2, 3):
        found = ranks(world_size, torch_loop)
        for rank, one in enumerate(found):
            assert one["ids"] == (rank, world_size) and one["outside"] == 1
            np.testing.assert_allclose(one["losses"], alone["losses"], rtol=1e-5)
            np.testing.assert_allclose(one["weights"], alone["weights"], rtol=0, atol=1e-6)
            assert one["weights"].tobytes() == found[0]["weights"].tobytes()
            assert one["list"] == 3.0 * world_size
        assert [sum(one["sizes"][index] for one in found) for index in range(3)] == [20, 20, 10]
    # Replica 0 has one row (0), replica 1 two (10 and 11): the mean over rows, not the mean of means.
    two = ranks(2, torch_loop)
    assert two[0]["mean"] == two[1]["mean"] == pytest.approx(21 / 3)
    assert two[0]["gathered"] == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]


def test_replicas_of_central_storage_have_one_copy_of_the_weights_and_of_the_optimizers_state(ranks: RankPool) -> None:
    alone = ranks(1, torch_loop, False, mh.CentralStorage())[0]
    mirrored = ranks(2, torch_loop)[0]
    for rank, one in enumerate(ranks(2, torch_loop, False, mh.CentralStorage())):
        assert one["ids"] == (rank, 2) and one["state"] == (2 if rank == 0 else 0)
        np.testing.assert_allclose(one["losses"], alone["losses"], rtol=1e-5)
        assert one["weights"].tobytes() == mirrored["weights"].tobytes()


def in_one_memory(break_it: bool) -> list[float] | str:
    """What each replica reads after replica 1 alone has written; or what a step outside of `run` says."""
    strategy, weight = Replicas(mh.CentralStorage()), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    exchange = strategy._replicas()

    def step() -> None:
        weight.grad = torch.ones(3)
        optimizer.step()

    strategy.run(step)
    if break_it:
        weight.grad = torch.ones(3)
        return error_of(lambda: (optimizer.step(), strategy.run(step)))
    if exchange.rank == 1:
        weight.data[1] = 7.0
    exchange.gather(torch.zeros(1))
    return weight.tolist()


def test_the_weights_of_central_storage_are_in_memory_that_all_replicas_see(ranks: RankPool) -> None:
    assert ranks(2, in_one_memory, False) == [[0.0, 7.0, 0.0]] * 2
    for said in ranks(2, in_one_memory, True):
        assert isinstance(said, str) and "changed outside of strategy.run" in said


def keras_loop(distributed: bool, apply: str, choice: Any = None) -> dict[str, Any]:
    """TensorFlow's guide of custom training, with its imports changed."""
    keras = import_keras()
    strategy = Replicas(choice or (mh.Mirrored() if distributed else mh.Single()))
    strategy._replicas()
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(2),
        ]
        if apply == "statistics"
        else [keras.Input((FEATURES,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)]
    )
    optimizer = keras.optimizers.Adam(0.05)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    def train_step(inputs: Any, size: int) -> Any:
        images, labels = inputs
        with tf_distribute.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = tf_distribute.compute_average_loss(loss_object(labels, predictions), global_batch_size=size)
        gradients = tape.gradient(loss, model.trainable_variables)
        if apply == "apply":
            optimizer.apply(gradients, model.trainable_variables)
        else:
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    results = []
    for _ in range(2):
        total = 0.0
        for inputs, whole in zip(strategy.experimental_distribute_dataset(batches()), batches(), strict=True):
            total += float(strategy.reduce("SUM", strategy.run(train_step, args=(inputs, len(whole[0]))), axis=None))
        results.append((total, float(accuracy.result())))
        accuracy.reset_state()
    weights = [np.array(one) for one in model.get_weights()]
    return {"weights": weights, "results": results, "steps": int(optimizer.iterations)}


@pytest.fixture
def _keras(ranks: RankPool) -> None:
    ranks(2, warm_up)


@pytest.mark.usefixtures("_keras")
@pytest.mark.parametrize("apply", ["apply_gradients", "apply"])
def test_a_keras_loop_aggregates_gradients_and_metrics(ranks: RankPool, apply: str) -> None:
    [alone] = ranks(1, keras_loop, False, apply)
    first, second = ranks(2, keras_loop, True, apply)
    assert first["steps"] == second["steps"] == alone["steps"] == 6
    for one in (first, second):
        np.testing.assert_allclose(one["results"], alone["results"], rtol=1e-4)
        for mine, expected in zip(one["weights"], alone["weights"], strict=True):
            np.testing.assert_allclose(mine, expected, rtol=0, atol=2e-5)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first["weights"], second["weights"], strict=True))


@pytest.mark.usefixtures("_keras")
def test_a_keras_loop_with_central_storage_ends_where_replicas_end(ranks: RankPool) -> None:
    mirrored = ranks(2, keras_loop, True, "apply_gradients")[0]
    for found in ranks(2, keras_loop, True, "apply_gradients", mh.CentralStorage()):
        assert found["steps"] == 6 and found["results"] == mirrored["results"]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found["weights"], mirrored["weights"], strict=True))


@pytest.mark.usefixtures("_keras")
def test_batch_statistics_are_the_mean_over_the_replicas(ranks: RankPool) -> None:
    first, second = ranks(2, keras_loop, True, "statistics")
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first["weights"], second["weights"], strict=True))
    assert len(first["weights"]) == 8 and not np.allclose(first["weights"][4], 0)


def shuffled(kind: str) -> list[list[int]]:
    """The rows of each batch of two epochs, with a model that draws numbers in between."""
    strategy = Replicas()
    rank = strategy._replicas().rank
    loader = torch.utils.data.DataLoader(torch.arange(12), batch_size=4, shuffle=True)
    found = []
    if kind == "unlike":
        loader = [torch.arange(4) + rank]  # type: ignore[assignment]
    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(loader):
            torch.rand(1 + rank)  # dropout on replicas of different sizes
            found.append(batch.tolist())
    return found


def own(kind: str) -> list[int]:
    strategy = Replicas()

    def dataset(context: tf_distribute.InputContext) -> list[torch.Tensor]:
        size = context.get_per_replica_batch_size(4)
        many = 2 + (context.input_pipeline_id if kind == "unequal" else 0)
        return [torch.arange(size) + 10 * context.input_pipeline_id] * many

    def pair() -> tuple[list[int], list[int]]:
        return [1, 2], [3]

    if kind == "pair":
        training, test = strategy.distribute_datasets_from_function(pair)
        return [*training, *test]
    return [len(one) for one in strategy.experimental_distribute_datasets_from_function(dataset)]


def test_data_is_read_in_one_order_and_cut_by_replica(ranks: RankPool) -> None:
    first, second = ranks(2, shuffled, "alike")
    both = [row for batches in zip(first, second, strict=True) for batch in batches for row in batch]
    epochs = [sorted(both[:12]), sorted(both[12:])]
    assert epochs == [list(range(12))] * 2
    assert first[:3] != first[3:], "another order in the next epoch"
    assert ranks(2, own, "equal") == [[2, 2]] * 2 and ranks(2, own, "pair") == [[1, 2, 3]] * 2


def error_of(make: Any, *args: Any) -> str:
    try:
        make(*args)
    except ManyhandsError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def wrong() -> list[str]:
    """What each of these says; those that stop before anything differs share a strategy, as joining takes a while."""
    shared = Replicas()

    def run(choice: Any = None, **joined: Any) -> None:
        Replicas(choice, **joined).run(lambda: None)

    def few() -> None:
        list(shared.experimental_distribute_dataset([torch.zeros(1, 2)]))

    def closure() -> None:
        optimizer = torch.optim.LBFGS(nn.Linear(2, 1).parameters())
        shared.run(lambda: optimizer.step(lambda: 0.0))

    def outside() -> None:
        strategy, weight = Replicas(), nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.grad = torch.ones(1)
        strategy.run(optimizer.step)
        weight.grad = torch.tensor([float(strategy._replicas().rank)])
        optimizer.step()  # of this worker's gradient
        weight.grad = torch.zeros(1)
        for _ in range(CHECK_EVERY):
            strategy.run(optimizer.step)

    def nested() -> None:
        shared.run(lambda: shared.run(lambda: None))

    def reduce_inside() -> None:
        shared.run(lambda: shared.reduce("SUM", torch.ones(1)))

    return [
        error_of(shuffled, "unlike"),
        error_of(torch_loop, True),
        error_of(closure),
        error_of(outside),
        error_of(own, "unequal"),
        error_of(few),
        error_of(nested),
        error_of(reduce_inside),
        error_of(run, mh.ParameterServer()),
        error_of(run, mh.Sharded()),
        error_of(run, mh.Mirrored(reducer="bf16")),
        error_of(lambda: run(clip_norm=1.0)),
        error_of(run, mh.Mirrored(elastic=(1, 2))),
        error_of(lambda: shared.reduce("MAX", torch.ones(1))),
    ]


def test_what_would_be_wrong_is_an_error(ranks: RankPool) -> None:
    words = [
        "DataError: The workers read different batches: 4 rows, 4 rows, of different values",
        "Diverged: The replicas have different weights",
        "NotHere: LBFGS.step gets a closure",
        "Diverged: The replicas have different weights",
        "DataError: After 2 batches the data of replicas 0 has ended",
        "DataError: A batch of 1 rows is for 2 replicas",
        "UsageError: run was called inside of a run",
        "UsageError: reduce was called inside of run",
        "NotHere: Replicas has no replicas to run, reduce or gather over: servers have the weights",
        "NotHere: Replicas.run would compute on replicas, and mh.Sharded keeps",
        "SpecError: reducer='bf16' is how our steps send gradients",
        "SpecError: clip_norm=1.0 is about steps that we take",
        "SpecError: elastic= is not for a loop",
        "SpecError: 'MAX' is no reduction",
    ]
    for found in ranks(2, wrong):
        for expected, said in zip(words, found, strict=True):
            assert said.startswith(expected)


def branching_loop() -> dict[str, Any]:
    """Each replica's row goes through one of two layers of the same shape: in the first step another one on each."""
    strategy = Replicas()
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Linear(FEATURES, 2) for _ in range(2))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    x, y = rows()

    def step(chosen: torch.Tensor) -> None:
        optimizer.zero_grad()
        outputs = [layers[int(row) % 2](x[row]) for row in chosen]
        losses = nn.functional.cross_entropy(torch.stack(outputs), y[chosen], reduction="none")
        tf_distribute.compute_average_loss(losses, global_batch_size=2).backward()
        optimizer.step()

    for chosen in strategy.experimental_distribute_dataset([torch.tensor([0, 1]), torch.tensor([2, 4])]):
        strategy.run(step, (chosen,))
    return {name: value.detach().numpy().copy() for name, value in layers.state_dict().items()}


def test_a_layer_that_one_replica_uses_gets_its_gradient_and_no_other_layers(ranks: RankPool) -> None:
    [alone] = ranks(1, branching_loop)
    for found in ranks(2, branching_loop):
        for name, value in alone.items():
            np.testing.assert_allclose(found[name], value, atol=1e-6, err_msg=name)


def away() -> str:
    strategy, weight = Replicas(mh.CentralStorage()), nn.Parameter(torch.ones(2, device="meta"))
    exchange = strategy._replicas()
    assert exchange.central is not None
    return error_of(exchange.central.adopt, [weight])


def test_weights_on_a_device_are_not_taken_into_the_hosts_memory(ranks: RankPool) -> None:
    assert all(said.startswith("NotHere: A weight is on meta") for said in ranks(2, away))
