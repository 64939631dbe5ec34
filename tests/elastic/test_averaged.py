"""Local SGD workers that are killed -9: the others go back to the last averaging round, and lose no sample.

Where such a run ends depends on how many workers were in each round. Its record says how many; a loop by hand
with as many must end in the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from manyhands.data.sample_order import SliceDivision, order
from manyhands.events import GenerationStarted, RoundRestarted, StepDone
from manyhands.observe.run_audit import audit_run, generation_key, read_run_events
from tests.elastic import averaged_training as training
from tests.elastic.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.faults]

SCRIPT, STEPS, EVERY = Path(training.__file__), 40, 5
STEPS_PER_EPOCH = training.ROWS // training.BATCH
Start = Callable[[dict[str, Any]], Run]


@pytest.fixture
def averaged(tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def start(asked: dict[str, Any]) -> Run:
        options = ["--ui", "plain", "-n", "3", "--elastic", "1:3"]
        runs.append(Run(tmp_path / f"run-{len(runs)}", asked, options, SCRIPT))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def workers_by_step(run: Run, steps: int) -> dict[int, int]:
    """The number of workers in each committed step. Steps that a killed chief did not record were of its generation."""
    events = read_run_events(run.directory)
    sizes = {event.generation: event.workers for event in events if isinstance(event, GenerationStarted)}
    commits = sorted(
        (event for event in events if isinstance(event, StepDone)),
        key=lambda event: (generation_key(event.generation), event.time_s),
    )
    found = {commit.step: sizes[commit.generation] for commit in commits}
    for step in range(1, steps + 1):
        found.setdefault(step, found.get(step - 1, 3))
    return dict(sorted(found.items()))


def by_hand(workers: dict[int, int]) -> dict[str, Tensor]:
    torch.manual_seed(training.SEED)
    agreed = {name: value.detach() for name, value in training.model().state_dict().items()}
    x, y = training.data()
    closed = 0
    for step in workers:
        if step % EVERY == 0 or step % STEPS_PER_EPOCH == 0 or step == max(workers):
            agreed = _round(agreed, range(closed, step), workers[step], x, y)
            closed = step
    return agreed


def _round(agreed: dict[str, Tensor], steps: range, count: int, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    ends = []
    for share in SliceDivision(count).shares(training.SLICES):
        model = training.model()
        model.load_state_dict(agreed)
        optimizer = torch.optim.SGD(model.parameters(), lr=training.LR)
        for step in steps:
            epoch, start = divmod(step * training.BATCH, training.ROWS)
            rows = torch.from_numpy(order(training.ROWS, training.SEED, epoch, start, start + training.BATCH))
            each = training.BATCH // training.SLICES
            own = rows[share.start * each : share.stop * each]
            optimizer.zero_grad()
            training.loss(model, (x[own], y[own])).backward()
            optimizer.step()
        ends.append(model.state_dict())
    return {name: torch.stack([end[name] for end in ends]).mean(0) for name in agreed}


def test_a_round_begins_anew_with_those_who_are_left_and_newcomers_join_the_next(averaged: Start) -> None:
    faults = [{"slot": 0, "step": 13, "at": "forward"}, {"slot": 2, "step": 20, "at": "averaging"}]
    run = averaged({"until_whole": 3, "slow_s": 0.02, "local_sgd": {"every": EVERY}, "faults": faults})
    result = run.wait()
    assert all(after == before + 1 for before, after in pairwise(result["steps_seen"])), (
        "a hook was called twice for a step"
    )
    workers = workers_by_step(run, result["step"])
    assert min(workers.values()) < workers[result["step"]] == 3
    found = load_file(run.folder / "model.safetensors")
    for name, value in by_hand(workers).items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
    restarts = [event for event in read_run_events(run.directory) if isinstance(event, RoundRestarted)]
    assert [event.step for event in restarts] == [10, 15]


@pytest.mark.long
def test_streaming_drops_what_was_under_way(averaged: Start) -> None:
    """Averages of fragments that were begun with a lost worker are of no group any more."""
    way = {"every": 6, "fragments": 2, "overlap": 2, "outer": "nesterov", "outer_lr": 0.5, "outer_momentum": 0.5}
    fault = {"slot": 1, "step": 14, "at": "forward"}
    run = averaged({"steps": STEPS, "slow_s": 0.01, "local_sgd": way, "faults": [fault]})
    result = run.wait()
    assert result["step"] == STEPS
    ledger = audit_run(run.directory)
    assert not ledger.problems and ledger.rollbacks
    x, y = training.data()
    model = training.model()
    model.load_state_dict(load_file(run.folder / "model.safetensors"))
    assert training.loss(model, (x, y)).item() < 1.0
