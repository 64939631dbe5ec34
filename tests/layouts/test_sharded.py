"""Memory divided over the workers: the same bits as one process, in a part of the memory."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyhands as mh
from manyhands.errors import SpecError
from manyhands.spec.load import resolve
from manyhands.testing import RankPool
from tests.layouts.sharded_cases import edit_and_train, own_loop, refused, refused_loop, train, train_until, watched
from tests.variants import variants

OVER_SOCKETS = {"comm.plane": "gloo"}
WAYS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "parameters, 2 workers": (2, mh.Sharded(), {}),
    "parameters, 3 workers over sockets": (3, mh.Sharded(), OVER_SOCKETS),
    "gradients, 3 workers over sockets": (3, mh.Sharded("gradients"), OVER_SOCKETS),
    "optimizer, 3 workers": (3, mh.Sharded("optimizer"), {}),
    "central storage, 2 workers": (2, mh.CentralStorage(), {}),
}


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> Any:
    """What one process makes of a case, computed once."""

    @cache
    def once(model: str, arguments: tuple[tuple[str, Any], ...], fit: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
        [result] = ranks(1, train, model, mh.Single(), dict(arguments), dict(fit))
        return result

    return lambda model, arguments, fit: once(model, tuple(arguments.items()), tuple(fit.items()))


def assert_same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 0.0) -> None:
    assert one["weights"].keys() == other["weights"].keys()
    for name, value in one["weights"].items():
        assert np.abs(value - other["weights"][name]).max() <= tolerance * np.abs(value).max(), name
    assert other["evaluation"] == pytest.approx(one["evaluation"], rel=1e-6)
    assert other["history"] == one["history"] if not tolerance else True


HERE, AWAY = "parameters, 2 workers", "parameters, 3 workers over sockets"
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "MLP": (HERE, "MLP", {}, {"epochs": 2}),
    "CNN with a bias before BatchNorm": (HERE, "CNN", {}, {}),
    "transformer with tied weights": (AWAY, "tied transformer", {}, {}),
    "parameters that are frozen, unused or used twice": (HERE, "peculiar", {}, {}),
    "the same, added up in several passes": (AWAY, "peculiar", {"slices": 7}, {}),
    "more slices than workers, and not evenly": (AWAY, "CNN", {"slices": 7}, {}),
    "slices for which sums need sockets": (HERE, "CNN", {"slices": 7}, {}),
    "batches of fewer slices than workers": (AWAY, "MLP", {}, {"batch_size": 19}),
    "a weighted loss, clipped": (AWAY, "MLP", {"kind": "weighted", "clip_norm": 0.1}, {}),
    "a model that is called twice": (HERE, "MLP", {"kind": "two passes"}, {}),
    "an RNN whose output is a dict": (HERE, "recurrent", {"kind": "dict"}, {}),
    "bf16": (HERE, "CNN", {"precision": "bf16"}, {}),
    "fp16 with loss scaling": (HERE, "MLP", {"precision": "fp16"}, {}),
}


@pytest.mark.parametrize(
    "case",
    variants(
        CASES,
        "CNN with a bias before BatchNorm",
        "transformer with tied weights",
        "the same, added up in several passes",
        "batches of fewer slices than workers",
        "a weighted loss, clipped",
        "fp16 with loss scaling",
    ),
)
def test_divided_parameters_end_where_one_process_ends(ranks: RankPool, alone: Any, case: str) -> None:
    way, model, arguments, fit = CASES[case]
    workers, strategy, flags = WAYS[way]
    results = ranks(workers, train, model, strategy, arguments, fit, flags=flags)
    # Norms, and what a layer gets from two calls, are added up in another order.
    tolerance = 1e-6 if "clip_norm" in arguments or "two passes" in arguments.values() else 0.0
    assert_same(alone(model, arguments, fit), results[0], tolerance)
    for other in results[1:]:
        assert np.array_equal(other["predictions"], results[0]["predictions"])


@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("parameters")])
def test_the_other_levels_do_too(ranks: RankPool, alone: Any, way: str) -> None:
    _, model, arguments, fit = CASES["more slices than workers, and not evenly"]
    workers, strategy, flags = WAYS[way]
    assert_same(alone(model, arguments, fit), ranks(workers, train, model, strategy, arguments, fit, flags=flags)[0])


def test_states_are_divided_on_each_of_two_hosts(ranks: RankPool, alone: Any) -> None:
    results = ranks(4, train, "CNN", mh.Sharded("optimizer"), {}, {}, hosts=2)
    assert_same(alone("CNN", {}, {}), results[0])


def test_four_workers_keep_at_most_three_tenths_of_what_a_replica_does(ranks: RankPool) -> None:
    replicas = ranks(4, watched, mh.Mirrored(), flags=OVER_SOCKETS)
    parts = ranks(4, watched, mh.Sharded(), flags=OVER_SOCKETS)
    for replica, part in zip(replicas, parts, strict=True):
        assert part.num_bytes <= 0.3 * replica.num_bytes
    listening = {address.rpartition(":")[0] for part in parts for address in part.listeners}
    assert listening == {"127.0.0.1"}, "nothing listens beyond the address of the data plane"


def test_layers_computed_again_change_nothing(ranks: RankPool, alone: Any) -> None:
    for strategy in (mh.Sharded(recompute="blocks"), mh.Sharded("optimizer", recompute=("3", "8"))):
        assert_same(alone("CNN", {}, {}), ranks(2, train, "CNN", strategy)[0])


def test_weights_are_whole_while_they_are_edited_saved_and_loaded(ranks: RankPool, tmp_path: Path) -> None:
    [single] = ranks(1, edit_and_train, mh.Single(), str(tmp_path))
    first, second = ranks(2, edit_and_train, mh.Sharded(), str(tmp_path))
    assert first["shape"] == second["shape"] == (72, 72)
    for name, value in single["weights"].items():
        assert np.array_equal(value, first["weights"][name]), name
        assert np.array_equal(value, first["loaded"][name]), name


def test_a_loop_of_ones_own_trains_with_divided_parameters(ranks: RankPool) -> None:
    [single] = ranks(1, own_loop, mh.Single())
    assert ranks(2, own_loop, mh.Sharded()) == pytest.approx([single, single], rel=1e-6)
    for error in ranks(2, refused_loop, mh.Sharded()):
        assert "3 slices for 2 workers" in error and "mh.Trainer" in error


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [({"exact": True}, "mirrored"), ({"audit": True}, "audit=False"), ({"reducer": "int8"}, 'reducer="exact"')],
)
@pytest.mark.parametrize("strategy", ["sharded", "central_storage"])
def test_settings_that_rest_on_whole_copies_are_refused(strategy: str, arguments: dict[str, Any], nearest: str) -> None:
    with pytest.raises(SpecError) as refused:
        resolve(flags={}, arguments={"strategy": strategy, **arguments})
    assert nearest in str(refused.value)


def test_unknown_levels_and_places_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(SpecError, match='level="parameters"'):
        mh.Sharded("weights")
    with pytest.raises(SpecError, match='offload="host"'):
        mh.Sharded(offload="disk")


REFUSALS: dict[str, tuple[Any, str, dict[str, Any], int, str]] = {
    "an optimizer that looks at whole tensors": (mh.Sharded(), "LBFGS", {}, 1, r"update each element independently"),
    "one that cannot be divided": (mh.CentralStorage(), "LBFGS", {}, 1, r"cannot be divided[\s\S]*mirrored"),
    "no memory in common": (mh.CentralStorage(), "AdamW", OVER_SOCKETS, 1, r"share no memory[\s\S]*mh\.Sharded"),
    "several hosts": (mh.CentralStorage(), "AdamW", {}, 2, r"this run has 2[\s\S]*mirrored"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_kept_is_refused_with_the_nearest_that_can(ranks: RankPool, case: str) -> None:
    strategy, optimizer, flags, hosts, words = REFUSALS[case]
    for error in ranks(2, refused, strategy, optimizer, flags=flags, hosts=hosts):
        assert re.search(words, error), error


def test_a_penalty_on_parameters_that_are_in_parts_is_refused(ranks: RankPool) -> None:
    for error in ranks(2, refused, mh.Sharded(), "momentum", "penalty"):
        assert re.search(r"each worker has only a shard of [\w.]+[\s\S]*weight_decay", error), error


def test_a_checkpoint_resumes_in_any_other_layout(ranks: RankPool, tmp_path: Path) -> None:
    [whole] = ranks(1, train_until, mh.Single(), None, None)
    lives = [
        (2, mh.Sharded(), 3),
        (2, mh.Sharded(), 4),
        (3, mh.Sharded(), 6),
        (1, mh.Single(), 8),
        (2, mh.Sharded(), None),
    ]
    for workers, strategy, stop in lives:
        last = ranks(workers, train_until, strategy, str(tmp_path), stop, run_dir=tmp_path)[0]
        assert last["stopped"] == (stop is not None)
    assert_same(whole, last)
