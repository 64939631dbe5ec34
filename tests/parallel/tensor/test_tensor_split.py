"""Models whose layers are divided over real ranks end where one process ends."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from manyhands.native import why_not
from manyhands.parallel.tensor.apply_plan import split_model_
from manyhands.parallel.tensor.plan import plan_tensor
from manyhands.testing import RankPool
from tests.parallel.tensor.tensor_cases import CASES, WORDS, Found, Words, an_axis, pasted, train
from tests.variants import variants

TOLERANCE = 1e-5
HALF_TOLERANCE = 0.05


def deviations(found: list[Found], alone: Found) -> dict[str, float]:
    """By how much each result differs from one process's, at most, relative to the largest value of its tensor."""
    shares = [one.shares for one in found]
    together = {
        "gradient": (pasted([one.gradients for one in found], shares), alone.gradients),
        "weight": (pasted([one.weights for one in found], shares), alone.weights),
        "rank": (
            {str(r): one.answer for r, one in enumerate(found)},
            {str(r): alone.answer for r in range(len(found))},
        ),
        "loss": ({"": torch.tensor(found[-1].losses)}, {"": torch.tensor(alone.losses)}),
    }
    return {f"{what} {key}": one for what, (a, b) in together.items() for key, one in _differences(a, b).items()}


def _differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {
        key: float((found[key] - value).abs().max() / value.abs().max().clamp(min=0.1))
        for key, value in expected.items()
    }


def assert_same_on_every_rank(found: list[Found]) -> None:
    for one in found:
        for name, gradient in one.gradients.items():
            assert name in one.shares or torch.equal(gradient, found[0].gradients[name]), name
        assert torch.equal(one.answer, found[0].answer) and one.losses == found[0].losses


# Of each kind of layer one model is always tried.
ALWAYS = ("mlp", "own code", "convolutions", "transformer", "bert", "t5", "gpt2, by sequence")


@pytest.mark.slow
@pytest.mark.parametrize("name", variants(CASES, *ALWAYS))
def test_any_number_of_ranks_ends_where_one_process_ends(ranks: RankPool, tmp_path: Path, name: str) -> None:
    (alone,) = ranks(1, train, str(tmp_path / "1"), name)
    for size in (2, 4):
        found = ranks(size, train, str(tmp_path / str(size)), name, 3, not why_not())
        assert_same_on_every_rank(found)
        assert not {what: by for what, by in deviations(found, alone).items() if by > TOLERANCE}


@pytest.mark.slow
def test_the_same_over_sockets_and_in_half_precision(ranks: RankPool, tmp_path: Path) -> None:
    for half, steps, tolerance in ((False, 3, TOLERANCE), (True, 1, HALF_TOLERANCE)):
        (alone,) = ranks(1, train, str(tmp_path / f"1{half}"), "transformer", steps, False, half)
        found = ranks(2, train, str(tmp_path / f"2{half}"), "transformer", steps, False, half)
        assert_same_on_every_rank(found)
        assert not {what: by for what, by in deviations(found, alone).items() if by > tolerance}


@pytest.mark.slow
def test_sums_are_left_in_parts_of_the_sequence_and_gathered_where_they_are_needed(
    ranks: RankPool, tmp_path: Path
) -> None:
    found, _ = ranks(2, train, str(tmp_path / "gpt2"), "gpt2, by sequence", 1)
    scatters = {"transformer.wte"}
    for layer in ("transformer.h.0", "transformer.h.1"):
        scatters |= {f"{layer}.attn.c_proj", f"{layer}.mlp.c_proj"}
        scatters |= {f"{layer}.attn.c_attn, backward", f"{layer}.mlp.c_fc, backward"}
    counts = {
        kind: {name: n for (one, name), n in found.collectives.items() if one == kind} for kind in ("scatter", "gather")
    }
    assert counts["scatter"] == dict.fromkeys(scatters, 1)
    # For each attention, each pair and the output layer; in backward for each sum; the gradient of places, which are
    # whole; and the few numbers of the loss.
    assert sum(counts["gather"].values()) == 5 + 5 + 1 + 1


@pytest.mark.slow
def test_ranks_call_no_more_collectives_than_they_must(ranks: RankPool, tmp_path: Path) -> None:
    """Each attention and each pair of layers sums once forward and once backward; logits are never gathered."""
    found, _ = ranks(2, train, str(tmp_path / "gpt2"), "gpt2", 1)
    sums = {"transformer.wte": 1, "lm_head, backward": 1}
    for layer in ("transformer.h.0", "transformer.h.1"):
        sums |= {f"{layer}.attn.c_attn, backward": 1, f"{layer}.attn.c_proj": 1}
        sums |= {f"{layer}.mlp.c_fc, backward": 1, f"{layer}.mlp.c_proj": 1}
    assert found.collectives == {("gather", "lm_head"): 1, **{("sum", name): times for name, times in sums.items()}}
    for name in ("bloom", "t5"):  # what is of heads goes from layer to layer as it is
        found, _ = ranks(2, train, str(tmp_path / name), name, 1)
        assert [key[1].rpartition(".")[2] for key in found.collectives if key[0] == "gather"] == ["lm_head"], name
    found, _ = ranks(2, train, str(tmp_path / "convolutions"), "convolutions", 1)
    assert found.collectives == {("sum", "two"): 1, ("sum", "last.0, backward"): 1, ("sum", "last.5"): 1}


def look(store: str) -> None:
    """What others see of a model after it was divided."""
    model, calls = Words(), []
    model.out.register_forward_hook(lambda module, inputs, output: calls.append(output.shape))
    before, names = dict(model.named_parameters()), list(model.state_dict())
    wholes = {name: p.detach().clone() for name, p in before.items()}
    attention = model.encoder.layers[0].self_attn
    with an_axis(store, plane=False) as axis:
        shares = split_model_(model, plan_tensor(model, axis.size), axis)
        assert list(model.state_dict()) == names
        assert all(param is before[name] for name, param in model.named_parameters())
        assert shares.keys() >= {"table.weight", "out.weight", "out.bias"} and shares["out.weight"].shape == (WORDS, 16)
        for name, param in model.named_parameters(remove_duplicate=False):
            whole = wholes.get(name, wholes["table.weight"])
            assert torch.equal(param, shares[name].cut(whole) if name in shares else whole)
        assert isinstance(model.out, nn.Linear) and isinstance(attention, nn.MultiheadAttention)
        assert not hasattr(attention, "weight") and not hasattr(model.table, "bias")
        assert model.out.weight.shape == (WORDS, 16) and torch.equal(model.out.weight + 0, wholes["table.weight"])
        assert torch.equal(attention.in_proj_bias + 0, wholes["encoder.layers.0.self_attn.in_proj_bias"])
        assert model(torch.ones(2, 6, dtype=torch.long)).shape == (2, 6, WORDS) and calls == [(2, 6, WORDS)]
        copied = copy.deepcopy(model)
        assert copied.out.place is model.out.place and copied.out._parameters["weight"] is not before["table.weight"]


def test_a_divided_model_looks_like_the_undivided_one_from_outside(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, look, str(tmp_path / "store"))
