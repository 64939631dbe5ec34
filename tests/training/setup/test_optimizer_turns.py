"""Several models and optimizers in a loop of one's own: a GAN is what a loop in plain torch makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.data.sample_order import order as order_of
from manyhands.errors import Preempted
from manyhands.testing import RankFailed, RankPool

ROWS, BATCH, EPOCHS = 24, 6, 2


def rows() -> tuple[Tensor, Tensor]:
    """Real examples, and the noise that fake ones are made of."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, 4, generator=generator) + 1.0, torch.randn(ROWS, 2, generator=generator)


def models() -> tuple[nn.Module, nn.Module, Any, Any]:
    torch.manual_seed(5)
    generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.02)
    return generator, critic, of_critic, torch.optim.SGD(generator.parameters(), lr=0.1, momentum=0.5)


def critic_loss(generator: nn.Module, critic: nn.Module, real: Tensor, noise: Tensor) -> Tensor:
    judge = nn.functional.binary_cross_entropy_with_logits
    right, wrong = critic(real), critic(generator(noise).detach())
    return judge(right, torch.ones_like(right)) + judge(wrong, torch.zeros_like(wrong))


def generator_loss(generator: nn.Module, critic: nn.Module, noise: Tensor) -> Tensor:
    judged = critic(generator(noise))
    return nn.functional.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))


def in_plain_torch(orders: list[list[int]]) -> list[list[float]]:
    generator, critic, of_critic, of_generator = models()
    real, noise = rows()
    for order in orders:
        for first in range(0, ROWS, BATCH):
            taken = order[first : first + BATCH]
            of_critic.zero_grad()
            critic_loss(generator, critic, real[taken], noise[taken]).backward()
            of_critic.step()
            of_generator.zero_grad()
            generator_loss(generator, critic, noise[taken]).backward()
            of_generator.step()
    return [one.flatten().tolist() for model in (generator, critic) for one in model.parameters()]


def in_turns(run_dir: str = "", stop_after: int = 0) -> list[list[float]]:
    hands = mh.join("mirrored", seed=7, slices=6, run_dir=run_dir or None, checkpoint=mh.Checkpoints(every_steps=1))
    generator, critic, of_critic, of_generator = models()
    hands.setup([generator, critic], [of_critic, of_generator])
    hands.resume()
    for real, noise in hands.batches(rows(), batch_size=BATCH, epochs=EPOCHS):
        if hands.turn == 0:
            hands.backward(critic_loss(generator, critic, real, noise))
        else:
            hands.backward(generator_loss(generator, critic, noise))
        hands.step()
        if stop_after and hands.steps_done == stop_after:
            hands._worker.session.stop_requested = "preempt"
    assert hands.steps_done == 2 * EPOCHS * ROWS // BATCH
    assert all(one.requires_grad for model in (generator, critic) for one in model.parameters())
    return [one.flatten().tolist() for model in (generator, critic) for one in model.parameters()]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_gan_is_what_a_loop_in_plain_torch_makes_of_it(ranks: RankPool, workers: int) -> None:
    expected = in_plain_torch([list(order_of(ROWS, 7, epoch, 0, ROWS)) for epoch in range(EPOCHS)])
    for found in ranks(workers, in_turns):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_a_gan_that_is_stopped_between_two_turns_resumes_with_the_other(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks(2, in_turns)[0]
    with pytest.raises(RankFailed, match=Preempted.__name__):
        ranks(2, in_turns, str(tmp_path), 6, run_dir=tmp_path)
    assert ranks(2, in_turns, str(tmp_path), run_dir=tmp_path)[0] == whole
