"""Hugging Face's models, built from a config, under layouts that know nothing of them in particular."""

from __future__ import annotations

from typing import Any

import pytest

import manyhands as mh
from manyhands.testing import RankPool
from tests.layouts.hugging_face import MODELS, train
from tests.layouts.test_layouts import assert_same_weights

LAYOUTS: dict[str, tuple[int, Any]] = {
    "tensor 2": (2, mh.TensorParallel(2)),
    "tensor 2, by sequence": (2, mh.TensorParallel(2, sequence=True)),
    "pipeline 2": (2, mh.PipelineParallel(2)),
    "sharded 2": (2, mh.Sharded()),
    "mesh 2 tensor x 2 pipeline": (4, mh.Mesh(tensor=2, pipeline=2)),
    "sharded mesh 2 data x 2 tensor": (4, mh.Mesh(data=2, tensor=2, sharded=True)),
}


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_models_from_a_config_train_as_in_one_process(ranks: RankPool, model: str) -> None:
    pytest.importorskip("transformers")
    [alone] = ranks(1, train, model, mh.Single())
    for workers, strategy in LAYOUTS.values():
        found = ranks(workers, train, model, strategy)[0]
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-5)
        assert_same_weights(alone["weights"], found["weights"])
