"""Whether servers can train a model at all, and whether a course fits the server that is told to begin it: pure.

Workers and servers run the same script, but not always with the same arguments, files or versions. A server that has
another model than whoever opens a course says so and goes on as before: others may be right. Start at `misfit`.
"""

from __future__ import annotations

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.errors import EnvironmentProblem, ManyhandsError, SpecError
from manyhands.parallel.model.precision import Precision
from manyhands.parallel.weights.local_update import runs_fused
from manyhands.parameter_server.memory.optimizer_states import settings_of
from manyhands.parameter_server.memory.versioned_memory import layout_name
from manyhands.parameter_server.protocol.messages import Open, Refused

__all__ = ["check_room", "check_servable", "check_told", "misfit", "refusal"]

_SHOWN = 3
MOST_COPIES, MOST_ROWS = 2**16, 2**20
# Each has a word in a page of memory.
MOST_SERVERS = 512


def misfit(opened: Open, server: int, model: nn.Module, optimizer: Optimizer) -> str | None:
    """Why server number `server` cannot begin this course; None: it can."""
    by_name = dict(model.named_parameters())
    unknown = [name for name in opened.trained if name not in by_name]
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        return f"it has no parameter {', '.join(unknown[:_SHOWN])}{more}"
    if layout_name(opened.trained, [by_name[name] for name in opened.trained]) != opened.layout:
        return "its parameters have other shapes or types, or come in another order"
    if server >= opened.servers:
        return f"it is server {server}, and the course is for {opened.servers}"
    if not _has_settings(opened, optimizer):
        return f"its optimizer is {type(optimizer).__name__}, with {len(optimizer.param_groups)} groups of parameters"
    return None if _is_sensible(opened) else "the course's numbers make no sense"


def _has_settings(opened: Open, optimizer: Optimizer) -> bool:
    """Whether what is told of the worker's optimizer is what one of this kind has."""
    if opened.states and not runs_fused(optimizer):
        return False
    same_number = len(opened.groups) == len(optimizer.param_groups)
    return same_number and all(optimizer.defaults.keys() <= group.keys() for group in opened.groups)


def _is_sensible(opened: Open) -> bool:
    course, num_trained = opened.course, len(opened.trained)
    return (
        opened.version == course.first - 1 >= 0
        and course.first <= course.last
        and min(course.batch_size, course.slices, course.num_rows, opened.batches_per_step) > 0
        and 0 <= course.start_row <= course.num_rows
        and min(opened.ahead or 0, opened.backups, opened.alone) >= 0
        and opened.servers <= MOST_SERVERS
        and 2 <= opened.copies <= MOST_COPIES
        and 1 <= opened.rows <= MOST_ROWS
        and len(opened.counts) in (0, num_trained)
        and len(opened.tables) in (0, opened.servers)
        and all(num_bytes >= 0 for num_bytes in opened.tables)
    )


def check_room(needed: int, room: int) -> None:
    """`EnvironmentProblem` if so many bytes are more than there are."""
    if needed > room:
        raise EnvironmentProblem(
            f"weights, states and gradients take {needed / 1e6:.1f} MB, and it has {room / 1e6:.1f} MB",
            fix=["fewer workers or slices, or a lower staleness", "a higher memory limit of the container"],
        )


def check_told(num_bytes: int, most_bytes: int, what: str) -> None:
    """`SpecError` if what is said of parameters, beside what lies in memory, is more than can be sent or kept.

    Whoever sent it would wait for an answer that never comes.
    """
    if num_bytes > most_bytes:
        raise SpecError(
            f"{what} takes {num_bytes / 1e6:.2f} MB beside weights and states, but parameter servers take at most "
            f"{most_bytes / 1e6:.2f} MB: there are too many parameters, or their names are too long.",
            fix=[
                "fewer and larger parameters",
                "SGD, Adam or AdamW, of whose states less is told",
                'strategy="mirrored"',
            ],
        )


def refusal(told: Refused) -> ManyhandsError:
    """What the worker that opened the course raises."""
    if told.fix:
        return EnvironmentProblem(
            f"Parameter server {told.server} has no room for this training: {told.why}.", fix=told.fix
        )
    return SpecError(
        f"Parameter server {told.server} cannot train what this worker trains: {told.why}.",
        where="the model and optimizer that the script made there, and here",
        fix=["the same script, arguments and versions for servers and workers", "nothing random in what is made"],
    )


def check_servable(precision: Precision, optimizer: Optimizer, model: nn.Module) -> None:
    """By a worker, before anything begins."""
    if precision.scale is not None:
        raise SpecError(
            "fp16 lowers its loss scale when a step overflows, which parameter servers cannot take back.",
            where="precision",
            fix=['precision="bf16"'],
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SpecError(
            "LBFGS evaluates the loss several times per step, which a parameter server cannot do.",
            fix=["another optimizer", 'strategy="mirrored"'],
        )
    try:
        msgspec.msgpack.encode(settings_of(optimizer))
    except (TypeError, ValueError, OverflowError) as error:
        raise SpecError(
            f"The settings of {type(optimizer).__name__} cannot be sent to a parameter server: {error}.",
            fix=["an optimizer whose param_groups have numbers, text and tuples", 'strategy="mirrored"'],
        ) from error
    others = {str(param.device) for param in model.parameters() if param.device.type != "cpu"}
    if others:
        raise SpecError(
            f"Parameter servers keep weights in the memory of the host, but the model is on {', '.join(others)}.",
            fix=['devices=("cpu",)', 'strategy="mirrored"'],
        )
