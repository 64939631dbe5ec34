"""Losses that are no mean over examples are named, with what to write instead; harmless ones are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.errors import TrainingFailed
from manyhands.parallel.model.precision import Precision
from manyhands.parallel.model.step_buffers import ForeignState
from manyhands.strategies.loss_check import LossCheck, rows_between
from manyhands.strategies.loss_kinds import LossAtCuts, LossValue, cuts, verdict

ROWS, TOKENS, CLASSES, IGNORED = 12, 7, 5, -100


class Net(nn.Module):
    """Logits for every token, by way of everything that behaves differently in training."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5))
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, CLASSES)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.norm(self.body(x).transpose(1, 2)).transpose(1, 2))


def batch_of(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, TOKENS, 4, generator=generator)
    y = torch.randint(0, CLASSES, (rows, TOKENS), generator=generator)
    lengths = torch.randint(2, TOKENS + 1, (rows, 1), generator=generator)
    return x, y.masked_fill(torch.arange(TOKENS) >= lengths, IGNORED)


def each(model: nn.Module, batch: Any, **how: Any) -> Tensor:
    """One value per token; masked ones are 0."""
    x, y = batch
    return functional.cross_entropy(model(x).transpose(1, 2), y, reduction="none", **how)


def embedded(model: nn.Module, batch: Any) -> Tensor:
    return functional.normalize(model(batch[0]).mean(1), dim=1)


# Six that are not what they should be, or seven.


def total(model: nn.Module, batch: Any) -> Tensor:
    return each(model, batch).sum()


def total_by_a_constant_and_a_penalty(model: nn.Module, batch: Any) -> Tensor:
    return each(model, batch).sum() / 64 + 0.01 * sum(param.square().sum() for param in model.parameters())


def mean_of_tokens(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x).transpose(1, 2), y, ignore_index=IGNORED)


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    mask = (batch[1] != IGNORED).float()
    return (each(model, batch) * mask).sum() / mask.sum()


def weighted_by_class(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x).mean(1), y[:, 0], weight=torch.arange(1.0, CLASSES + 1))


def mean_as_a_sum(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return each(model, batch).mean(), len(batch[0])


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    z = embedded(model, batch)
    return functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def root_of_a_mean(model: nn.Module, batch: Any) -> Tensor:
    return each(model, batch).square().mean().sqrt()


def spread_of_the_batch(model: nn.Module, batch: Any) -> Tensor:
    return each(model, batch).mean() - embedded(model, batch).var(0).mean()


WRONG: dict[Callable[..., Any], str] = {
    total: "losses.mean()",
    total_by_a_constant_and_a_penalty: "losses.mean()",
    mean_of_tokens: "mask.sum()",
    masked_mean: "mask.sum()",
    weighted_by_class: "mask.sum()",
    mean_as_a_sum: "whose first value is a mean",
    contrastive: "slices=4",
    root_of_a_mean: "slices=4",
    spread_of_the_batch: "slices=4",
}


# And some that are harmless: dropout and BatchNorm are in the model.


def mean_of_all(model: nn.Module, batch: Any) -> Tensor:
    return each(model, batch).mean()


def smoothed(model: nn.Module, batch: Any) -> Tensor:
    return each(model, batch, label_smoothing=0.1).mean()


def with_a_penalty(model: nn.Module, batch: Any) -> Tensor:
    return each(model, batch).mean() + 0.1 * sum(param.square().sum() for param in model.parameters())


def sum_and_number(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return each(model, batch).sum(), (batch[1] != IGNORED).sum()


def mixed_up(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    share, other = float(np.random.beta(0.4, 0.4)), torch.randperm(len(x))
    logits = model(share * x + (1 - share) * x[other]).mean(1)
    return share * functional.cross_entropy(logits, y[:, 0]) + (1 - share) * functional.cross_entropy(
        logits, y[other, 0]
    )


def noisy(model: nn.Module, batch: Any) -> Tensor:
    return each(model, (functional.dropout(batch[0], 0.5), batch[1])).mean() * random.random()


def in_training_only(model: nn.Module, batch: Any) -> Tensor:
    assert model.training, "this model returns other things in evaluation mode"
    return total(model, batch)


HARMLESS = [mean_of_all, smoothed, with_a_penalty, sum_and_number, mixed_up, noisy, in_training_only]


@dataclass
class Slice:
    """What an engine has of a slice."""

    batch: Any
    index: int = 0
    rows: int = ROWS
    number: int = 1

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return [(0, self.rows)]


def look(loss: Callable[..., Any], batch: Any, model: nn.Module | None = None, **how: Any) -> list[str]:
    said: list[str] = []
    metrics = how.pop("metrics", {})
    looking, piece = LossCheck(1, metrics, said.append, may_couple=how.pop("may_couple", False)), Slice(batch, **how)
    if looking.is_at(piece, piece):  # type: ignore[arg-type]
        looking.at(model or trained(), loss, piece, ForeignState())  # type: ignore[arg-type]
    return said


def trained() -> Net:
    """Moving averages that are not what they begin with."""
    torch.manual_seed(5)
    model = Net()
    for _ in range(3):
        model(batch_of()[0])
    return model


@pytest.mark.parametrize("loss", WRONG, ids=lambda loss: loss.__name__)
def test_a_loss_that_is_no_mean_over_examples_is_named_with_what_to_write(loss: Callable[..., Any]) -> None:
    (said,) = look(loss, batch_of())
    assert WRONG[loss] in said and "check_loss=False" in said


@pytest.mark.parametrize("loss", HARMLESS, ids=lambda loss: loss.__name__)
def test_a_harmless_loss_is_not_mentioned(loss: Callable[..., Any]) -> None:
    assert look(loss, batch_of()) == []


@pytest.mark.parametrize("loss", [total, contrastive, mean_of_all], ids=lambda loss: loss.__name__)
def test_half_precision_hides_no_sum_and_invents_none(loss: Callable[..., Any]) -> None:
    with Precision("bf16", torch.device("cpu")).autocast():
        assert len(look(loss, batch_of())) == (loss is not mean_of_all)


def test_coupled_examples_are_no_news_where_the_number_of_slices_is_fixed() -> None:
    assert look(contrastive, batch_of(), may_couple=True) == []
    assert look(total, batch_of(), may_couple=True) != []


def test_fewer_than_four_rows_say_nothing() -> None:
    assert look(total, batch_of(3), rows=3) == []
    assert len(look(total, batch_of(4), rows=4)) == 1


def test_a_batch_whose_rows_cannot_be_found_says_nothing() -> None:
    assert look(lambda model, batch: batch[0].sum(), (torch.ones(3, ROWS), object())) == []


def state(model: nn.Module) -> list[Any]:
    generators = [torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1].astype(np.int64)), random.getstate()]
    return [*(one.clone() for one in model.state_dict().values()), *generators]


def test_looking_leaves_generators_buffers_modes_and_gradients_as_they_were() -> None:
    model = trained()
    model.norm.eval()
    np.random.seed(1)
    with Precision("bf16", torch.device("cpu")).autocast():
        before, modes = state(model), [module.training for module in model.modules()]
        for loss in (mixed_up, noisy, total, in_training_only):
            look(loss, batch_of(), model)
        after = state(model)
        mean_of_all(model, batch_of()).backward()  # weights that were converted without gradient would have none
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(before, after, strict=True))
    assert all(param.grad is not None for param in model.parameters())


def test_a_metric_that_is_one_number_is_refused_before_the_first_step() -> None:
    with pytest.raises(TrainingFailed, match=r"'accuracy' returned .* one value per example"):
        look(mean_of_all, batch_of(), metrics={"accuracy": lambda model, batch: model(batch[0]).mean()})
    with pytest.raises(TrainingFailed, match="'accuracy' returned a float for 12 examples"):
        look(mean_of_all, batch_of(), metrics={"accuracy": lambda model, batch: 0.5})


def test_a_metric_that_fits_or_cannot_be_asked_yet_is_left_alone() -> None:
    metrics = {"fits": lambda model, batch: each(model, batch).mean(1), "later": lambda model, batch: batch["labels"]}
    assert look(mean_of_all, batch_of(), metrics=metrics) == []
    (said,) = look(mean_of_all, batch_of(), metrics={"by token": each})
    assert "'by token' returned a tensor of shape (12, 7)" in said


def test_rows_are_cut_out_of_anything_a_collate_function_makes() -> None:
    x = torch.arange(8).view(4, 2)
    cut = rows_between({"x": x, "more": (x, [x.numpy()]), "names": ["a", "b", "c", "d"], "none": None}, 4, 1, 3)
    assert cut["x"].tolist() == cut["more"][1][0].tolist() == [[2, 3], [4, 5]]
    assert cut["names"] == ["b", "c"] and cut["none"] is None


def measured(losses: dict[str, float], again: float | None = None) -> LossAtCuts:
    a, b, c = 2, 4, 2
    rows = {"whole": 8, "a": a, "bc": b + c, "ab": a + b, "c": c, "b": b}
    values = {name: LossValue(losses[name] * rows[name], rows[name]) for name in rows}
    whole = losses["whole"] if again is None else again
    return LossAtCuts((a, b, c), **values, again=LossValue(whole * 8, 8))


def test_the_verdict_follows_from_numbers_alone() -> None:
    one_each = measured({"whole": 8, "a": 2, "bc": 6, "ab": 6, "c": 2, "b": 4})
    assert verdict(one_each, 1e-4) == "sum"
    assert verdict(measured({"whole": 8, "a": 2, "bc": 6, "ab": 6, "c": 2, "b": 4}, again=9), 1e-4) is None
    assert verdict(measured(dict.fromkeys(("whole", "a", "bc", "ab", "c", "b"), 0.7)), 1e-4) is None
    assert verdict(measured({"whole": float("nan"), "a": 2, "bc": 6, "ab": 6, "c": 2, "b": 4}), 1e-4) is None
    assert [cuts(rows) for rows in (4, 6, 16)] == [(1, 3), (2, 4), (5, 11)]
