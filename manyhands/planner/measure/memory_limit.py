"""A limit on each worker's memory: the need of a layout is predicted before it starts, and refused if it is more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from manyhands.errors import SpecError
from manyhands.observe.event_text import PHASES_OF_MEMORY as PHASES
from manyhands.observe.event_text import size
from manyhands.planner.measure.memory_plan import ModelPlan, base_bytes, plan_model
from manyhands.training.setup.divide_model import Sample
from manyhands.training.setup.user_model import Parts

__all__ = ["check_memory", "parse_bytes"]

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
MAX_WORKERS = 64


def parse_bytes(limit: int | str) -> int:
    """A number of bytes, or text such as "2GB"."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?b?)\s*", str(limit), re.I)
    try:
        if found is not None and found[2].lower() in UNITS:
            return int(float(found[1]) * UNITS[found[2].lower()])
    except ValueError:
        pass
    raise SpecError(f"memory_limit is {limit!r}.", where="memory_limit", fix=['"2GB"', "2_000_000_000"])


def check_memory(
    limit: int | str, parts: Parts, choice: Any, workers: int, slices: int | None, sample: Sample
) -> ModelPlan:
    """The plan; `SpecError` if a worker would need more than `limit`, with what for, and what would fit."""
    most = parse_bytes(limit)
    plan = _plan(parts, choice, workers, slices, sample)
    if plan.most_bytes <= most:
        return plan
    worst = max(plan.memory, key=lambda worker: worker.total)
    counted = ("weights", "gradients", "states", "activations")
    parts_text = ", ".join(f"{name} {size(getattr(worst, name))}" for name in counted)
    raise SpecError(
        f"Rank {worst.rank} would need {size(worst.total)} {PHASES[worst.largest]} (torch and the program "
        f"{size(worst.base)}; in a step {parts_text}), which is {size(worst.total - most)} more than "
        f"memory_limit={limit!r}.",
        where=f"mh.{type(choice).__name__}",
        fix=[
            *_enough_workers(parts, choice, workers, slices, sample, most),
            f"memory_limit={worst.total}",
            "a smaller batch",
        ],
    )


def _enough_workers(
    parts: Parts, choice: Any, workers: int, slices: int | None, sample: Sample, most: int
) -> Iterator[str]:
    """The smallest doubling of the number of workers with which each has enough memory, if there is one."""
    fields = {field.name for field in msgspec.structs.fields(choice)}
    name = next((one for one in ("workers", "stages") if one in fields), None)
    count = 2 * workers
    while name is not None and count <= MAX_WORKERS:
        try:
            wider = msgspec.structs.replace(choice, **{name: count})
            if _plan(parts, wider, count, slices, sample).most_bytes <= most:
                yield f"{name}={count}"
                return
        except SpecError:
            return
        count *= 2


def _plan(parts: Parts, choice: Any, workers: int, slices: int | None, sample: Sample) -> ModelPlan:
    model = parts.model
    return plan_model(model, parts.make_optimizer(model), choice, workers, sample, slices, partial(base_bytes, model))
