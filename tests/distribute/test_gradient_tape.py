"""Gradient tapes, one inside of the other too: they give what torch gives by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manyhands import distribute as tf_distribute
from manyhands.errors import NotHere, SpecError, UsageError
from manyhands.testing import RankPool
from tests.training.setup.keras_workloads import import_keras

GradientTape = tf_distribute.GradientTape


def test_an_outer_tape_differentiates_the_gradient_of_an_inner_one() -> None:
    weight, x = nn.Parameter(torch.tensor([2.0])), torch.tensor([3.0])
    with GradientTape() as tape:
        with GradientTape() as inner:
            inner.watch(x)
            y = weight * x**2
        slope = inner.gradient(y, [x])[0]  # 2wx = 12
        loss = (slope - 1) ** 2
    assert tape.gradient(loss, [weight])[0].item() == 2 * (12 - 1) * 2 * 3.0


def test_three_tapes_give_the_third_derivative() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    with GradientTape() as third, GradientTape() as second:
        with GradientTape() as first:
            y = x**4
        slope = first.gradient(y, x)
        curvature = second.gradient(slope, x)  # asked for inside of `second`, which it ends
    assert (slope.item(), curvature.item(), third.gradient(curvature, x).item()) == (32.0, 48.0, 48.0)


def test_a_gradient_outside_of_any_tape_records_nothing_and_frees_its_graph() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    with GradientTape() as tape:
        y = x.exp()
    assert not tape.gradient(y, x).requires_grad
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)


def critic_by_hand(critic: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> list[Tensor]:
    """WGAN-GP's gradients with torch alone."""
    between = (real + mix * (fake - real)).requires_grad_(True)
    (slopes,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = ((slopes.square().sum(1).sqrt() - 1) ** 2).mean()
    loss = critic(fake).mean() - critic(real).mean() + 10.0 * penalty
    return list(torch.autograd.grad(loss, list(critic.parameters())))


def test_the_gradient_penalty_of_keras_guide_of_wgan_gp_is_that_of_torch() -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    real, fake, mix = torch.randn(5, 3), torch.randn(5, 3), torch.rand(5, 1)
    with GradientTape() as tape:
        between = real + mix * (fake - real)
        with GradientTape() as gp_tape:
            gp_tape.watch(between)
            predicted = critic(between)
        slopes = gp_tape.gradient(predicted, [between])[0]
        penalty = ((slopes.square().sum(1).sqrt() - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10.0 * penalty
    found = tape.gradient(loss, list(critic.parameters()))
    for one, expected in zip(found, critic_by_hand(critic, real, fake, mix), strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-6)


def test_two_tapes_that_recorded_the_same_operations_may_both_be_asked() -> None:
    """TensorFlow's tutorial of DCGAN: the discriminator's output for a picture is in both losses."""
    maker, judge = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    noise, real = torch.randn(6, 2), torch.randn(6, 3)
    with GradientTape() as gen_tape, GradientTape() as disc_tape:
        fake = judge(maker(noise))
        gen_loss = (fake - 1).square().mean()
        disc_loss = fake.square().mean() + (judge(real) - 1).square().mean()
    of_maker = gen_tape.gradient(gen_loss, list(maker.parameters()))
    of_judge = disc_tape.gradient(disc_loss, list(judge.parameters()))
    torch.testing.assert_close(
        of_maker, list(torch.autograd.grad(gen_loss, list(maker.parameters()), retain_graph=True))
    )
    torch.testing.assert_close(of_judge, list(torch.autograd.grad(disc_loss, list(judge.parameters()))))


def test_what_a_tape_does_not_record_is_a_constant() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    with GradientTape(persistent=True) as tape:
        y = x**2
        with tape.stop_recording():
            constant = x**3
            slope = tape.gradient(y, x)
        z = y * constant
    assert not slope.requires_grad and slope.item() == 6.0
    assert tape.gradient(z, x).item() == 6.0 * 27.0
    with pytest.raises(UsageError, match="outside of the tape"), tape.stop_recording():
        pass
    with GradientTape(), GradientTape() as inner, pytest.raises(NotHere, match="one record"), inner.stop_recording():
        pass


def test_output_gradients_weigh_the_targets() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with GradientTape(persistent=True) as tape:
        squares, cubes = x**2, x**3
    assert tape.gradient(squares, x, output_gradients=torch.tensor([10.0, 1.0])).tolist() == [20.0, 4.0]
    both = tape.gradient([squares, cubes], x, output_gradients=[np.array([1.0, 0.0]), None])
    assert both.tolist() == [2.0 + 3.0, 12.0]
    with pytest.raises(SpecError, match=r"2 targets, and 1 output_gradients"):
        tape.gradient([squares, cubes], x, output_gradients=[torch.ones(2)])
    with pytest.raises(SpecError, match=r"shape \(2,\), and its output gradient \(3,\)"):
        tape.gradient(squares, x, output_gradients=torch.ones(3))


@pytest.mark.parametrize("zero", ["zero", tf_distribute.UnconnectedGradients.ZERO])
def test_sources_that_are_not_used_have_zeros_where_they_are_asked_for(zero: Any) -> None:
    x, unused = torch.tensor(2.0, requires_grad=True), nn.Parameter(torch.ones(3))
    with GradientTape(persistent=True) as tape:
        y = x * 5
    found = tape.gradient(y, [x, unused], unconnected_gradients=zero)
    assert [one.tolist() for one in found] == [5.0, [0.0, 0.0, 0.0]]
    assert tape.gradient(torch.tensor(1.0), x, unconnected_gradients=zero).item() == 0.0
    assert tape.jacobian(y, unused, unconnected_gradients=zero).tolist() == [0.0] * 3
    assert tape.gradient(y, unused) is None and tape.jacobian(y, unused) is None
    with pytest.raises(SpecError, match="unconnected_gradients is 'zeros'"):
        tape.gradient(y, x, unconnected_gradients="zeros")


def test_jacobians_are_those_of_torch() -> None:
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(3, 4)), torch.randn(5, 3)
    with GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = torch.tanh(x @ weight)
    of_weight, of_x = tape.jacobian(y, [weight, x])
    expected = torch.autograd.functional.jacobian(lambda w, rows: torch.tanh(rows @ w), (weight, x.detach()))
    torch.testing.assert_close((of_weight, of_x), expected)
    rows = tape.batch_jacobian(y, x)
    torch.testing.assert_close(rows, torch.stack([of_x[row, :, row] for row in range(5)]))
    with pytest.raises(SpecError, match=r"\(5, 4\), and the source's \(3, 4\)"):
        tape.batch_jacobian(y, weight)


def test_the_jacobian_of_a_gradient_is_the_hessian() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with GradientTape() as outer:
        with GradientTape() as inner:
            y = (x**3).sum() + x[0] * x[1]
        slope = inner.gradient(y, x)
    assert outer.jacobian(slope, x).tolist() == [[6.0, 1.0], [1.0, 12.0]]


def test_what_a_tape_cannot_do_is_refused_with_what_to_write() -> None:
    tape = GradientTape()
    with pytest.raises(NotHere, match="reset") as refused:
        tape.reset()
    assert "another GradientTape()" in str(refused.value)
    with pytest.raises(NotHere, match="keeps no list"):
        tape.watched_variables()
    with pytest.raises(SpecError, match=r"torch\.int64 has no gradient"):
        tape.watch(torch.tensor([1]))
    with tape, pytest.raises(UsageError, match="records already"), tape:
        pass


def test_a_tape_that_fails_ends() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(ZeroDivisionError), GradientTape():
        raise ZeroDivisionError
    with GradientTape() as tape:
        y = x**2
    assert not tape.gradient(y, x).requires_grad, "no tape records any more"


def keras_penalty() -> list[float]:
    """The penalty's gradient of a Keras critic's first weight, by tapes and by differences; the size of the others."""
    keras = import_keras()
    keras.utils.set_random_seed(3)
    critic = keras.Sequential([keras.Input((3,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
    between = torch.randn(4, 3)
    with GradientTape() as tape:
        with GradientTape() as gp_tape:
            gp_tape.watch(between)
            predicted = critic(between, training=True)
        slopes = gp_tape.gradient(predicted, [between])[0]
        norm = keras.ops.sqrt(keras.ops.sum(keras.ops.square(slopes), axis=1))
        penalty = keras.ops.mean((norm - 1.0) ** 2)
    kernel, bias, last, _ = tape.gradient(penalty, critic.trainable_variables)
    first, values = critic.trainable_variables[0].value, []
    for step in (1e-3, -2e-3):
        with torch.no_grad():
            first[0, 0] += step
        at = between.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(at).sum(), at)
        values.append(((slope.square().sum(1).sqrt() - 1) ** 2).mean().item())
    return [kernel[0, 0].item(), (values[0] - values[1]) / 2e-3, float(bias.abs().sum()), float(last.abs().sum())]


def test_the_penalty_of_a_keras_critic_trains_its_weights(ranks: RankPool) -> None:
    [[by_tapes, by_differences, *others]] = ranks(1, keras_penalty)
    assert by_tapes == pytest.approx(by_differences, abs=2e-3) and min(abs(by_tapes), *others) > 1e-3
