"""Cross entropy of logits whose classes are sharded over ranks: ranks send a few numbers per row, never the logits."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from manyhands.parallel.tensor.autograd_collectives import Split, all_parts

__all__ = ["entropy_in_parts"]


def entropy_in_parts(
    part: Tensor,
    split: Split,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Like `functional.cross_entropy`, in fp32 at least; NotImplemented for what needs the whole logits.

    That is: class weights, and targets that are probabilities. Logits are sharded along dim 1.
    """
    if weight is not None or size_average is not None or reduce is not None or target.is_floating_point():
        return NotImplemented
    if reduction not in ("mean", "sum", "none") or part.dim() < 2:
        return NotImplemented
    rows = part.movedim(1, -1).reshape(-1, part.size(1))
    wide = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
    labels = target.reshape(-1)
    counted = labels != ignore_index
    _check_labels(labels[counted], split.size)
    losses = cast(Tensor, _Entropy.apply(wide, labels, counted, split, label_smoothing))  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


class _Entropy(torch.autograd.Function):
    """The loss of each row; 0 for ignored rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, labels: Tensor, counted: Tensor, split: Split, smoothing: float) -> Tensor:
        ((start, stop),) = split.mine
        here = counted & (labels >= start) & (labels < stop)
        column = torch.where(here, labels - start, 0)
        peak = rows.amax(1)
        shares = (rows - peak[:, None]).exp_()
        summary = torch.stack([peak, shares.sum(1), torch.where(here, _at(rows, column), 0.0), rows.sum(1)])
        peaks, sums, hits, totals = _gather(summary, split)
        top = peaks.amax(0)
        log_sum = (sums * (peaks - top).exp()).sum(0).log_() + top
        losses = log_sum - (1.0 - smoothing) * hits.sum(0) - smoothing / split.size * totals.sum(0)
        ctx.save_for_backward(shares.mul_((peak - log_sum).exp_()[:, None]), column, here, counted)
        ctx.smoothing, ctx.num_classes = smoothing, split.size
        return torch.where(counted, losses, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, column, here, counted = ctx.saved_tensors
        wanted = torch.full_like(probabilities, ctx.smoothing / ctx.num_classes)
        hit = (here * (1.0 - ctx.smoothing)).to(wanted.dtype)
        wanted.scatter_add_(1, column[:, None], hit[:, None])
        grad_rows = (probabilities - wanted) * gradient[:, None]
        return grad_rows.masked_fill_(~counted[:, None], 0.0), None, None, None, None


def _check_labels(labels: Tensor, num_classes: int) -> None:
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if wrong.numel():
        raise IndexError(f"Target {int(wrong[0])} is out of bounds: there are {num_classes} classes.")


def _at(rows: Tensor, column: Tensor) -> Tensor:
    return rows.gather(1, column[:, None]).squeeze(1)


def _gather(summary: Tensor, split: Split) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every rank's summary, one tensor of ranks x rows per quantity."""
    ranges = tuple(((r, r + 1),) for r in range(split.axis.size))
    gathered = torch.stack(all_parts(summary[None], Split(split.axis, 0, ranges, split.name)))[:, 0]
    peaks, sums, hits, totals = gathered.unbind(1)
    return peaks, sums, hits, totals
