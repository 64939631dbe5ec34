"""Strategies and calls under the spelling that they had while they were experimental.

Start reading at `coordinator`.
"""

from __future__ import annotations

from typing import Any

from manyhands.distribute.coordinator import ClusterCoordinator
from manyhands.distribute.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
)
from manyhands.distribute.train.notices import is_misspelt, not_here, say_once

NOT_HERE = {
    "CollectiveCommunication": ("the run chooses how gradients are summed", "leave out communication"),
    "CollectiveHints": ("the run chooses how gradients are summed", "leave out the options"),
    "CommunicationImplementation": ("the run chooses how gradients are summed", "leave out communication_options"),
    "CommunicationOptions": ("the run chooses how gradients are summed", "leave out communication_options"),
    "PreemptionCheckpointHandler": (
        "the run saves when it is asked to end",
        "mh.Checkpoints(...), as checkpoint=",
    ),
    "TPUStrategy": ("torch on TPUs is another library, which is not used", "MirroredStrategy()"),
    "ValueContext": ("replicas are processes", "experimental_distribute_values_from_function(lambda context: ...)"),
    "partitioners": ("parameter servers are balanced by bytes", "leave out variable_partitioner"),
}
"""Names that mean nothing here: why, and what to write instead."""


def __getattr__(name: str) -> Any:
    if name in NOT_HERE:
        raise not_here(name, NOT_HERE)
    if is_misspelt(name, "MultiWorkerMirroredStrategy"):
        say_once(f"{name} is taken for MultiWorkerMirroredStrategy.")
        return MultiWorkerMirroredStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CentralStorageStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "coordinator",
]


class coordinator:  # noqa: N801  # a module in TensorFlow
    """`tf.distribute.experimental.coordinator`."""

    ClusterCoordinator = ClusterCoordinator
