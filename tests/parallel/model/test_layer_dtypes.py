"""Layers with different dtypes: what they compute in, what they return, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.errors import SpecError
from manyhands.parallel.model.layer_dtypes import set_dtypes_


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.LayerNorm(8))


def test_a_layer_computes_in_its_own_type_and_gives_back_what_it_was_given() -> None:
    model, plain = net(), net()
    x = torch.randn(4, 8)
    assert set_dtypes_(model, {"1.*": "fp64", "2": "fp32"}) == {"1.0": "fp64", "1.1": "fp64", "2": "fp32"}
    assert model[1][0].weight.dtype == torch.float64
    seen: list[torch.dtype] = []
    model[1][0].register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
    output = model(x)
    assert output.dtype == torch.float32 and seen == [torch.float64]
    assert torch.allclose(output, plain(x), atol=1e-6)
    output.sum().backward()
    assert model[1][0].weight.grad.dtype == torch.float64


def test_autocast_does_not_reach_a_layer_with_its_own_type() -> None:
    model = net()
    set_dtypes_(model, {"0": "fp32"})
    inside: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: inside.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model[1](model[0](torch.randn(2, 8))).dtype == torch.bfloat16
    assert inside == [torch.float32]


def test_autocast_stays_on_after_a_layer_that_raises() -> None:
    model = net()
    set_dtypes_(model, {"0": "fp32"})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError):
            model[0](torch.randn(2, 3))
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("patterns", "fix"), [({"3": "fp32"}, "1"), ({"0": "fp8"}, "fp64")])
def test_patterns_that_mean_nothing_are_refused(patterns: dict[str, str], fix: str) -> None:
    with pytest.raises(SpecError) as refused:
        set_dtypes_(net(), patterns)
    assert any(fix in one for one in refused.value.fix)
