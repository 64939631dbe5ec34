"""Where models are cut, what their parts are, and what is refused with a choice that works."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from manyhands.errors import SpecError
from manyhands.parallel.pipeline.build_stages import check_enough, cut, measure, pipeline_blocks
from manyhands.parallel.pipeline.exported_stages import ExportedModel
from manyhands.parallel.pipeline.partition import Chain, Inputs, balance, shared_between, starts_at
from manyhands.parallel.pipeline.stage_blocks import names_of_blocks


def largest(costs: list[int], starts: list[int]) -> int:
    return max(sum(costs[a:b]) for a, b in pairwise([*starts, len(costs)]))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 9), st.data())
def test_no_other_cut_is_better_balanced(costs: list[int], stages: int, data: st.DataObject) -> None:
    stages = min(stages, len(costs))
    memory = data.draw(st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)))
    every = [[0, *rest] for rest in combinations(range(1, len(costs)), stages - 1)]
    best = min((largest(costs, starts), largest(memory, starts)) for starts in every)
    found = balance(costs, stages, memory)
    assert (largest(costs, found), largest(memory, found)) == best


def test_stages_begin_where_the_user_says() -> None:
    names = ["embed", "layers.0", "layers.1", "head.norm", "head.out"]
    assert starts_at(names, ["layers.1", "head"], 3) == [0, 2, 3]
    with pytest.raises(SpecError, match=r"No block of the model is 'layers.7'"):
        starts_at(names, ["layers.7"], 2)
    with pytest.raises(SpecError, match="calls in another order"):
        starts_at(names, ["head", "layers.0"], 3)
    with pytest.raises(SpecError, match="2 stages begin at 1 blocks besides the first; 2 are named") as refused:
        starts_at(names, ["layers.0", "head"], 2)
    assert refused.value.fix == ("stages=3",)


def test_more_stages_than_blocks_are_refused_with_the_most_there_can_be() -> None:
    with pytest.raises(SpecError, match="4 stages need as many blocks; the model has 3") as refused:
        balance([1, 1, 1], 4)
    assert refused.value.fix[0] == "stages=3"


def test_too_many_stages_per_worker_are_refused_with_how_many_there_can_be() -> None:
    blocks = Chain(nn.Sequential(*(nn.Linear(2, 2) for _ in range(5))))
    check_enough(blocks, 2, 2)
    with pytest.raises(SpecError, match="2 workers with 3 stages each need 6 blocks; the model has 5") as refused:
        check_enough(blocks, 2, 3)
    assert refused.value.fix[0] == "chunks=2"
    with pytest.raises(SpecError, match="need 12 blocks") as refused:
        check_enough(blocks, 6, 2)
    assert refused.value.fix[0] == "stages=5, chunks=1"


def test_a_sequential_is_cut_into_its_own_modules_also_where_one_is_used_twice() -> None:
    tanh = nn.Tanh()
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), tanh), nn.Sequential(nn.Linear(4, 4), tanh), nn.Linear(4, 2))
    chain = Chain(model)
    assert chain.names == ["0.0", "0.1", "1.0", "1.1", "2"]
    first, second = chain.parts([0, 2])
    assert first.params["0.0.weight"] is model[0][0].weight
    assert {**first.params, **second.params}.keys() == dict(model.named_parameters()).keys()
    x = torch.randn(5, 3)
    assert torch.equal(second(Inputs((x,), {}), first(Inputs((x,), {}), None)), model(x))


class Encoder(nn.Module):
    """A list of layers between two ends, with tied weights, masks and positions made outside all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(1, 6, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 3)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> dict[str, Any]:
        mask = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
        x = self.embed(tokens) * scale + self.position[:, : tokens.shape[1]]
        out = self.norm(self.body(x, mask=mask))
        return {"logits": out @ self.embed.weight.t(), "length": None}


@pytest.mark.long
@pytest.mark.slow
def test_a_model_with_a_list_of_layers_is_cut_between_them() -> None:
    model = Encoder()
    inputs = Inputs((torch.randint(0, 11, (3, 5)),), {"scale": 0.5})
    blocks = pipeline_blocks(model, inputs, 3)
    assert blocks.names == ["embed", "body.layers.0", "body.layers.1", "body.layers.2", "norm"]
    parts = cut(blocks, 3, at=["body.layers.1", "norm"])
    assert shared_between(parts) == {"embed.weight": [0, 2]}
    assert parts[0].params["position"] is model.position
    assert parts[1].params["body.layers.2.linear1.weight"] is model.body.layers[2].linear1.weight
    # Other sizes, another mode, a batch of one row and another constant: all as the model itself does it.
    for rows, length, scale in ((4, 6, 0.5), (1, 5, 0.5), (2, 5, 2.0)):
        model.train(rows != 4)
        given = Inputs((torch.randint(0, 11, (rows, length)),), {"scale": scale})
        torch.manual_seed(0)
        expected = model(*given.args, **given.kwargs)
        torch.manual_seed(0)
        carried: Any = None
        for part in parts:
            carried = part(given, carried)
        assert carried["length"] is None
        torch.testing.assert_close(carried["logits"], expected["logits"])
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert len(measure(blocks, inputs, times=1)) == 5
    assert all(param.grad is None for param in model.parameters())


class Halves(nn.Module):
    """Its forward has dropout that depends on the training mode of one of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(functional.dropout(self.lower(x), 0.5, self.training))


class OnHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Halves(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


@pytest.mark.slow
def test_what_lies_between_blocks_goes_by_the_mode_that_its_module_is_in_by_now() -> None:
    model, given = OnHalves(), Inputs((torch.randn(4, 3),), {})
    parts = cut(pipeline_blocks(model, given, 2, ["body.upper"]), 2, at=["body.upper"])
    for is_training in (True, False, True):
        model.body.training = is_training  # the model as a whole is in training mode
        torch.manual_seed(0)
        expected = model(*given.args)
        torch.manual_seed(0)
        torch.testing.assert_close(parts[1](given, parts[0](given, None)), expected)


@pytest.mark.long  # torch's compiler takes seconds to be imported
def test_a_compiled_block_is_traced_as_often_as_need_be() -> None:
    model, given = OnHalves(), Inputs((torch.randn(4, 3),), {})
    model.head = torch.compile(model.head, backend="eager")  # type: ignore[assignment]
    parts = cut(pipeline_blocks(model, given, 2), 2, at=["head"])
    for mode in (False, True):
        model.train(mode)
        torch.manual_seed(0)
        expected = model(*given.args)
        torch.manual_seed(0)
        torch.testing.assert_close(parts[1](given, parts[0](given, None)), expected)


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.two(x) if x.sum() > 0 else x


def test_a_model_that_cannot_be_followed_is_refused_with_torchs_reason_and_the_line(capfd: Any) -> None:
    with pytest.raises(SpecError, match=r"Choosing cannot be cut into stages: \w+: .*data-dependent") as refused:
        ExportedModel(Choosing(), Inputs((torch.randn(4, 3),), {}), 2)
    assert "\n" not in refused.value.what
    assert "nn.Sequential" in refused.value.fix[0]
    assert str(refused.value.where).endswith("return self.two(x) if x.sum() > 0 else x")
    assert capfd.readouterr() == ("", ""), "torch's own words fill pages"


class Counting(nn.Module):
    """Changes its buffers; those of its blocks are changed by the blocks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.enter, self.norm = how, nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "in place":
                self.seen.mul_(0.9).add_(x.mean(0))
            elif self.how == "another":
                self.seen = self.seen + 1
        return self.norm(self.enter(x - self.seen))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["in place", "another", "not at all"])
def test_a_model_that_changes_a_buffer_between_its_blocks_is_refused_by_name(how: str) -> None:
    model, inputs = Counting(how), Inputs((torch.randn(6, 4),), {})
    if how == "not at all":
        assert pipeline_blocks(model, inputs, 2).names == ["enter", "norm"]
        return
    with pytest.raises(SpecError, match="Counting changes its buffer seen outside of its blocks") as refused:
        pipeline_blocks(model, inputs, 2)
    assert refused.value.fix and not model.seen.any()


@dataclass
class Judged:
    logits: Tensor
    hidden: Tensor | None = None


class Judging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Judged:
        return Judged(self.two(self.one(x)))


def test_dataclasses_come_out_as_they_are() -> None:
    model, inputs = Judging(), Inputs((torch.randn(4, 3),), {})
    first, second = cut(pipeline_blocks(model, inputs, 2), 2)
    judged = second(inputs, first(inputs, None))
    assert isinstance(judged, Judged)
    assert torch.equal(judged.logits, model(*inputs.args).logits)
    assert judged.hidden is None


def test_blocks_are_looked_into_until_there_are_enough_and_then_stages_are_refused() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Residual()

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    inputs = Inputs((torch.randn(4, 3),), {})
    blocks = pipeline_blocks(Wrapped(), inputs, 2)
    assert blocks.names == ["inner.one", "inner.two"]
    with pytest.raises(SpecError, match="3 stages need as many blocks; the model has 2") as refused:
        cut(pipeline_blocks(Wrapped(), inputs, 3), 3)
    assert refused.value.fix[0] == "stages=2"


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return x + self.two(self.one(x))


def test_layers_of_a_list_stay_whole_and_what_holds_the_list_does_not() -> None:
    assert names_of_blocks(Encoder()) == ["embed", *(f"body.layers.{i}" for i in range(3)), "norm"]
    assert names_of_blocks(Encoder(), {"body.layers.1"})[2:4] == ["body.layers.1.self_attn", "body.layers.1.linear1"]


class Sleeping(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x * self.weight


def test_costs_are_measured_and_leave_no_trace() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), Sleeping(0.04), Sleeping(0.02))
    state = torch.get_rng_state()
    costs = measure(Chain(model), Inputs((torch.randn(3, 2, generator=torch.Generator()),), {}))
    assert len(costs) == 3 and costs[1] >= 0.04 and costs[2] >= 0.02
    assert int(model[0].num_batches_tracked) == 0 and torch.equal(state, torch.get_rng_state())
    assert all(param.grad is None for param in model.parameters())


class Noting(torch.autograd.Function):
    """Passes on, and notes when a gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[str], name: str) -> Tensor:
        ctx.notes, ctx.name = notes, name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.notes.append(ctx.name)
        return grad, None, None


class Noted(nn.Module):
    def __init__(self, notes: list[str], name: str) -> None:
        super().__init__()
        self.notes, self.name, self.weight = notes, name, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        noted: Tensor = Noting.apply(x, self.notes, self.name)
        return noted * self.weight


def test_gradients_that_go_back_and_the_loss_count_in_what_blocks_cost() -> None:
    notes: list[str] = []
    model = nn.Sequential(Noted(notes, "first"), Noted(notes, "second"), Noted(notes, "third"))

    def loss(output: Tensor) -> Tensor:
        time.sleep(0.05)
        return output.square().mean()

    costs = measure(Chain(model), Inputs((torch.randn(3, 2),), {}), times=1, loss=loss)
    assert notes == ["second", "third"] * 2, "no stage computes the gradient of the model's input"
    assert costs[2] >= 0.05


def test_the_cut_follows_what_blocks_cost() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    parts = cut(Chain(model), 2, costs=[1.0, 6.0, 2.0, 3.0, 3.0])
    assert [part.names for part in parts] == [["0", "1"], ["2", "3", "4"]]
