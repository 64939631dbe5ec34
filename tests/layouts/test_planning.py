"""What a layout is said to need before it starts: counted by hand for a model whose sizes are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layout_cases import MODELS, data_for, loss, make_trainer
from torch import nn

import manyhands as mh
from manyhands.errors import SpecError
from manyhands.parallel.footprint import kept_for_backward, states_per_weight
from manyhands.runtime.dividing import Sample
from manyhands.runtime.memory_limit import parse_bytes
from manyhands.runtime.planning import plan_model

WIDE = 64 * 64 * 4 + 64 * 4


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def plan(choice: Any, workers: int, slices: int = 4) -> Any:
    torch.manual_seed(0)
    model = wide()
    batch = (torch.randn(8, 64), torch.randint(64, (8,)))
    return plan_model(model, torch.optim.AdamW(model.parameters()), choice, workers, Sample(batch, loss), slices)


def test_each_worker_has_its_part_of_weights_gradients_and_states() -> None:
    pipeline = plan(mh.Pipeline(2), 2)
    assert [(one.weights, one.gradients, one.states) for one in pipeline.memory] == [
        (2 * WIDE, 2 * WIDE, 4 * WIDE),
        (2 * WIDE, 2 * WIDE, 4 * WIDE),
    ]
    assert "4 microbatches" in pipeline.schedule
    assert pipeline.memory[0].activations == 2 * pipeline.memory[1].activations  # two microbatches under way, and one
    sharded = plan(mh.Sharded("parameters"), 4)
    assert sharded.memory[0].gradients == WIDE and sharded.memory[0].states == 2 * WIDE
    mirrored = plan(mh.Mirrored(), 4)
    assert (mirrored.memory[3].weights, mirrored.memory[3].states) == (WIDE, 2 * WIDE)
    tensor = plan(mh.Tensor(2), 2)
    assert sum(layer.num_bytes for layer in tensor.layers) == 4 * WIDE
    assert tensor.memory[0].weights < 2.1 * WIDE


def test_sharded_replicas_of_a_mesh_divide_their_parts_once_more() -> None:
    plain = plan(mh.Mesh(data=2, pipeline=2), 4).memory[0]
    staged = plan(mh.Mesh(data=2, pipeline=2, sharded=True), 4).memory[0]
    assert staged.states == plain.states // 2 == 2 * WIDE
    assert staged.weights == 3 * WIDE, "its part, and the stage's whole weights during a step"
    assert staged.gradients == plain.gradients, "of its own slices, until their sum is divided"
    split = plan(mh.Mesh(data=2, tensor=2), 4)
    parts = plan(mh.Mesh(data=2, tensor=2, sharded=True), 4, slices=2)
    assert [one.split for one in parts.layers] == [f"{one.split}, shard" for one in split.layers]
    assert parts.memory[0].states == split.memory[0].states // 2
    assert parts.memory[0].gradients == split.memory[0].gradients // 2
    alike = plan(mh.Mesh(data=4, sharded=True), 4), plan(mh.Sharded(), 4)
    assert alike[0].memory == alike[1].memory and alike[0].strategy == "mesh"


@pytest.mark.parametrize(
    ("optimizer", "kept"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), 0),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 1),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), 3),
    ],
)
def test_an_optimizers_states_are_tried_out(optimizer: Any, kept: int) -> None:
    assert states_per_weight(optimizer(wide().parameters())) == kept


def test_looking_at_a_model_leaves_no_trace() -> None:
    model = MODELS["CNN"]()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    state = torch.get_rng_state()
    assert kept_for_backward(model, loss, data_for("CNN")) > 40 * 8 * 16 * 4  # a layer's output at the least
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(param.grad is None for param in model.parameters())


def test_a_layout_that_does_not_fit_is_refused_with_its_numbers() -> None:
    trainer = make_trainer("MLP", mh.Mirrored(memory_limit="20kB"), "AdamW")
    with pytest.raises(SpecError, match=r"Rank 0 would need .*weights 11\.\d kB.* more than memory_limit='20kB'"):
        trainer.fit(data_for("MLP"), epochs=1, batch_size=16)


@pytest.mark.parametrize(("text", "value"), [("2GB", 2 * 10**9), ("1.5 MB", 1_500_000), (512, 512)])
def test_limits_are_bytes_or_words(text: Any, value: int) -> None:
    assert parse_bytes(text) == value


def test_a_limit_that_is_no_number_is_refused() -> None:
    with pytest.raises(SpecError, match="memory_limit is 'lots'"):
        parse_bytes("lots")
