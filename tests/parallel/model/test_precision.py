"""Loss scaling and global norms."""

from __future__ import annotations

import math

import torch

from manyhands.parallel.gradients.gradient_norm import BLOCK, clip_factor, global_norm
from manyhands.parallel.model.precision import LossScale


def test_the_scale_halves_on_overflow_and_doubles_after_many_good_steps() -> None:
    scale = LossScale()
    scale.update(overflow=True)
    assert scale.value == 2.0**15
    for _ in range(LossScale.GROWTH_STEPS):
        scale.update(overflow=False)
    assert scale.value == 2.0**16


def test_the_scale_resumes_where_its_state_was_saved() -> None:
    scale, again = LossScale(), LossScale()
    scale.update(overflow=True)
    scale.update(overflow=False)
    again.restore(scale.state())
    assert (again.value, again.good_steps) == (scale.value, scale.good_steps)


def test_the_norm_is_that_of_all_gradients_together_and_sees_infinities() -> None:
    grads = [torch.randn(3, 5), torch.randn(BLOCK + 7), torch.tensor(2.0)]
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    assert math.isclose(global_norm(grads), expected, rel_tol=1e-12)
    assert global_norm([]) == 0.0
    assert not math.isfinite(global_norm([*grads, torch.tensor([float("inf")])]))


def test_clipping_shortens_long_gradients_and_leaves_short_ones_alone() -> None:
    assert clip_factor(5.0, 10.0) == clip_factor(5.0, None) == 1.0
    assert clip_factor(5.0, 1.0) == 0.2


def test_overflows_are_hopeless_once_fifty_follow_each_other() -> None:
    scale = LossScale()
    for _ in range(49):
        scale.update(overflow=True)
    assert not scale.is_hopeless
    scale.update(overflow=False)
    scale.update(overflow=True)
    assert scale.skipped == 1
    for _ in range(49):
        scale.update(overflow=True)
    assert scale.is_hopeless
