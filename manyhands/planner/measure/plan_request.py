"""Writing down the plan that `mh plan show` asked a script for, and asking for it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.errors import TrainingFailed
from manyhands.planner.measure.memory_plan import ModelPlan, base_bytes, plan_model
from manyhands.spec.load import PLAN_VARIABLE, environment
from manyhands.spec.plan_order import PlanOrder
from manyhands.training.setup.divide_model import Sample
from manyhands.training.setup.user_model import Parts
from manyhands.training.worker.strategy_lookup import Planned

__all__ = ["ask_for_plan", "last_words", "tell_plan"]


class _Told(msgspec.Struct):
    plan: ModelPlan | None = None
    problem: str = ""


def tell_plan(planned: Planned, parts: Parts, sample: Sample) -> NoReturn:
    """Write the plan, and end the process: nothing of the script runs after this."""
    try:
        optimizer = parts.make_optimizer(parts.model)
        base = partial(base_bytes, parts.model)
        plan = plan_model(parts.model, optimizer, planned.strategy, planned.workers, sample, planned.slices, base)
        told = _Told(plan)
    except Exception as error:
        told = _Told(problem=str(error))
    Path(planned.path).write_bytes(msgspec.json.encode(told))
    os._exit(0)


def ask_for_plan(command: WorkerCommand, strategy: str, workers: int, timeout_s: float) -> ModelPlan:
    """Run the script up to its training, for its plan."""
    with tempfile.TemporaryDirectory(prefix="manyhands-plan-") as folder:
        path = Path(folder) / "plan.json"
        order = msgspec.json.encode(PlanOrder(str(path), strategy, workers)).decode()
        call = ["-m", command.target] if command.kind == "module" else [command.target]
        try:
            ended = subprocess.run(
                [sys.executable, *call, *command.args],
                env={**environment(), PLAN_VARIABLE: order},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            fix = [f"--wait {max(1, round(2 * timeout_s))}"]
            raise TrainingFailed(f"The script did not come to fit within {timeout_s:g} s.", fix=fix) from None
        if not path.exists():
            last = last_words(ended.stderr.decode(errors="replace"))
            raise TrainingFailed("\n  ".join(["The script did not come to fit.", *last]))
        told = msgspec.json.decode(path.read_bytes(), type=_Told)
    if told.plan is None:
        raise TrainingFailed(told.problem)
    return told.plan


def last_words(stderr: str) -> list[str]:
    """The error that a script ended with, all of it, or its last five lines where that is more."""
    lines = stderr.strip().splitlines()
    heads = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    return lines[min([len(lines) - 5, *heads[-1:]]) :] if len(lines) > 5 else lines
