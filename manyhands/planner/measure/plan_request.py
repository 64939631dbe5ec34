"""Requests a script's plan for `mh plan show`, and writes it in the script's process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.errors import TrainingFailed
from manyhands.planner.measure.memory_plan import ModelPlan, base_bytes, plan_model
from manyhands.spec.load import PLAN_VARIABLE, environment
from manyhands.spec.probe_requests import PlanOrder
from manyhands.training.setup.divide_model import Sample
from manyhands.training.setup.user_model import Parts
from manyhands.training.worker.strategy_lookup import Planned

__all__ = ["WAYS_TO_TRAIN", "ask_for_plan", "ask_script", "last_words", "write_plan"]

WAYS_TO_TRAIN = (
    "mh.Trainer(model, loss, optimizer).fit(data)",
    "hands = mh.join(), for a loop of your own or DDP's: docs/migration.md",
    "with manyhands.distribute.MirroredStrategy().scope(): around a Keras model and its compile()",
)
"""What a script may do so that manyhands sees its steps."""
OF_A_TORCHRUN_SCRIPT = "env:// rendezvous"
"""Of the error of `init_process_group` where no launcher has set RANK: not the mistake, but that it needs one."""


class _PlanAnswered(msgspec.Struct):
    plan: ModelPlan | None = None
    problem: str = ""


def write_plan(planned: Planned, parts: Parts, sample: Sample) -> NoReturn:
    """Write the plan, and end the process: the script does not continue."""
    try:
        optimizer = parts.make_optimizer(parts.model)
        base = partial(base_bytes, parts.model)
        plan = plan_model(parts.model, optimizer, planned.strategy, planned.workers, sample, planned.slices, base)
        answer = _PlanAnswered(plan)
    except Exception as error:
        answer = _PlanAnswered(problem=str(error))
    Path(planned.path).write_bytes(msgspec.json.encode(answer))
    os._exit(0)


def ask_for_plan(command: WorkerCommand, strategy: str, workers: int, timeout_s: float) -> ModelPlan:
    """Run the script until it calls fit, and return its plan."""

    def order(path: Path) -> Mapping[str, str]:
        return {PLAN_VARIABLE: msgspec.json.encode(PlanOrder(str(path), strategy, workers)).decode()}

    answer = msgspec.json.decode(ask_script(command, order, timeout_s, "did not call fit"), type=_PlanAnswered)
    if answer.plan is None:
        raise TrainingFailed(answer.problem)
    return answer.plan


def ask_script(
    command: WorkerCommand, order: Callable[[Path], Mapping[str, str]], timeout_s: float, missing: str
) -> bytes:
    """Run the script until it has written the file that `order`, variables of its environment, asks for.

    `missing`: what a script that ends without it did not do.
    """
    with tempfile.TemporaryDirectory(prefix="manyhands-plan-") as folder:
        path = Path(folder) / "answer.json"
        call = ["-m", command.target] if command.kind == "module" else [command.target]
        try:
            ended = subprocess.run(
                [sys.executable, *call, *command.args],
                env={**environment(), **order(path)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            fix = [f"--wait {max(1, round(2 * timeout_s))}"]
            raise TrainingFailed(f"The script {missing} within {timeout_s:g} s.", fix=fix) from None
        if not path.exists():
            last = last_words(ended.stderr.decode(errors="replace"))
            own_error = ended.returncode and not any(OF_A_TORCHRUN_SCRIPT in line for line in last)
            fixes = [] if own_error else list(WAYS_TO_TRAIN)
            raise TrainingFailed("\n  ".join([f"The script {missing}.", *last]), fix=fixes)
        return path.read_bytes()


def last_words(stderr: str) -> list[str]:
    """The whole error that a script ended with, or its last five lines if that is more."""
    lines = stderr.strip().splitlines()
    heads = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    return lines[min([len(lines) - 5, *heads[-1:]]) :] if len(lines) > 5 else lines
