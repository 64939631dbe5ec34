"""Whether servers can train a model at all, and whether an interval fits the server that shall begin it: pure.

Workers and servers run the same script, but not always with the same arguments, files or versions. A server whose
model differs from that of the worker that opens an interval reports it and carries on: the other may be the one that
is wrong. Start at `misfit`.
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

__all__ = ["check_length", "check_room", "check_servable", "misfit", "refusal"]

_SHOWN = 3
MOST_COPIES, MOST_ROWS = 2**16, 2**20
# Each server has a word in a page of memory.
MOST_SERVERS = 512


def misfit(opened: Open, server: int, model: nn.Module, optimizer: Optimizer) -> str | None:
    """Why server number `server` cannot begin this interval; None: it can."""
    by_name = dict(model.named_parameters())
    unknown = [name for name in opened.trained if name not in by_name]
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        return f"it has no parameter {', '.join(unknown[:_SHOWN])}{more}"
    if layout_name(opened.trained, [by_name[name] for name in opened.trained]) != opened.layout:
        return "its parameters have other shapes or types, or come in another order"
    if server >= opened.servers:
        return f"it is server {server}, but the worker expects {opened.servers} servers"
    if not _has_settings(opened, optimizer):
        return f"its optimizer is {type(optimizer).__name__}, with {len(optimizer.param_groups)} groups of parameters"
    return None if _is_sensible(opened) else "the interval's numbers make no sense"


def _has_settings(opened: Open, optimizer: Optimizer) -> bool:
    """Whether the worker's optimizer settings fit this kind of optimizer."""
    if opened.states and not runs_fused(optimizer):
        return False
    same_number = len(opened.groups) == len(optimizer.param_groups)
    return same_number and all(optimizer.defaults.keys() <= group.keys() for group in opened.groups)


def _is_sensible(opened: Open) -> bool:
    interval, num_trained = opened.interval, len(opened.trained)
    return (
        opened.version == interval.first - 1 >= 0
        and interval.first <= interval.last
        and min(interval.batch_size, interval.slices, interval.num_rows, opened.batches_per_step) > 0
        and 0 <= interval.start_row <= interval.num_rows
        and min(opened.ahead or 0, opened.backups, opened.alone) >= 0
        and opened.servers <= MOST_SERVERS
        and 2 <= opened.copies <= MOST_COPIES
        and 1 <= opened.rows <= MOST_ROWS
        and len(opened.counts) in (0, num_trained)
        and len(opened.tables) in (0, opened.servers)
        and all(num_bytes >= 0 for num_bytes in opened.tables)
    )


def check_room(needed: int, room: int) -> None:
    """`EnvironmentProblem` if `needed` bytes are more than `room`."""
    if needed > room:
        raise EnvironmentProblem(
            f"weights, states and gradients take {needed / 1e6:.1f} MB, and it has {room / 1e6:.1f} MB",
            fix=["fewer workers or slices, or a lower staleness", "a higher memory limit of the container"],
        )


def check_length(num_bytes: int, most_bytes: int, what: str) -> None:
    """`SpecError` if the description of parameters, beside what is in shared memory, is too long to be sent or kept.

    Without this check its sender would wait for an answer that never arrives.
    """
    if num_bytes > most_bytes:
        raise SpecError(
            f"{what} takes {num_bytes / 1e6:.2f} MB beside weights and states, but parameter servers take at most "
            f"{most_bytes / 1e6:.2f} MB: there are too many parameters, or their names are too long.",
            fix=[
                "fewer and larger parameters",
                "SGD, Adam or AdamW, whose states are in shared memory",
                'strategy="mirrored"',
            ],
        )


def refusal(refused: Refused) -> ManyhandsError:
    """The error that the worker that opened the interval raises."""
    if refused.fix:
        return EnvironmentProblem(
            f"Parameter server {refused.server} has no room for this training: {refused.why}.", fix=refused.fix
        )
    return SpecError(
        f"Parameter server {refused.server} cannot train what this worker trains: {refused.why}.",
        where="the model and optimizer that the script made there, and here",
        fix=[
            "the same script, arguments and versions for servers and workers",
            "no random choices in the structure of the model",
        ],
    )


def check_servable(precision: Precision, optimizer: Optimizer, model: nn.Module) -> None:
    """Checked by a worker before anything begins."""
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
    if why := getattr(optimizer, "why_whole", ""):  # of the trainer's Keras optimizer; servers update tensors in turn
        raise SpecError(
            f"Each parameter server updates its own variables, and how many servers there are may change: {why}.",
            where="optimizer",
            fix=["clip_norm=, in place of global_clipnorm", 'mh.ParameterServer(mode="hybrid")', "mh.Mirrored()"],
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
