"""How much a layout may deviate from one process in `mh check`, and what it says of buffers and empty tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.errors import TrainingFailed
from manyhands.trials.check_recording import Checked, Record, deviation, nudge_
from manyhands.trials.layout_check import (
    HALF_TOLERANCE,
    TOLERANCE,
    Asked,
    Layout,
    LayoutFinding,
    check,
    check_repeats,
    compare,
    deviations,
    line_of,
    tolerance_for,
)


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
    assert deviation(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]), size=100.0) == 0.01


def train(nudged: bool = False, reversed_: bool = False, wrong: float = 1.0) -> Checked:
    """Five steps of AdamW with a bias before BatchNorm; sums in another order, or of something else, if asked for."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    if nudged:
        nudge_(model.parameters())
    order = torch.arange(32).flip(0) if reversed_ else torch.arange(32)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[order]), y[order])
        loss.backward()
        losses.append(float(loss.detach()))
        for param in model[3].parameters():
            assert param.grad is not None
            param.grad[0] *= wrong
        optimizer.step()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return Checked(Record(losses), {name: one.detach() for name, one in model.state_dict().items()}, gradients)


LAYOUT = Layout("tensor 2", "tensor", 2)


def checked(found: Checked) -> LayoutFinding:
    alone = train()
    return compare(LAYOUT, alone, found, TOLERANCE, deviations(alone, train(nudged=True)).all())


def test_a_bias_before_batch_norm_under_adamw_is_named_and_is_no_deviation() -> None:
    alone, found = train(), train(reversed_=True)
    assert not compare(LAYOUT, alone, found, TOLERANCE).agrees, "nothing to explain: the example is too tame"
    finding = checked(found)
    assert finding.agrees and finding.weights is not None and finding.weights > TOLERANCE
    assert [name for name, _, why in finding.explained if "true gradient" in why] == ["0.bias"]
    assert "same" in line_of(finding) and "true gradient" in line_of(finding)


@pytest.mark.parametrize("wrong", [0.5, 1.001, -1.0])
def test_a_gradient_that_is_wrong_in_one_row_is_found_and_named(wrong: float) -> None:
    finding = checked(train(reversed_=True, wrong=wrong))
    assert not finding.agrees
    assert any(name.startswith("gradient of 3.") for name, _ in finding.worst) or finding.weights > TOLERANCE
    assert "DEVIATES" in line_of(finding)


def test_a_tensor_that_a_layout_lacks_is_a_deviation() -> None:
    found = train()
    del found.weights["3.weight"]
    assert checked(found).worst == [("3.weight", float("inf"))]


def test_a_script_that_draws_other_data_in_every_process_is_not_taken_for_rounding() -> None:
    check_repeats([2.31, 2.0], [2.31001, 1.5], TOLERANCE)
    check_repeats([2.31], [2.4], HALF_TOLERANCE)
    check_repeats([], [], TOLERANCE)
    with pytest.raises(TrainingFailed, match=r"2\.31 and 2\.35.*would not train on the same data"):
        check_repeats([2.31, 2.0], [2.35, 2.0], TOLERANCE)
    with pytest.raises(TrainingFailed, match="nan"):
        check_repeats([2.31], [float("nan")], TOLERANCE)


def test_a_script_that_takes_no_step_in_time_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(TrainingFailed, match=r"did not reach step 5 within 2 s"):
        check(Asked(command=WorkerCommand("script", str(script)), timeout_s=2.0), lambda line: None)
