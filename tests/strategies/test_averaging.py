"""Local SGD: the weights of all workers against loops by hand in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.data.sample_order import order
from manyhands.errors import SpecError
from manyhands.parallel.averaging.rounds import Rounds, pairs
from manyhands.testing import RankPool
from manyhands.training.setup.engine_factory import averaging_of
from tests.training.workloads import MODELS, OPTIMIZERS, data, make_trainer, mean_loss, train

ROWS, BATCH = 96, 24
"""Four whole batches an epoch, of equal parts for two or three workers."""


def train_averaged(local_sgd: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    arguments = {"rows": ROWS, "slices": 6, **arguments}
    return train(strategy=mh.LocalSGD(**local_sgd), **arguments)


def train_mirrored(arguments: dict[str, Any]) -> dict[str, Any]:
    return train(rows=ROWS, slices=6, **arguments)


Flat = list[np.ndarray]


def by_hand(
    workers: int,
    sync: Callable[[int, list[Flat]], list[Flat]],
    *,
    optimizer: str = "SGD",
    epochs: int = 2,
    model: str = "plain",
) -> dict[str, np.ndarray]:
    """Every worker's weights in one process; `sync` says what becomes of them after each step."""
    torch.manual_seed(0)
    first = MODELS[model]().train()
    models = [first]
    for _ in range(workers - 1):
        models.append(MODELS[model]().train())
        models[-1].load_state_dict(first.state_dict())
    optimizers = [OPTIMIZERS[optimizer](one.parameters()) for one in models]
    x, y = data(ROWS)
    for step in range(epochs * ROWS // BATCH):
        epoch, start = divmod(step * BATCH, ROWS)
        taken = torch.from_numpy(order(ROWS, 0, epoch, start, start + BATCH))
        for one, optim, rows in zip(models, optimizers, taken.chunk(workers), strict=True):
            optim.zero_grad()
            mean_loss(one, (x[rows], y[rows])).backward()
            optim.step()
        write(models, sync(step + 1, [read(one) for one in models]))
    return {name: value.numpy() for name, value in models[0].state_dict().items()}


def read(model: nn.Module) -> Flat:
    return [param.detach().numpy().astype(np.float64) for param in model.parameters()]


def write(models: Sequence[nn.Module], values: list[Flat]) -> None:
    with torch.no_grad():
        for model, own in zip(models, values, strict=True):
            for param, value in zip(model.parameters(), own, strict=True):
                param.copy_(torch.from_numpy(value))


def mean_of(workers: list[Flat]) -> Flat:
    return [sum(column) / len(column) for column in zip(*workers, strict=True)]


def is_due(step: int, every: int) -> bool:
    """A round ends with its epoch, too."""
    return step % every == 0 or step % (ROWS // BATCH) == 0


def close(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 2e-6) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=tolerance * max(1.0, np.abs(value).max()))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_averaged_after_every_step_sgd_is_what_mirrored_is(ranks: RankPool, workers: int) -> None:
    (alone,) = ranks(1, train_mirrored, {})
    for result in ranks(workers, train_averaged, {"every": 1}, {}):
        close(result["weights"], alone["weights"])
        assert result["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-5)
        assert [row["loss"] for row in result["history"]] == pytest.approx(
            [row["loss"] for row in alone["history"]], rel=1e-5
        )


def test_weighted_by_rows_it_is_so_for_uneven_parts_too(ranks: RankPool) -> None:
    uneven = {"rows": 90, "slices": 5, "weighted": False}
    (alone,) = ranks(1, train_kwargs, uneven)
    for result in ranks(2, train_averaged, {"every": 1, "rule": "weighted"}, uneven):
        close(result["weights"], alone["weights"])


def train_kwargs(arguments: dict[str, Any]) -> dict[str, Any]:
    return train(**arguments)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_local_sgd_is_the_mean_after_every_round(ranks: RankPool, optimizer: str) -> None:
    def sync(step: int, workers: list[Flat]) -> list[Flat]:
        return [mean_of(workers)] * len(workers) if is_due(step, 3) else workers

    expected = by_hand(2, sync, optimizer=optimizer)
    first, second = ranks(2, train_averaged, {"every": 3}, {"optimizer": optimizer})
    close(first["weights"], expected)
    assert_same(first, second)


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name, value in first["weights"].items():
        assert value.tobytes() == second["weights"][name].tobytes(), name
    assert first["history"] == second["history"] and first["evaluation"] == second["evaluation"]


def test_diloco_takes_its_outer_step(ranks: RankPool) -> None:
    state: dict[str, Flat] = {}

    def sync(step: int, workers: list[Flat]) -> list[Flat]:
        if not is_due(step, 2):
            return workers
        outer = state["outer"]
        velocity = state.setdefault("velocity", [np.zeros_like(one) for one in outer])
        for i, middle in enumerate(mean_of(workers)):
            delta = outer[i] - middle
            velocity[i] = 0.9 * velocity[i] + delta
            outer[i] = outer[i] - 0.7 * (delta + 0.9 * velocity[i])
        return [list(outer)] * len(workers)

    torch.manual_seed(0)
    state["outer"] = read(MODELS["plain"]())
    expected = by_hand(2, sync, optimizer="AdamW")
    arguments = {"every": 2, "outer": "nesterov"}
    for result in ranks(2, train_averaged, arguments, {"optimizer": "AdamW"}):
        close(result["weights"], expected)


def test_easgd_moves_both_sides_and_ends_at_the_center(ranks: RankPool) -> None:
    torch.manual_seed(0)
    center = read(MODELS["plain"]())
    alpha = 0.9 / 2

    def sync(step: int, workers: list[Flat]) -> list[Flat]:
        nonlocal center
        last = step % (ROWS // BATCH) == 0
        if step % 2 and not last:
            return workers
        pulls = [[alpha * (x - c) for x, c in zip(own, center, strict=True)] for own in workers]
        moved = [[x - d for x, d in zip(own, pull, strict=True)] for own, pull in zip(workers, pulls, strict=True)]
        center = [c + sum(d) for c, d in zip(center, zip(*pulls, strict=True), strict=True)]
        return [center, center] if last else moved

    expected = by_hand(2, sync)
    for result in ranks(2, train_averaged, {"every": 2, "outer": "elastic"}, {}):
        close(result["weights"], expected)


def test_pairs_average_two_and_two_and_all_at_the_end_of_an_epoch(ranks: RankPool) -> None:
    def sync(step: int, workers: list[Flat]) -> list[Flat]:
        if step % (ROWS // BATCH) == 0:
            return [mean_of(workers)] * len(workers)
        after = list(workers)
        for a, b in pairs(0, step, range(len(workers))):
            after[a] = after[b] = mean_of([workers[a], workers[b]])
        return after

    expected = by_hand(3, sync)
    for result in ranks(3, train_averaged, {"every": 1, "peers": "pairs"}, {}):
        close(result["weights"], expected)


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_a_robust_rule_of_three_workers_is_the_one_in_the_middle(ranks: RankPool, rule: str) -> None:
    def sync(step: int, workers: list[Flat]) -> list[Flat]:
        middle = [np.median(np.stack(column), axis=0) for column in zip(*workers, strict=True)]
        return [middle] * 3 if is_due(step, 2) else workers

    expected = by_hand(3, sync)
    for result in ranks(3, train_averaged, {"every": 2, "rule": rule}, {}):
        close(result["weights"], expected)


def test_post_local_averages_every_step_until_the_switch(ranks: RankPool) -> None:
    def sync(step: int, workers: list[Flat]) -> list[Flat]:
        return [mean_of(workers)] * 2 if step <= 3 or is_due(step - 3, 4) or step % 4 == 0 else workers

    expected = by_hand(2, sync)
    for result in ranks(2, train_averaged, {"every": 4, "post_local": 3}, {}):
        close(result["weights"], expected)


def test_streaming_fragments_arrive_late_and_are_mixed_in(ranks: RankPool) -> None:
    """Two fragments, one Linear layer each, begun after steps 1 and 2 of every two, applied a step later."""
    torch.manual_seed(0)
    outer = read(MODELS["plain"]())
    velocity = [np.zeros_like(one) for one in outer]
    rounds, members = Rounds(every=2, fragments=2, overlap=1), {0: (0, 1), 1: (2, 3)}
    flying: dict[int, Flat] = {}

    def apply(fragment: int, workers: list[Flat], share: float) -> None:
        for i, delta in zip(members[fragment], flying.pop(fragment), strict=True):
            velocity[i] = 0.9 * velocity[i] + delta
            outer[i] = outer[i] - 0.7 * (delta + 0.9 * velocity[i])
            for own in workers:
                own[i] = share * own[i] + (1 - share) * outer[i]

    def begin(fragment: int, workers: list[Flat]) -> None:
        flying[fragment] = [outer[i] - mean_of(workers)[i] for i in members[fragment]]

    def sync(step: int, workers: list[Flat]) -> list[Flat]:
        workers = [list(own) for own in workers]
        if step % (ROWS // BATCH) == 0:
            for fragment in list(flying):
                apply(fragment, workers, 0.5)
            for fragment in members:
                begin(fragment, workers)
                apply(fragment, workers, 0.0)
            return workers
        for fragment in list(flying):
            apply(fragment, workers, 0.5)
        for fragment in rounds.begins(step):
            begin(fragment, workers)
        return workers

    expected = by_hand(2, sync)
    asked = {"every": 2, "fragments": 2, "overlap": 1, "outer": "nesterov"}
    for result in ranks(2, train_averaged, asked, {}):
        close(result["weights"], expected)
    rounded = ranks(2, train_averaged, {**asked, "reducer": "bf16"}, {})
    assert_same(*rounded)
    close(rounded[0]["weights"], expected, 5e-3)
    assert any(np.abs(rounded[0]["weights"][name] - value).max() > 1e-6 for name, value in expected.items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_statistics_are_averaged_and_all_else_works_as_usual(ranks: RankPool, precision: str) -> None:
    arguments = {
        "model": "dropout and BatchNorm",
        "optimizer": "AdamW",
        "clip_norm": 0.5,
        "precision": precision,
        "weighted": True,
        "rows": 90,
    }
    first, second = ranks(2, train_averaged, {"every": 3}, arguments)
    assert_same(first, second)
    assert first["predictions"].tobytes() == second["predictions"].tobytes()
    again, _ = ranks(2, train_averaged, {"every": 3}, arguments)
    assert_same(first, again)
    assert first["weights"]["1.running_mean"].any()


def test_a_worker_without_a_slice_joins_the_averaging(ranks: RankPool) -> None:
    results = ranks(3, train_averaged, {"every": 2, "rule": "weighted"}, {"rows": 49, "slices": 6})
    for other in results[1:]:
        assert_same(results[0], other)


def own_loop(every: int) -> dict[str, Any]:
    hands = mh.join(strategy=mh.LocalSGD(every=every), slices=6)
    torch.manual_seed(0)
    model = MODELS["plain"]()
    model, _ = hands.setup(model, OPTIMIZERS["SGD"](model.parameters()))
    middle = []
    for batch in hands.batches(data(ROWS), batch_size=BATCH, epochs=2):
        hands.backward(mean_loss(model, batch))
        hands.step()
        if hands.stepped and hands.steps_done == 5:
            own = [param.detach().clone() for param in model.parameters()]
            middle.append(hands.evaluate(data(ROWS), mean_loss)["loss"])
            assert all(torch.equal(param, before) for param, before in zip(model.parameters(), own, strict=True))
    return {"weights": {name: value.numpy() for name, value in model.state_dict().items()}, "middle": middle}


def test_a_loop_of_ones_own_does_the_same_and_evaluates_the_mean(ranks: RankPool) -> None:
    seen: list[float] = []

    def sync(step: int, workers: list[Flat]) -> list[Flat]:
        if step == 5:
            model = MODELS["plain"]()
            write([model], [mean_of(workers)])
            seen.append(float(mean_loss(model, data(ROWS)).detach()))
        return [mean_of(workers)] * 2 if is_due(step, 3) else workers

    expected = by_hand(2, sync)
    for result in ranks(2, own_loop, 3):
        close(result["weights"], expected)
        assert result["middle"] == pytest.approx(seen, rel=1e-5)


def refused(local_sgd: dict[str, Any], arguments: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as error:
        make_trainer(strategy=mh.LocalSGD(**local_sgd), **arguments).fit(data(), epochs=1, batch_size=24)
    return str(error.value)


@pytest.mark.parametrize(
    ("local_sgd", "arguments", "words"),
    [
        ({}, {"exact": True}, "depends on the number of workers"),
        ({}, {"balance": True}, "which worker trains on which slice"),
        ({}, {"audit": True}, "their weights differ"),
        ({"reducer": "int8"}, {}, 'reducer="bf16"'),
        ({}, {"optimizer": "LBFGS"}, "LBFGS keeps a list"),
        ({"fragments": 3}, {}, "fragments=2"),
        ({"every": 0}, {}, "every=1"),
        ({"outer": "nestrov"}, {}, 'outer="nesterov"'),
        ({"rule": "mode"}, {}, 'rule="median"'),
        ({"fragments": 8, "every": 4}, {}, "fragments=4"),
        ({"fragments": 2, "every": 8, "overlap": 5}, {}, "overlap=4"),
        ({"overlap": 1, "outer": "elastic"}, {}, "overlap=0"),
        ({"overlap": 1, "post_local": 3}, {}, "post_local=0"),
        ({"peers": "pairs", "outer": "nesterov"}, {}, "outer='mean'"),
        ({"trim": 0.5}, {}, "trim=0.2"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_work_is_refused_with_what_to_type(
    ranks: RankPool, local_sgd: dict[str, Any], arguments: dict[str, Any], words: str
) -> None:
    (error,) = ranks(1, refused, local_sgd, arguments)
    assert words in error


def test_diloco_is_a_name_for_it() -> None:
    from manyhands.training.worker.strategy_lookup import as_strategy

    found = as_strategy("diloco")
    assert isinstance(found, mh.LocalSGD) and averaging_of(found).outer.kind == "nesterov"
