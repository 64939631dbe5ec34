"""The same maths everywhere: every layout ends where one process with the same slices ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import manyhands as mh
from manyhands.testing import RankPool
from tests.layouts.layout_cases import MODELS, evaluate_with_attributes, norms_get_parts, penalized_loss, train

LONG = pytest.mark.long
LAYOUTS: dict[str, tuple[int, Any]] = {
    "mirrored 2": (2, mh.Mirrored()),
    "central storage 2": (2, mh.CentralStorage()),
    **{f"sharded {level} 2": (2, mh.Sharded(level)) for level in ("optimizer", "gradients", "parameters")},
    "tensor 2": (2, mh.TensorParallel(2)),
    **{
        f"pipeline 2 {schedule}": (2, mh.PipelineParallel(2, schedule=schedule))
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")
    },
    "mesh 2 data x 2 tensor": (4, mh.Mesh(data=2, tensor=2)),
    "mesh 2 data x 2 pipeline": (4, mh.Mesh(data=2, pipeline=2)),
    "mesh 2 tensor x 2 pipeline": (4, mh.Mesh(tensor=2, pipeline=2)),
    "mesh 2 data x 2 tensor, sharded": (4, mh.Mesh(data=2, tensor=2, sharded=True)),
    "mesh 2 data x 2 pipeline, sharded": (4, mh.Mesh(data=2, pipeline=2, sharded=True)),
    "mesh 2 data x 2 tensor x 2 pipeline, sharded": (8, mh.Mesh(data=2, tensor=2, pipeline=2, sharded=True)),
}

BY_SEQUENCE: dict[str, tuple[int, Any]] = {
    "mesh 2 data x 2 tensor": (4, mh.Mesh(data=2, tensor=2, sequence=True)),
    "mesh 2 tensor x 2 pipeline": (4, mh.Mesh(tensor=2, pipeline=2, sequence=True)),
    "mesh 2 tensor x 2 pipeline, halves": (4, mh.Mesh(tensor=2, pipeline=2, sequence=True, schedule="zero_bubble")),
    "mesh 2 data x 2 tensor, sharded": (4, mh.Mesh(data=2, tensor=2, sequence=True, sharded=True)),
    "mesh 2 data x 2 tensor x 2 pipeline": (
        8,
        mh.Mesh(data=2, tensor=2, pipeline=2, sequence=True, recompute="blocks"),
    ),
}
"""For what has sequences."""


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process makes of each model, computed once."""
    return {}


def assert_same_weights(a: dict[str, Any], b: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name, one in a.items():
        assert np.abs(one - b[name]).max() <= tolerance * max(np.abs(one).max(), 1e-3), name


def assert_close(a: dict[str, Any], b: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert_same_weights(a["weights"], b["weights"], tolerance)
    assert np.abs(a["predictions"] - b["predictions"]).max() <= 10 * tolerance * np.abs(a["predictions"]).max()
    assert b["evaluation"] == pytest.approx(a["evaluation"], rel=10 * tolerance)
    for before, after in zip(a["history"], b["history"], strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=tolerance)


def cases() -> list[Any]:
    """The whole matrix takes its time: of each layout one model is always tried."""
    models = list(MODELS)
    return [
        pytest.param(model, layout, marks=() if column in _always(row, layout) else LONG)
        for row, layout in enumerate(LAYOUTS)
        for column, model in enumerate(models)
    ]


def _always(row: int, layout: str) -> tuple[int, ...]:
    workers, _ = LAYOUTS[layout]
    return ((row + 1) % 4,) if workers <= 4 else ()


@pytest.mark.parametrize(("model", "layout"), cases())
def test_every_layout_ends_where_one_process_ends(
    ranks: RankPool, alone: dict[str, Any], model: str, layout: str
) -> None:
    if model not in alone:
        [alone[model]] = ranks(1, train, model, mh.Single())
    workers, strategy = LAYOUTS[layout]
    results = ranks(workers, train, model, strategy)
    assert_close(alone[model], results[0])
    for other in results[1:]:
        assert np.array_equal(other["predictions"], results[0]["predictions"])


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=() if one.endswith("x 2 tensor") else LONG) for one in BY_SEQUENCE]
)
def test_meshes_by_sequence_end_where_one_process_ends(ranks: RankPool, alone: dict[str, Any], layout: str) -> None:
    model = "tied transformer"
    if model not in alone:
        [alone[model]] = ranks(1, train, model, mh.Single())
    workers, strategy = BY_SEQUENCE[layout]
    assert_close(alone[model], ranks(workers, train, model, strategy)[0])


class Sent:
    """What this worker has sent to other stages."""

    num_bytes = 0

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        self.num_bytes = trainer._run.ready().engine.spread.divided.passes.runner.bytes_sent


def bytes_between_stages(strategy: Any) -> int:
    sent = Sent()
    train("tied transformer", strategy, {"epochs": 1}, hooks=[sent])
    return sent.num_bytes


@LONG
def test_stages_hand_on_parts_of_a_sequence(ranks: RankPool) -> None:
    """The last stage sends nothing but gradients back."""
    strategies = [mh.Mesh(tensor=2, pipeline=2, cuts=("blocks.2",), sequence=sequence) for sequence in (False, True)]
    whole, parts = (ranks(4, bytes_between_stages, one)[-1] for one in strategies)
    assert 0 < parts < 0.6 * whole


def test_norms_of_a_mesh_get_parts_of_the_sequence(ranks: RankPool) -> None:
    assert ranks(4, norms_get_parts, mh.Mesh(data=2, tensor=2, sequence=True)) == [True] * 4


@pytest.mark.parametrize("sharded", [False, True])
def test_replicas_of_a_pipeline_may_have_sums_of_several_slices_each(
    ranks: RankPool, alone: dict[str, Any], sharded: bool
) -> None:
    """Three slices are two nodes of the tree, which have no way through shared memory."""
    if "6 slices" not in alone:
        [alone["6 slices"]] = ranks(1, train_in_slices, mh.Single(), 6)
    strategy = mh.Mesh(data=2, pipeline=2, sharded=sharded)
    assert_close(alone["6 slices"], ranks(4, train_in_slices, strategy, 6)[0])


def train_in_slices(strategy: Any, slices: int) -> dict[str, Any]:
    """The one row that is left for an epoch's last step is a slice of one replica; the other has none."""
    return train("CNN", strategy, {"batch_size": 39}, slices=slices, clip_norm=0.5)


def test_metrics_of_a_pipeline_may_ask_for_plain_attributes_and_for_nothing_that_others_have(ranks: RankPool) -> None:
    for evaluation in ranks(2, evaluate_with_attributes, mh.PipelineParallel(2)):
        assert evaluation["attributes"] == 1.0


def test_a_penalty_on_all_parameters_of_split_layers_is_that_of_whole_ones(ranks: RankPool) -> None:
    [alone] = ranks(1, train_penalized, mh.Single())
    assert_close(alone, ranks(2, train_penalized, mh.TensorParallel(2))[0])


def train_penalized(strategy: Any) -> dict[str, Any]:
    return train("MLP", strategy, {"epochs": 1}, loss=penalized_loss)
