"""The peer that is written by hand trains the same model."""

from __future__ import annotations

import torch
from torch import nn

from bench.layouts.dtensor_side import Block, Decoder
from bench.programs.models import HEADS, WIDTH, make_data, make_model


def test_layers_that_dtensor_can_divide_compute_what_the_benchmarks_transformer_computes() -> None:
    torch.manual_seed(0)
    model, by_hand = make_model("transformer"), Decoder()
    rows, _ = make_data("transformer", 1)
    with torch.no_grad():
        by_hand.places.copy_(model.places)
        for name in ("tokens", "head"):
            by_hand.get_submodule(name).load_state_dict(model.get_submodule(name).state_dict())
        for layer, block in zip(model.layers.layers, by_hand.layers, strict=True):
            fill_(block, layer)
        torch.testing.assert_close(by_hand(rows), model(rows), rtol=1e-6, atol=1e-6)


def fill_(block: Block, layer: nn.TransformerEncoderLayer) -> None:
    same = {"norm1": "norm1", "norm2": "norm2", "up": "linear1", "down": "linear2", "out": "self_attn.out_proj"}
    for name, other in same.items():
        block.get_submodule(name).load_state_dict(layer.get_submodule(other).state_dict())
    for name in ("weight", "bias"):
        heads = getattr(layer.self_attn, f"in_proj_{name}").unflatten(0, (3, HEADS, WIDTH // HEADS))
        getattr(block.packed, name).copy_(heads.transpose(0, 1).flatten(0, 2))
