"""What a loss may do with a model that is cut into stages, and which line is named when it does more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.errors import SpecError
from manyhands.parallel.pipeline.model_proxy import call_with_model, learn_inputs

MODEL = nn.Linear(3, 2)
BATCH = (torch.randn(4, 3), torch.randint(0, 2, (4,)))


def noisy(model: Any, batch: Any) -> Any:
    x, y = batch
    scale = 2.0 if model.training and model.in_features == 3 else 1.0
    return nn.functional.cross_entropy(model(input=x * scale), y)


def twice(model: Any, batch: Any) -> Any:
    first = model(batch[0])
    return (first - model(batch[0])).sum()


def never(model: Any, batch: Any) -> Any:
    return batch[0].sum()


def weights(model: Any, batch: Any) -> Any:
    return model(batch[0]).sum() + model.weight.square().sum()


def all_weights(model: Any, batch: Any) -> Any:
    return model(batch[0]).sum() + sum(p.sum() for p in model.parameters())


def learned_input(model: Any, batch: Any) -> Any:
    return model(batch[0].clone().requires_grad_()).sum()


def test_inputs_are_learned_without_the_model() -> None:
    inputs = learn_inputs(noisy, MODEL, BATCH)
    assert inputs.args == () and torch.equal(inputs.kwargs["input"], 2 * BATCH[0])


def test_a_loss_computes_with_what_the_pipeline_returns() -> None:
    result = call_with_model(noisy, MODEL, BATCH, lambda inputs: MODEL(**inputs.kwargs))
    assert torch.equal(result, noisy(MODEL, BATCH))


@pytest.mark.parametrize(
    ("loss", "words", "line"),
    [
        (twice, "calls the model a second time", "first - model"),
        (never, "does not call the model", "def never"),
        (weights, "uses model.weight", "model.weight.square"),
        (all_weights, "uses model.parameters", "model.parameters()"),
        (learned_input, "input requires a gradient", "requires_grad_()"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_with_its_line(loss: Any, words: str, line: str) -> None:
    with pytest.raises(SpecError, match=words) as refused:
        call_with_model(loss, MODEL, BATCH, lambda inputs: MODEL(*inputs.args))
    file, _, number = str(refused.value.where).rpartition(":")
    assert line in Path(file).read_text().splitlines()[int(number) - 1]
    assert refused.value.fix
