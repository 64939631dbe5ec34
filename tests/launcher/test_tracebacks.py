"""What is printed of an error: the user's lines, its cause, and all of it where the bug is ours."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from manyhands.data.fetchers import SliceRequest, fetch_now
from manyhands.errors import BadLoss
from manyhands.launcher.worker_process.user_tracebacks import format_error
from manyhands.strategies.losses import as_loss

JOB = SliceRequest(step=1, v=0, rows=np.arange(3), key=0)


def raised(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_a_mistake_is_shown_by_the_users_lines() -> None:
    text = format_error(raised(lambda: as_loss(None, 4)))
    assert "text = format_error(raised(lambda: as_loss(None, 4)))" in text
    assert "losses.py" not in text
    assert text.splitlines()[-1].startswith("  try: ") and BadLoss.__name__ in text


def test_its_cause_is_shown_by_the_users_lines_too() -> None:
    def take(job: object) -> object:
        return {}["row"]

    failed = raised(lambda: fetch_now(take, JOB, draws=False))
    text = format_error(failed)
    assert 'return {}["row"]' in text and "KeyError: 'row'" in text
    assert "fetch.py" not in text


def test_of_a_bug_of_ours_every_line_is_shown() -> None:
    text = format_error(raised(lambda: as_loss((torch.zeros(1), None), 4)))
    assert "losses.py" in text and "test_tracebacks.py" in text


def test_what_user_code_raises_is_shown_without_our_frames() -> None:
    def take(job: object) -> object:
        return 1 / 0

    failed = raised(lambda: fetch_now(take, JOB, draws=False)).__cause__
    assert failed is not None
    text = format_error(failed)
    assert "return 1 / 0" in text and "fetch.py" not in text


def test_lines_inside_torch_are_left_out_and_the_users_own_between_them_stay() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, torch.zeros(2, 17))

    failed = raised(lambda: torch.nn.Sequential(Net())(torch.zeros(1, 16)))
    text = format_error(failed)
    assert "torch.nn.Sequential(Net())(torch.zeros(1, 16))" in text, "where the user called it"
    assert "torch.nn.functional.linear(x, torch.zeros(2, 17))" in text, "and where it failed"
    assert "module.py" not in text and "container.py" not in text
    assert "module.py" in format_error(failed, whole=True) and "container.py" in format_error(failed, whole=True)


def test_what_torch_did_for_a_line_of_ours_is_shown_as_there_is_no_other() -> None:

    failed = raised(lambda: fetch_now(torch.nn.Linear(2, 2), JOB, draws=False))
    assert "linear.py" in format_error(failed.__cause__ or failed)
