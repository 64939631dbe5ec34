"""Which layer is divided how, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.errors import SpecError
from manyhands.parallel.tensor.layer_shards import cuts_of, factors, share_of
from manyhands.parallel.tensor.plan import plan_tensor
from tests.parallel.tensor.tensor_cases import CASES, WORDS, Words, bert, falcon, gpt2, llama, mlp, phi


def kinds(model: nn.Module, patterns: dict[str, str] | None = None, degree: int = 2) -> dict[str, str]:
    return {layer.name: layer.kind for layer in plan_tensor(model, degree, patterns).layers}


def divided(model: nn.Module, degree: int = 2) -> dict[str, str]:
    return {name: kind for name, kind in kinds(model, degree=degree).items() if kind != "whole"}


def test_layers_of_a_chain_are_paired_through_what_works_by_element_or_channel() -> None:
    assert kinds(mlp()) == {
        "0": "columns", "1": "channels", "4": "rows", "6": "whole", "7.0": "columns", "7.3": "rows",
    }  # fmt: skip
    assert kinds(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))) == dict.fromkeys("012", "whole")
    assert divided(CASES["own code"].make()) == {"gate": "columns", "up": "columns", "down": "rows"}


def test_convolutions_are_paired_by_channels_with_their_norms() -> None:
    assert divided(CASES["convolutions"].make(), 4) == {
        "one": "channels", "norm": "channels", "deep": "channels", "group": "channels", "two": "rows",
        "last.0": "channels", "last.1": "channels", "last.5": "rows",
    }  # fmt: skip
    chain = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3))
    assert divided(chain, 4) == {}, "two groups cannot be divided over four ranks"


def test_transformers_are_divided_by_heads_pairs_and_vocabulary() -> None:
    found = divided(Words())
    assert found["table"] == found["out"] == "vocabulary"
    assert found["encoder.layers.0.self_attn"] == "heads" and found["encoder.layers.0.self_attn.out_proj"] == "rows"
    assert found["encoder.layers.1.linear1"] == "columns" and found["encoder.layers.1.linear2"] == "rows"
    assert found["decoder.multihead_attn"] == found["attention"] == "heads"


def test_models_of_hugging_face_are_known_by_their_structure() -> None:
    found = divided(gpt2())
    assert found["transformer.h.0.attn.c_attn"] == "heads" and found["transformer.h.0.attn.c_proj"] == "rows"
    assert found["transformer.h.1.mlp.c_fc"] == "columns" and found["transformer.h.1.mlp.c_proj"] == "rows"
    assert found["transformer.wte"] == found["lm_head"] == "vocabulary"
    found = divided(bert())
    layer = "bert.encoder.layer.0"
    assert found[f"{layer}.attention.self"] == found[f"{layer}.attention.self.query"] == "heads"
    assert found[f"{layer}.attention.output.dense"] == found[f"{layer}.output.dense"] == "rows"
    assert found[f"{layer}.intermediate.dense"] == "columns"
    assert found["cls.predictions.decoder"] == "vocabulary"
    found = divided(llama())
    assert [found[f"model.layers.0.mlp.{name}_proj"] for name in ("gate", "up", "down")] == ["columns"] * 2 + ["rows"]
    assert found["model.layers.0.self_attn.k_proj"] == "heads"


def test_an_attention_whose_heads_do_not_lie_side_by_side_stays_whole() -> None:
    one_key_for_all = divided(falcon(multi_query=True))
    assert not [name for name in one_key_for_all if "attention" in name]
    assert one_key_for_all["transformer.h.0.mlp.dense_h_to_4h"] == "columns"
    strange = phi()
    strange.model.layers[0].self_attn.gate = nn.Parameter(torch.ones(4))
    assert "model.layers.0.self_attn.q_proj" not in divided(strange), "a parameter that no rule knows"


def test_transposed_convolutions_are_paired_by_channels() -> None:
    assert divided(CASES["transposed convolutions"].make()) == {
        "down.0": "channels", "down.2": "rows", "up": "channels", "norm": "channels", "back": "rows",
    }  # fmt: skip
    grouped = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ConvTranspose2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 3))
    assert divided(grouped) == {}
    with pytest.raises(SpecError, match="cannot be divided by channels"):
        plan_tensor(grouped, 2, {"1": "channels"})


def test_a_plan_by_sequence_says_whose_sums_stay_in_parts() -> None:
    plan = plan_tensor(Words(), 2, sequence=True)
    why = {layer.name: layer.why for layer in plan.layers}
    assert plan.sequence and not plan_tensor(Words(), 2).sequence
    by_sequence = {name for name, said in why.items() if said.endswith("; its sum is sharded by sequence")}
    assert {"table", "encoder.layers.0.self_attn.out_proj", "encoder.layers.0.linear2"} <= by_sequence
    assert not {"out", "encoder.layers.0.linear1"} & by_sequence
    assert why["encoder.layers.0.norm1"] == "computed in parts by sequence, if its input is sharded so"


def test_only_large_layers_are_divided_alone() -> None:
    small, large = nn.Embedding(100, 8), nn.Embedding(4096, 16)
    model = nn.ModuleDict({"small": small, "large": large, "one": nn.Linear(512, 600), "other": nn.Linear(512, 500)})
    assert divided(model) == {"large": "vocabulary", "one": "columns"}
    classes = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 5000))
    assert divided(classes) == {"2": "vocabulary"}
    own = Words()
    own.out = nn.Linear(16, 2000)
    assert divided(own)["out"] == "vocabulary", "the last that a module defines"
    own.out = nn.Linear(2000, 16)
    assert "out" not in divided(own), "makes less of what it gets"


def test_layers_that_share_a_parameter_agree_or_stay_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    assert kinds(model) == {"0": "whole", "2": "whole"}
    assert "shares a parameter with 2" in str(plan_tensor(model, 2))
    tied = nn.ModuleDict({"table": nn.Embedding(10, 4), "out": nn.Linear(4, 10)})
    tied["out"].weight = tied["table"].weight
    assert kinds(tied, {"table": "vocabulary"}) == {"table": "vocabulary", "out": "vocabulary"}
    plan = plan_tensor(bert(), 2)
    (decoder,) = [layer for layer in plan.layers if layer.name == "cls.predictions.decoder"]
    assert decoder.stays_whole == ("bias",), "the prediction head has the same bias"


def test_patterns_come_before_rules() -> None:
    assert kinds(mlp(), {"7.0": "whole"})["7.3"] == "whole", "what it was paired with is whole"
    assert kinds(mlp(), {"*": "whole"}) == dict.fromkeys(kinds(mlp()), "whole")
    assert kinds(mlp(), {"7.0": "columns", "*": "whole"})["7.0"] == "columns", "the first counts"
    nested = nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(4, 8)})})
    assert kinds(nested, {"*.mlp.up": "rows"}) == {"mlp.up": "rows"}
    found = kinds(Words(), {"encoder.layers.0": "whole", "attention": "whole"})
    assert found["encoder.layers.0.linear1"] == found["attention.out_proj"] == "whole"
    assert found["encoder.layers.1.linear1"] == "columns"


@pytest.mark.parametrize(
    ("patterns", "degree", "words"),
    [
        ({"encoder.layer.*": "rows"}, 2, ["'encoder.layer.*' matches no layer", "try: 'encoder.layers'"]),
        ({"QQ": "rows"}, 2, ["'QQ' matches no layer", "asked for in: rules", "try: '"]),
        ({"out": "colums"}, 2, ["'colums'", "not a kind of split", "try: 'columns'"]),
        ({"decoder.norm1": "rows"}, 2, ["decoder.norm1 is a LayerNorm, which cannot be divided by rows", "'whole'"]),
        ({}, 8, ["The 4 heads of encoder.layers.0.self_attn cannot be divided evenly among 8", "mh.TensorParallel(4)"]),
        ({"*att*": "whole"}, 3, ["The 32 output features of encoder.layers.0.linear1 cannot", "mh.TensorParallel(2)"]),
        ({"*": "whole", "out": "vocabulary"}, 0, ["divided among 0 workers"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_can(patterns: dict[str, str], degree: int, words: list[str]) -> None:
    with pytest.raises(SpecError) as refused:
        plan_tensor(Words(), degree, patterns)
    for word in words:
        assert word in str(refused.value)


def test_fewer_rows_than_workers_and_uneven_key_heads_are_refused() -> None:
    with pytest.raises(SpecError, match="The 2 rows of the vocabulary of 0"):
        plan_tensor(nn.Sequential(nn.Embedding(2, 4)), 3, {"0": "vocabulary"})
    model = llama()
    model.model.layers[0].self_attn.k_proj = nn.Linear(16, 8)
    with pytest.raises(SpecError, match=r"The 2 heads for keys and values of model.layers.0.self_attn"):
        plan_tensor(model, 4)


def test_bytes_are_those_of_the_rank_that_has_most() -> None:
    plan = plan_tensor(Words(), 2)
    by_name = {layer.name: layer for layer in plan.layers}
    assert by_name["table"].num_bytes == WORDS * 16 * 4 and by_name["table"].bytes_per_rank == 19 * 16 * 4
    assert by_name["out"].num_bytes == WORDS * 4, "the weight counts where it comes first"
    assert plan.num_bytes == sum(p.nbytes for p in Words().parameters())
    assert plan.num_bytes // 2 < plan.bytes_per_rank < plan.num_bytes * 0.6
    table = str(plan).splitlines()
    assert table[0].split() == ["layer", "class", "split", "bytes", "per", "worker", "why"]
    assert len(table) == len(plan.rows()) + 2 and "then encoder.layers.0.linear2 by rows" in str(plan)


def test_parts_of_all_ranks_make_the_whole() -> None:
    for name, case in CASES.items():
        model, degree = case.make(), 4
        modules = dict(model.named_modules())
        for layer in plan_tensor(model, degree, case.patterns).layers:
            for tensor, cuts in layer.cuts(modules[layer.name], degree).items():
                whole = {**modules[layer.name]._parameters, **modules[layer.name]._buffers}[tensor].detach()
                seen = torch.zeros_like(whole)
                for rank in range(degree):
                    share = share_of(tuple(whole.shape), cuts, rank)
                    share.paste_(seen, share.cut(whole))
                assert torch.equal(seen, whole), (name, layer.name, tensor)


def test_a_grid_is_as_even_as_can_be() -> None:
    assert [factors(n) for n in (1, 2, 4, 6, 8, 12)] == [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (4, 3)]
    (cuts,) = cuts_of(nn.Linear(6, 8), "grid", 4).values()
    assert [share_of((8, 6), cuts, rank).cuts for rank in (0, 3)] == [
        ((0, ((0, 4),)), (1, ((0, 3),))),
        ((0, ((4, 8),)), (1, ((3, 6),))),
    ]
