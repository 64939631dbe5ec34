"""tf.distribute's strategies: a choice of ours, with `scope()` and `num_replicas_in_sync`.

Beside TensorFlow's arguments each takes `workers` and the other settings of ours, and those of `mh.join`. Start reading
at `AdaptedStrategy`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import manyhands as mh
from manyhands.compat.keras import KerasScope
from manyhands.distribute.cluster_resolver import run_resolver, with_cluster
from manyhands.distribute.replica_strategy import ReplicaStrategy, entered
from manyhands.distribute.train.notices import not_here
from manyhands.distribute.train.placement import parse, torch_device
from manyhands.errors import SpecError
from manyhands.spec.keyword_check import checked_class, suggested

__all__ = [
    "AdaptedStrategy",
    "CentralStorageStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
]

JOINED = (
    "precision",
    "seed",
    "slices",
    "accumulate",
    "exact",
    "clip_norm",
    "balance",
    "run_dir",
    "checkpoint",
    "tune",
)
"""Settings of `mh.join`; all others are the strategy's."""


OPTIONS = {
    "cross_device_ops": "no cross_device_ops=: the run chooses how gradients are summed; reducer= of mh.Mirrored",
    "communication_options": "no communication_options=: the run chooses how gradients are summed",
    "communication": "no communication=: the run chooses how gradients are summed",
    "variable_partitioner": "no variable_partitioner=: servers are balanced by bytes; place= of mh.ParameterServer",
}
"""TensorFlow's options without a meaning here, and what to write instead; None is what they are without being given."""
NOT_HERE = {
    "extended": ("strategies are extended by engines of manyhands", "the calls of the strategy itself"),
    "experimental_make_numpy_dataset": ("arrays are data", "experimental_distribute_dataset(mh.Dataset...)"),
    "make_dataset_iterator": ("datasets are iterated over", "experimental_distribute_dataset(dataset)"),
    "make_input_fn_iterator": ("datasets are iterated over", "distribute_datasets_from_function(function)"),
    "update_config_proto": ("no session has a configuration of a cluster", "leave it out"),
}


def _known(owner: str, kind: Any, own: Sequence[str], settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, without TensorFlow's options that are None; `SpecError` for one that nothing here acts on."""
    given = {name: value for name, value in settings.items() if name not in OPTIONS or value is not None}
    known = list(dict.fromkeys([*own, *sorted({*kind.__struct_fields__, *JOINED})]))
    for name in given:
        if name not in JOINED and name not in kind.__struct_fields__:
            guess, fix = suggested(name, known) if name not in OPTIONS else ("", [OPTIONS[name]])
            raise SpecError(f"{owner} has no option {name!r} here.{guess}", where=owner, fix=fix)
    return given


def _on_devices(devices: Sequence[str] | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with a worker for each device."""
    if devices is None:
        return settings
    return {"workers": len(devices), "devices": [torch_device(one) for one in devices], **settings}


@checked_class(name="strategy")
class AdaptedStrategy(ReplicaStrategy):
    """A strategy of ours under TensorFlow's name. It joins the run at its first use."""

    def __init__(self, kind: Any, settings: dict[str, Any]) -> None:
        own = [name for name in inspect.signature(type(self)).parameters if name not in ("kind", "settings")]
        settings = _known(type(self).__name__, kind, own, settings)
        self.joined = {name: value for name, value in settings.items() if name in JOINED}
        self.choice = kind(**{name: value for name, value in settings.items() if name not in JOINED})
        """The strategy object of ours."""
        self._resolver: Any = None
        self._scope = KerasScope(self._join)

    def _join(self) -> mh.Hands:
        if self._resolver is not None and getattr(self.choice, "cluster", None) is None:
            self._resolver.check_task()
        return mh.join(self.choice, **self.joined)

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of the cluster; None for strategies of one host."""
        return self._resolver

    def __getattr__(self, name: str) -> Any:
        if name in NOT_HERE:
            raise not_here(f"strategy.{name}", {f"strategy.{name}": NOT_HERE[name]})
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def hands(self) -> mh.Hands:
        """This worker. The process becomes the launcher here if several workers are asked for."""
        return self._scope.hands

    @property
    def num_replicas_in_sync(self) -> int:
        """How many workers share a batch."""
        return int(self.hands.world_size)

    def scope(self) -> AbstractContextManager[Any]:
        """Keras models made, compiled or loaded inside are trained by all workers."""
        return entered(self, self._scope)


@checked_class()
class MirroredStrategy(AdaptedStrategy):
    """`mh.Mirrored`: a replica of the model per worker of this host, one for each of `devices`.

    Devices have TensorFlow's names or torch's; the CPU computes for a GPU that is not there, which is said once.
    """

    def __init__(self, devices: Sequence[str] | None = None, **settings: Any) -> None:
        super().__init__(mh.Mirrored, _on_devices(devices, settings))


@checked_class()
class MultiWorkerMirroredStrategy(AdaptedStrategy):
    """`mh.Mirrored` over hosts: the cluster is that of `mh run`, of TF_CONFIG, or of the resolver."""

    def __init__(self, cluster_resolver: Any = None, **settings: Any) -> None:
        super().__init__(mh.Mirrored, with_cluster(cluster_resolver, settings))
        self._resolver = cluster_resolver

    @property
    def cluster_resolver(self) -> Any:
        """The resolver; without one that of TF_CONFIG, or of `mh run`: a task "worker" with the worker's number."""
        return self._resolver or run_resolver(self)


@checked_class()
class ParameterServerStrategy(AdaptedStrategy):
    """`mh.ParameterServer`: servers have the weights, and lease slices to workers, by default asynchronously."""

    def __init__(self, cluster_resolver: Any = None, **settings: Any) -> None:
        super().__init__(mh.ParameterServer, with_cluster(cluster_resolver, settings))
        self._resolver = cluster_resolver

    @property
    def cluster_resolver(self) -> Any:
        """The resolver; without one that of TF_CONFIG, or of `mh run`: a task "worker" with the worker's number."""
        return self._resolver or run_resolver(self)


@checked_class()
class CentralStorageStrategy(AdaptedStrategy):
    """`mh.CentralStorage`: one copy of the weights in host memory, with which a worker for each device computes.

    `compute_devices` are named as those of `MirroredStrategy`; `parameter_device` can only be the CPU.
    """

    def __init__(
        self, compute_devices: Sequence[str] | None = None, parameter_device: str | None = None, **settings: Any
    ) -> None:
        if parameter_device is not None and parse(parameter_device).kind not in (None, "cpu"):
            raise SpecError(
                f"parameter_device is {parameter_device!r}, and the weights are in the host's memory.",
                where="CentralStorageStrategy",
                fix=['parameter_device="/cpu:0"', "MirroredStrategy(devices=[...]), with weights on each device"],
            )
        super().__init__(mh.CentralStorage, _on_devices(compute_devices, settings))


@checked_class()
class OneDeviceStrategy(AdaptedStrategy):
    """`mh.Single`: one worker, on `device`, by TensorFlow's name or torch's."""

    def __init__(self, device: str | None = None, **settings: Any) -> None:
        super().__init__(mh.Single, settings if device is None else {"devices": [torch_device(device)], **settings})
