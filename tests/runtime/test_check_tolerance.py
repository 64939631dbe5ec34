"""How much a layout may deviate from one process in `mh check`, and what it says of buffers and empty tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from manyhands.runtime.check_record import Checked, Record, deviation
from manyhands.runtime.layout_check import HALF_TOLERANCE, TOLERANCE, tolerance_for


@pytest.mark.parametrize(
    ("precision", "weights", "tolerance"),
    [
        ("fp32", {"weight": torch.ones(2)}, TOLERANCE),
        ("bf16", {"weight": torch.ones(2)}, HALF_TOLERANCE),
        ("fp32", {"weight": torch.ones(2, dtype=torch.bfloat16)}, HALF_TOLERANCE),
        ("fp32", {"weight": torch.ones(2), "mask": torch.ones(2, dtype=torch.bool)}, TOLERANCE),
    ],
)
def test_half_precision_of_the_script_s_own_may_deviate_more(
    precision: str, weights: dict[str, Tensor], tolerance: float
) -> None:
    assert tolerance_for(Checked(Record(precision=precision), weights, {})) == tolerance


def test_deviations_are_relative_to_the_largest_value() -> None:
    assert deviation(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0])) == 0.25
    assert deviation(torch.tensor([True]), torch.tensor([False])) == 1.0
    assert deviation(torch.empty(0), torch.empty(0)) == 0.0
