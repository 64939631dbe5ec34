"""Gradients on their way into a row of memory: plain tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.parallel.gradients.shared_memory_sum import AT_ONCE_BYTES
from manyhands.parameter_server.worker.gradient_writer import GradientWriter

LARGE = AT_ONCE_BYTES // 4


@pytest.mark.parametrize("numels", [[LARGE], [3], [LARGE, 3]])
def test_a_row_has_every_gradient_whether_large_or_small(numels: list[int]) -> None:
    params = [nn.Parameter(torch.zeros(numel)) for numel in numels]
    views = [torch.full((numel,), -1.0) for numel in numels]
    filler = GradientWriter(params)
    filler.begin(views, num_slices=1)
    filler.backward(torch.stack([(param * (i + 1)).sum() for i, param in enumerate(params)]).sum(), 0)
    assert filler.finish() == []
    assert [float(view.unique()) for view in views] == [i + 1 for i in range(len(params))]
    filler.close()


def test_parameters_without_a_gradient_are_named_and_their_place_is_zero() -> None:
    params = [nn.Parameter(torch.zeros(LARGE)), nn.Parameter(torch.zeros(3))]
    views = [torch.full((LARGE,), -1.0), torch.full((3,), -1.0)]
    filler = GradientWriter(params)
    filler.begin(views, num_slices=1)
    filler.backward(params[0].sum(), 0)
    assert filler.finish() == [1]
    assert float(views[0].unique()) == 1.0 and float(views[1].unique()) == 0.0
    filler.close()
