"""Devices by TensorFlow's names: "/gpu:0", "/job:ps/task:0", and `replica_device_setter`.

A parameter that is made inside `device("/job:ps/task:1")` is stored on parameter server 1; one that is made inside
`device("/gpu:0")` is made on that device, or on the CPU where it is not there. Every placement is noted for the
placement log. Start reading at `device`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import manyhands as mh
from manyhands.distribute.train.cluster import ClusterSpec
from manyhands.distribute.train.notices import refuse_unknown, say_once
from manyhands.errors import EnvironmentProblem, SpecError
from manyhands.spec.keyword_check import checked_class, checked_keywords

__all__ = [
    "ConfigProto",
    "GPUOptions",
    "Place",
    "device",
    "is_placing",
    "missing_devices",
    "parse",
    "places_of",
    "replica_device_setter",
    "torch_device",
]

DeviceFunction = Callable[[], str]
_MARK = "_manyhands_place"
"""The attribute of a parameter that has its place."""


class Place(NamedTuple):
    """A device by its parts; None where the text does not say."""

    job: str | None = None
    task: int | None = None
    kind: str | None = None
    number: int = 0

    def __str__(self) -> str:
        job = f"/job:{self.job}/task:{self.task or 0}" if self.job else ""
        return f"{job}/device:{(self.kind or 'cpu').upper()}:{self.number}"


def parse(text: str) -> Place:
    """The parts of "/job:ps/task:0/device:GPU:1", in any number; `SpecError` for what is none."""
    found: dict[str, Any] = {}
    for part in filter(None, text.lower().split("/")):
        match = re.fullmatch(r"(job|replica|task|device:cpu|device:gpu|cpu|gpu)(?::(\w+|\*))?", part)
        if match is None:
            raise SpecError(f"{text!r} is no device.", where="device", fix=['"/gpu:0"', '"/cpu:0"', '"/job:ps/task:0"'])
        name, value = match[1].removeprefix("device:"), match[2]
        if name in ("cpu", "gpu"):
            found["kind"] = name
            found["number"] = int(value) if value and value.isdigit() else 0
        elif name != "replica":
            found[name] = value if name == "job" else int(value or 0)
    return Place(**found)


_missing: list[str] = []


def missing_devices() -> list[str]:
    """The devices that were asked for and are not in this machine."""
    return list(_missing)


def _torch_device(place: Place) -> torch.device:
    if place.kind != "gpu":
        return torch.device("cpu")
    if torch.cuda.is_available() and place.number < torch.cuda.device_count():
        return torch.device("cuda", place.number)
    name = f"/gpu:{place.number}"
    if name not in _missing:
        _missing.append(name)
    say_once(f"{name} is not in this machine: the CPU computes instead.")
    return torch.device("cpu")


def torch_device(name: str) -> str:
    """ "cuda:0" of "/gpu:0", or "cpu", said once, if there is none; torch's own names as they are."""
    text = str(name)
    return str(_torch_device(parse(text))) if text.startswith("/") or text.lower().startswith(("gpu", "cpu")) else text


_open: list[DeviceFunction | Place] = []
"""The nested `device` contexts, the innermost last."""


def is_placing() -> bool:
    """Whether this code is inside of `device`."""
    return bool(_open)


@checked_keywords
@contextmanager
def device(device_name_or_function: str | DeviceFunction | None) -> Iterator[None]:
    """Inside, parameters are made on this device, or stored on this parameter server; the innermost wins.

    Args:
        device_name_or_function: Such as "/gpu:0" or "/job:ps/task:0", or what `replica_device_setter` returns.
    """
    given = device_name_or_function
    place: DeviceFunction | Place = given if callable(given) else parse(given or "")
    hook = register_module_parameter_registration_hook(_place_parameter) if not _open else None
    _open.append(place)
    try:
        if isinstance(place, Place) and place.kind is not None:
            with _torch_device(place):
                yield
        else:
            yield
    finally:
        _open.pop()
        if hook is not None:
            hook.remove()


def _place_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    if param is None or hasattr(param, _MARK):
        return
    merged = Place()
    for one in _open:  # an inner device wins, for what it says
        inner = parse(one()) if callable(one) else one
        merged = Place(
            inner.job or merged.job,
            inner.task if inner.job else merged.task,
            inner.kind or merged.kind,
            inner.number if inner.kind else merged.number,
        )
    setattr(param, _MARK, merged)


def places_of(model: nn.Module) -> dict[str, Place]:
    """Where each parameter of the model was placed, by its name; those that no context placed are left out."""
    return {name: getattr(one, _MARK) for name, one in model.named_parameters() if hasattr(one, _MARK)}


class _RoundRobin:
    """A device function: each parameter goes to the next parameter server."""

    def __init__(self, tasks: int, ps_device: str) -> None:
        self._tasks, self._device, self._next = tasks, ps_device, 0

    def __call__(self) -> str:
        text = f"{self._device}/task:{self._next}"
        self._next = (self._next + 1) % self._tasks
        return text


@checked_keywords
def replica_device_setter(
    ps_tasks: int = 0,
    ps_device: str = "/job:ps",
    worker_device: str = "/job:worker",
    merge_devices: bool = True,
    cluster: mh.ClusterSpec | Mapping[str, Any] | None = None,
    ps_ops: Any = None,
    ps_strategy: Callable[[], int] | None = None,
) -> DeviceFunction | None:
    """For `device`: parameters go to the parameter servers in turn. None if there are none, as in TensorFlow.

    Args:
        ps_tasks: How many there are; `cluster` says so, too.
        ps_device: The job of the servers.
        worker_device: Where the rest is computed: always in this worker.
        merge_devices: Only True: an inner `device` wins.
        cluster: The cluster, whose "ps" job is counted.
        ps_ops: Only None: parameters are placed, nothing else.
        ps_strategy: Only None, in turn. Without any placement servers are balanced by bytes, which is usually better.
    """
    options = {"merge_devices": not merge_devices, "ps_ops": ps_ops, "ps_strategy": ps_strategy}
    refuse_unknown("replica_device_setter", {name: value for name, value in options.items() if value}, list(options))
    if cluster is not None:
        spec = cluster if isinstance(cluster, mh.ClusterSpec) else ClusterSpec(cluster)
        ps_tasks = spec.num_tasks("ps") if "ps" in spec.jobs else 0
    return _RoundRobin(ps_tasks, ps_device) if ps_tasks else None


class _Options:
    """Attributes that may be set like arguments; others are refused by name, as nothing would act on them."""

    KNOWN: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_unknown(type(self).__name__, {} if name in self.KNOWN else {name: value}, self.KNOWN)
        super().__setattr__(name, value)


@checked_class()
class GPUOptions(_Options):
    """How much of a GPU's memory this process may take.

    Args:
        per_process_gpu_memory_fraction: Of each GPU's memory; torch enforces it. Without a GPU it is said once that
            nothing is limited.
        allow_growth: Torch always grows as needed: True changes nothing, False is refused.
    """

    KNOWN = ("per_process_gpu_memory_fraction", "allow_growth")

    def __init__(self, per_process_gpu_memory_fraction: float | None = None, allow_growth: bool = True) -> None:
        self.per_process_gpu_memory_fraction, self.allow_growth = per_process_gpu_memory_fraction, allow_growth

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "allow_growth" and not value:
            raise SpecError(
                "torch takes a GPU's memory as it is needed, and never all of it at once.",
                where="GPUOptions(allow_growth=False)",
                fix=["per_process_gpu_memory_fraction=0.5"],
            )
        super().__setattr__(name, value)

    def apply(self) -> bool:
        """Set the limit; False where there is no GPU to limit."""
        fraction = self.per_process_gpu_memory_fraction
        if fraction is None:
            return False
        if not torch.cuda.is_available():
            say_once(f"There is no GPU: the limit to {fraction:g} of its memory has no effect.")
            return False
        for index in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(fraction, index)
        return True


@checked_class()
class ConfigProto(_Options):
    """How a session places and computes.

    Args:
        allow_soft_placement: None or True: a device that is not there is replaced by the CPU, said once. False: the
            session refuses to start then.
        log_device_placement: Print where every parameter is, and write it to `placement.log` in the run directory.
        gpu_options: A `GPUOptions`.
        intra_op_parallelism_threads: Torch threads of each worker.
    """

    KNOWN = ("allow_soft_placement", "log_device_placement", "gpu_options", "intra_op_parallelism_threads")

    def __init__(
        self,
        allow_soft_placement: bool | None = None,
        log_device_placement: bool = False,
        gpu_options: GPUOptions | None = None,
        intra_op_parallelism_threads: int = 0,
    ) -> None:
        self.allow_soft_placement, self.log_device_placement = allow_soft_placement, log_device_placement
        self.gpu_options = gpu_options or GPUOptions()
        self.intra_op_parallelism_threads = intra_op_parallelism_threads

    def apply(self) -> None:
        """Set the limits; `EnvironmentProblem` for a device that must be there and is not."""
        self.gpu_options.apply()
        if self.allow_soft_placement is False and missing_devices():
            raise EnvironmentProblem(
                f"{', '.join(missing_devices())} is not in this machine, and soft placement is not allowed.",
                where="ConfigProto(allow_soft_placement=False)",
                fix=["allow_soft_placement=True", 'device("/cpu:0")'],
            )
