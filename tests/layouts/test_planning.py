"""What a layout is said to need before it starts: counted by hand for a model whose sizes are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.errors import SpecError, TrainingFailed, UsageError
from manyhands.parallel.gradients.slice_tree import most_held
from manyhands.planner.measure.memory_footprint import kept_by_parts, kept_for_backward, num_bytes, states_per_weight
from manyhands.planner.measure.memory_limit import parse_bytes
from manyhands.planner.measure.memory_plan import plan_model
from manyhands.planner.measure.plan_request import ask_for_plan, last_words
from manyhands.training.setup.divide_model import Sample
from manyhands.trials.layout_check import Asked, check
from tests.layouts.layout_cases import MODELS, data_for, loss, make_trainer

WIDE = 64 * 64 * 4 + 64 * 4
HALVES = ("2",)
"""Where to cut, so that no measured time decides."""


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def plan(choice: Any, workers: int, slices: int = 4) -> Any:
    torch.manual_seed(0)
    model = wide()
    batch = (torch.randn(8, 64), torch.randint(64, (8,)))
    return plan_model(model, torch.optim.AdamW(model.parameters()), choice, workers, Sample(batch, loss), slices)


def test_each_worker_has_its_part_of_weights_gradients_and_states() -> None:
    pipeline = plan(mh.PipelineParallel(2, cuts=HALVES), 2)
    assert [(one.weights, one.gradients, one.states) for one in pipeline.memory] == [
        (2 * WIDE, 6 * WIDE, 4 * WIDE),  # four slices: two sums, and the last one's gradients
        (2 * WIDE, 6 * WIDE, 4 * WIDE),
    ]
    assert "4 microbatches" in pipeline.schedule
    rows = 8 * 64 * 4
    assert pipeline.memory[0].activations == 2 * 2 * rows  # two layers' inputs, of two microbatches under way
    assert 2 * rows < pipeline.memory[1].activations < 4 * rows  # of one, and what the loss keeps
    sharded = plan(mh.Sharded("parameters"), 4)
    assert sharded.memory[0].gradients == WIDE and sharded.memory[0].states == 2 * WIDE
    mirrored = plan(mh.Mirrored(), 4)
    assert (mirrored.memory[3].weights, mirrored.memory[3].states) == (4 * WIDE, 8 * WIDE)  # of which all see one copy
    tensor = plan(mh.TensorParallel(2), 2)
    assert sum(layer.num_bytes for layer in tensor.layers) == 4 * WIDE
    assert tensor.memory[0].weights < 2.1 * WIDE


def test_blocks_that_are_pinned_to_a_stage_are_planned_there() -> None:
    pinned = plan(mh.PipelineParallel(2, place={"1": 1}), 2)
    assert [layer.stage for layer in pinned.layers] == [0, 1, 1, 1]


def test_layers_that_are_computed_again_are_planned_with_less() -> None:
    torch.manual_seed(0)
    model, batch = MODELS["tied transformer"](), data_for("tied transformer")

    def activations(choice: Any) -> list[int]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return [one.activations for one in plan_model(model, optimizer, choice, 2, Sample(batch, loss), 2).memory]

    again = ("blocks.*",)
    assert activations(mh.TensorParallel(2, recompute=again))[0] < 0.6 * activations(mh.TensorParallel(2))[0]
    cuts = ("blocks.2",)
    for less, every in zip(
        activations(mh.PipelineParallel(2, cuts=cuts, recompute=again)),
        activations(mh.PipelineParallel(2, cuts=cuts)),
        strict=True,
    ):
        assert less < 0.9 * every
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_peak_is_the_largest_of_three_phases_and_names_it() -> None:
    sharded = plan(mh.Sharded("parameters"), 64).memory[0]
    assert (sharded.largest, sharded.total) == ("start", sharded.start)  # every worker builds the whole model
    pipeline = plan(mh.PipelineParallel(2, cuts=HALVES), 2).memory
    assert [one.largest for one in pipeline] == ["step", "step"]
    assert pipeline[0].save < pipeline[0].step
    mirrored = plan(mh.Mirrored(), 2).memory
    assert [one.largest for one in mirrored] == ["save", "step"]  # the chief copies what it writes
    assert mirrored[0].save - mirrored[0].step >= 4 * WIDE + 8 * WIDE


def test_a_tied_weight_is_counted_on_every_stage_that_has_it() -> None:
    torch.manual_seed(0)
    model, batch = MODELS["tied transformer"](), data_for("tied transformer")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = plan_model(model, optimizer, mh.PipelineParallel(2), 2, Sample(batch, loss), 2)
    tied = num_bytes([model.embedding.weight])
    assert sum(one.weights for one in found.memory) == num_bytes([*model.parameters(), *model.buffers()]) + tied


def test_what_stages_keep_leaves_no_trace() -> None:
    model, rows = MODELS["CNN"](), data_for("CNN")[0]
    before, state = {name: one.clone() for name, one in model.state_dict().items()}, torch.get_rng_state()
    first, second = kept_by_parts(model, [lambda _: model[:3](rows), lambda carried: model[3:](carried)])
    assert first >= num_bytes([rows]) and second > 0
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("slices", "count", "most"), [((0, 1), 1, 1), ((0, 2), 2, 2), ((0, 8), 8, 4), ((4, 8), 8, 3)])
def test_sums_of_slices_that_are_held_at_once(slices: tuple[int, int], count: int, most: int) -> None:
    assert most_held(range(*slices), count) == most


def test_sharded_replicas_of_a_mesh_divide_their_parts_once_more() -> None:
    plain = plan(mh.Mesh(data=2, pipeline=2, cuts=HALVES), 4).memory[0]
    staged = plan(mh.Mesh(data=2, pipeline=2, sharded=True, cuts=HALVES), 4).memory[0]
    assert staged.states == plain.states // 2 == 2 * WIDE
    assert staged.weights == 3 * WIDE, "its part, and the stage's whole weights during a step"
    assert staged.gradients == plain.gradients, "of its slices, until their sum is divided"
    split = plan(mh.Mesh(data=2, tensor=2), 4, slices=2)
    parts = plan(mh.Mesh(data=2, tensor=2, sharded=True), 4, slices=2)
    assert [one.split for one in parts.layers] == [f"{one.split}, shard" for one in split.layers]
    assert parts.memory[0].states == split.memory[0].states // 2
    assert parts.memory[0].gradients == split.memory[0].gradients // 2
    alike = plan(mh.Mesh(data=4, sharded=True), 4), plan(mh.Sharded(), 4)
    assert alike[0].memory == alike[1].memory and alike[0].strategy == "mesh"


def test_a_mesh_by_sequence_says_so() -> None:
    torch.manual_seed(0)
    model = MODELS["tied transformer"]()
    sample, optimizer = Sample(data_for("tied transformer"), loss), torch.optim.SGD(model.parameters(), lr=0.1)
    layers = plan_model(model, optimizer, mh.Mesh(data=2, tensor=2, sequence=True), 4, sample).layers
    assert {one.name for one in layers if "by sequence" in one.why} >= {"blocks.0.linear2", "blocks.0.norm1", "norm"}


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


def test_looking_at_a_model_keeps_nothing_of_it() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU())  # whose node keeps what it returns
    kept_for_backward(model, lambda model, x: model(x).sum(), torch.randn(3, 6))
    kept_by_parts(model, [lambda _: model(torch.randn(3, 6))])
    for param in model.parameters():
        param.data = param.data[:2].clone()  # as layers are split
    model(torch.randn(3, 6)).sum().backward()
    assert model[0].weight.grad.shape == (2, 6)


def test_a_layout_that_does_not_fit_is_refused_with_its_numbers() -> None:
    trainer = make_trainer("MLP", mh.Mirrored(memory_limit="20kB"), "AdamW")
    with pytest.raises(
        SpecError, match=r"Rank 0 would need .* in a save .*weights 11\.\d kB.* more than memory_limit='20kB'"
    ):
        trainer.fit(data_for("MLP"), epochs=1, batch_size=16)


@pytest.mark.parametrize(("text", "value"), [("2GB", 2 * 10**9), ("1.5 MB", 1_500_000), (512, 512)])
def test_limits_are_bytes_or_words(text: Any, value: int) -> None:
    assert parse_bytes(text) == value


def test_a_limit_that_is_no_number_is_refused() -> None:
    with pytest.raises(SpecError, match="memory_limit is 'lots'"):
        parse_bytes("lots")


def test_a_layout_that_mh_check_does_not_know_is_named_before_anything_runs() -> None:
    command = WorkerCommand("script", "never_started.py")
    with pytest.raises(UsageError, match="workers is called pipelin 2") as refused:
        check(Asked(command=command, only=("tensor 2", "pipelin 2")), print)
    assert refused.value.fix[0].startswith("--only 'pipeline 2")


def test_a_script_that_does_not_reach_fit_in_time_gets_an_error(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import threading; threading.Event().wait()")
    with pytest.raises(TrainingFailed, match=r"within 0.1 s\.\n  try: --wait 1"):
        ask_for_plan(WorkerCommand("script", str(script), []), "", 0, timeout_s=0.1)


def test_the_error_a_script_ended_with_is_reported_whole() -> None:
    tries = [f"  try: {n}" for n in range(6)]
    assert last_words("\n".join(["warning", "SpecError: no.", *tries])) == ["SpecError: no.", *tries]
    assert last_words("\n".join(map(str, range(9)))) == ["4", "5", "6", "7", "8"]
    assert last_words("a\nb\n") == ["a", "b"]
    assert last_words("") == []
