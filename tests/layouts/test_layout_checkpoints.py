"""Checkpoints move: saved under one layout and loaded under the next, through all of them, as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.testing import RankPool
from tests.layouts.layout_cases import data_for, make_trainer, saved_weights
from tests.layouts.test_layouts import BY_SEQUENCE, LAYOUTS, assert_same_weights

STEPS = 2


class Interrupted(Exception):
    pass


class InterruptAfter:
    """Raises on every worker once `step` is committed, and its checkpoint."""

    def __init__(self, step: int) -> None:
        self._step = step

    def before_step(self, trainer: mh.Trainer, step: int) -> None:
        if step == self._step + 1:
            raise Interrupted


def leg(model: str, strategy: Any, until: int, steps: int, optimizer: str) -> dict[str, Any] | int:
    """Trains from the run's last step to step `until`; returns its weights at the end."""
    trainer = make_trainer(model, strategy, optimizer, hooks=[InterruptAfter(until)], clip_norm=1.0)
    try:
        trainer.fit(data_for(model), steps=steps, batch_size=16, checkpoint=mh.Checkpoints(every_steps=1))
    except Interrupted:
        return trainer.step
    return saved_weights(trainer)


FOR_WORDS = [*LAYOUTS.values(), *BY_SEQUENCE.values()]
FEW_WORKERS = [layout for layout in LAYOUTS.values() if layout[0] <= 4]


# The biases of an attention's keys have a true gradient of 0, whose rounding noise Adam turns into steps of full size.
@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "optimizer", "through"),
    [
        pytest.param("tied transformer", "momentum", FOR_WORDS, id="words"),
        pytest.param("CNN", "AdamW", FEW_WORKERS, id="pictures"),
    ],
)
def test_a_run_goes_through_all_layouts(
    ranks: RankPool, tmp_path: Path, model: str, optimizer: str, through: list[tuple[int, Any]]
) -> None:
    layouts = [(1, mh.Single()), *through, (2, mh.Mirrored())]
    total = STEPS * len(layouts)
    for number, (workers, strategy) in enumerate(layouts, 1):
        results = ranks(workers, leg, model, strategy, number * STEPS, total, optimizer, run_dir=tmp_path / "run")
        if number < len(layouts):
            assert results == [number * STEPS] * workers
    [alone] = ranks(1, leg, model, mh.Single(), total, total, optimizer)
    assert_same_weights(alone, results[0])
