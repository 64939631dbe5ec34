"""A user's function, or an optimizer's `reduce_grad`, in place of the sum of the slices' gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import SpecError, TrainingFailed
from manyhands.strategies.registry import STRATEGIES
from manyhands.testing import RankPool
from tests.training.workloads import OPTIMIZERS, data, mean_loss, plain, weights_of

Weights = dict[str, np.ndarray]
SLICES, BATCH, LR = 6, 24, 0.1


def median(gradients: list[Tensor]) -> Tensor:
    """The median over the slices, elementwise: one wild slice does not matter. As large as their sum."""
    return torch.stack(gradients).median(0).values * len(gradients)


class Reducing(torch.optim.SGD):
    """Plain SGD that combines the gradients itself, and counts how often."""

    calls = 0

    def reduce_grad(self, gradients: Sequence[list[Tensor]]) -> list[Tensor]:
        self.calls += 1
        return [median(one) for one in gradients]


def seeded() -> nn.Module:
    torch.manual_seed(3)
    return plain()


def by_function() -> Weights:
    trainer = mh.Trainer(seeded, mean_loss, OPTIMIZERS["SGD"], mh.Mirrored(reducer=median), slices=SLICES, exact=True)
    trainer.fit(data(), steps=5, batch_size=BATCH)
    return weights_of(trainer)


def by_optimizer() -> tuple[Weights, int]:
    made: list[Reducing] = []

    def make(params: Any) -> Reducing:
        made.append(Reducing(params, lr=LR))
        return made[0]

    trainer = mh.Trainer(seeded, mean_loss, make, "mirrored", slices=SLICES, exact=True)
    trainer.fit(data(), steps=5, batch_size=BATCH)
    return weights_of(trainer), made[0].calls


def by_hand() -> Weights:
    """The same loop, written out; a run on one worker says which rows are in which slice."""
    slices: list[Tensor] = []

    def noted(model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            slices.append(batch[2])
        return mean_loss(model, batch[:2])

    x, y = data()
    trainer = mh.Trainer(seeded, noted, OPTIMIZERS["SGD"], "single", slices=SLICES)
    trainer.fit((x, y, torch.arange(len(x))), steps=5, batch_size=BATCH)
    model = seeded()
    params = list(model.parameters())
    for step in range(5):
        rows = slices[step * SLICES : (step + 1) * SLICES]
        each = [
            torch.autograd.grad(mean_loss(model, (x[one], y[one])) * (len(one) / sum(map(len, rows))), params)
            for one in rows
        ]
        with torch.no_grad():
            for index, param in enumerate(params):
                param.sub_(LR * median([grads[index] for grads in each]))
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


def test_a_function_combines_the_gradients_of_all_slices_of_any_worker(ranks: RankPool) -> None:
    """The fourth batch is short, five ranks of six slices have different numbers of them."""
    hand = ranks(1, by_hand)[0]
    alone = ranks(1, by_function)[0]
    for name, value in hand.items():
        np.testing.assert_allclose(alone[name], value, rtol=0, atol=1e-6, err_msg=name)
    for world_size in (2, 5):
        for weights in ranks(world_size, by_function):
            assert all(weights[name].tobytes() == alone[name].tobytes() for name in hand), world_size


def test_an_optimizers_reduce_grad_is_called_once_per_step_on_every_rank(ranks: RankPool) -> None:
    alone = ranks(1, by_function)[0]
    for world_size in (1, 2):
        for weights, calls in ranks(world_size, by_optimizer):
            assert calls == 5
            assert all(weights[name].tobytes() == alone[name].tobytes() for name in alone)


def by_pipeline(path: str) -> Weights:
    strategy = mh.PipelineParallel(2, microbatches=SLICES, cuts=("2",), reducer=median)
    trainer = mh.Trainer(seeded, mean_loss, OPTIMIZERS["SGD"], strategy)
    trainer.fit(data(), steps=5, batch_size=BATCH)
    trainer.save(path)
    return {name: value.numpy() for name, value in safetensors.torch.load_file(path).items()}


def test_stages_of_a_pipeline_call_the_function_for_their_parameters(ranks: RankPool, tmp_path: Path) -> None:
    alone = ranks(1, by_function)[0]
    weights = ranks(2, by_pipeline, str(tmp_path / "weights.safetensors"))[0]
    for name, value in alone.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-6, err_msg=name)


KILLED = """
import os, signal, sys, torch, manyhands as mh
from tests.strategies.test_own_reduction import BATCH, OPTIMIZERS, SLICES, data, mean_loss, median, seeded

class Kill:
    def before_step(self, trainer, step):
        first = not os.path.exists("killed")
        if step == 3 and not trainer.is_chief and first:
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    trainer = mh.Trainer(seeded, mean_loss, OPTIMIZERS["SGD"], mh.Mirrored(reducer=median), slices=SLICES, exact=True,
                         hooks=[Kill()])
    trainer.fit(data(), steps=5, batch_size=BATCH)
    trainer.save("weights.safetensors")
"""


@pytest.mark.long
def test_a_worker_that_is_killed_changes_no_bit_of_the_result(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "manyhands.cli.main", "run", "-n", "2", "--elastic", "1:2", "killed.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0 and (tmp_path / "killed").exists(), done.stdout + done.stderr
    found = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    for name, value in ranks(1, by_function)[0].items():
        assert found[name].numpy().tobytes() == value.tobytes(), name


class WithOwnGradients(torch.optim.SGD):
    def get_gradients(self, loss: Tensor, params: Any) -> list[Tensor]:
        return list(torch.autograd.grad(loss, params))


def reducing(params: Any) -> Reducing:
    return Reducing(params, lr=LR)


REFUSED: list[tuple[Callable[..., Any], Any, str, str]] = [
    (lambda params: WithOwnGradients(params, lr=LR), "mirrored", "fp32", "has get_gradients"),
    (reducing, mh.Mirrored(reducer=median), "fp32", "only one of them"),
    *(
        (reducing, name, "fp32", f'strategy="{name}"')
        for name in sorted(STRATEGIES)
        if name not in ("single", "mirrored", "parameter_server")  # servers are processes: checked below
    ),
    (reducing, "mirrored", "fp16", "fp16 scales the loss"),
    (OPTIMIZERS["SGD"], mh.Mirrored(reducer=median), "fp16", "fp16 scales the loss"),
    (OPTIMIZERS["SGD"], mh.Mirrored(reducer=lambda gradients: gradients[0][0]), "fp32", "reducer returned"),
]


def refusals() -> list[str]:
    said = []
    for optimizer, strategy, precision, _ in REFUSED:
        try:
            trainer = mh.Trainer(plain, mean_loss, optimizer, strategy, precision=precision)
            trainer.fit(data(), steps=1, batch_size=BATCH)
        except (SpecError, TrainingFailed) as error:
            said.append(str(error))
        else:
            said.append("not refused")
    return said


def test_a_reduction_that_would_not_be_called_is_refused(ranks: RankPool) -> None:
    for (*_, words), said in zip(REFUSED, ranks(1, refusals)[0], strict=True):
        assert words in said


@pytest.mark.parametrize("strategy", [mh.CentralStorage, mh.Sharded])
def test_strategies_that_divide_the_sum_refuse_a_function_when_they_are_made(strategy: Any) -> None:
    with pytest.raises(SpecError, match="none sees the gradients of all slices") as refused:
        strategy(reducer=median)
    assert "mh.Mirrored(reducer=...)" in str(refused.value) and strategy(reducer="exact").reducer == "exact"
    with pytest.raises(SpecError, match="'bf16', but gradients are summed exactly"):
        strategy(reducer="bf16")


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(SpecError, match="neither a name nor a function"):
        mh.Mirrored(reducer=3)
    with pytest.raises(SpecError, match="workers send weights"):
        mh.LocalSGD(every=2, reducer=median)  # type: ignore[arg-type]
