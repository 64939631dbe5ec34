"""The names of tf.distribute, and of what its programs use beside it: a TensorFlow program changes its imports.

Each says in its first line what it is here; what has no meaning here raises `NotHere`, with what to write instead.
May import `distribute.train`, `compat`, `dispatch`, `parallel`, `comm`, `data`, `spec` and `errors`.
Start reading at `replica_strategy.ReplicaStrategy` for loops, at `strategies` for the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from manyhands import lazy_names

if TYPE_CHECKING:
    import manyhands.distribute.cluster_resolver as cluster_resolver
    import manyhands.distribute.coordinator as coordinator
    import manyhands.distribute.experimental as experimental
    import manyhands.distribute.mixed_precision as mixed_precision
    import manyhands.distribute.train as train
    from manyhands.data.pipeline.signature import ElementSpec
    from manyhands.distribute.gradient_tape import GradientTape as GradientTape
    from manyhands.distribute.gradient_tape import UnconnectedGradients as UnconnectedGradients
    from manyhands.distribute.gradient_tape import compute_average_loss as compute_average_loss
    from manyhands.distribute.gradient_tape import function as function
    from manyhands.distribute.gradient_tape import scale_regularization_loss as scale_regularization_loss
    from manyhands.distribute.replicas import PipelineContext
    from manyhands.distribute.replicas import ReduceOp as ReduceOp
    from manyhands.distribute.replicas import ReplicaContext as ReplicaContext
    from manyhands.distribute.replicas import get_replica_context as get_replica_context
    from manyhands.distribute.replicas import get_strategy as get_strategy
    from manyhands.distribute.replicas import has_strategy as has_strategy
    from manyhands.distribute.replicas import in_cross_replica_context as in_cross_replica_context
    from manyhands.distribute.strategies import AdaptedStrategy
    from manyhands.distribute.strategies import CentralStorageStrategy as CentralStorageStrategy
    from manyhands.distribute.strategies import MirroredStrategy as MirroredStrategy
    from manyhands.distribute.strategies import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from manyhands.distribute.strategies import OneDeviceStrategy as OneDeviceStrategy
    from manyhands.distribute.strategies import ParameterServerStrategy as ParameterServerStrategy

    InputContext = PipelineContext
    TensorSpec = ElementSpec
    Strategy = AdaptedStrategy
    Server = train.Server

_HOME = {
    "CentralStorageStrategy": "distribute.strategies",
    "GradientTape": "distribute.gradient_tape",
    "InputContext": "distribute.replicas",
    "MirroredStrategy": "distribute.strategies",
    "MultiWorkerMirroredStrategy": "distribute.strategies",
    "OneDeviceStrategy": "distribute.strategies",
    "ParameterServerStrategy": "distribute.strategies",
    "ReduceOp": "distribute.replicas",
    "ReplicaContext": "distribute.replicas",
    "Server": "distribute.train.cluster",
    "Strategy": "distribute.strategies",
    "TensorSpec": "data.pipeline.signature",
    "UnconnectedGradients": "distribute.gradient_tape",
    "compute_average_loss": "distribute.gradient_tape",
    "function": "distribute.gradient_tape",
    "get_replica_context": "distribute.replicas",
    "get_strategy": "distribute.replicas",
    "has_strategy": "distribute.replicas",
    "in_cross_replica_context": "distribute.replicas",
    "scale_regularization_loss": "distribute.gradient_tape",
}
_MODULES = ("cluster_resolver", "coordinator", "experimental", "mixed_precision", "train")
_CALLED = {"InputContext": "PipelineContext", "Strategy": "AdaptedStrategy", "TensorSpec": "ElementSpec"}
NOT_HERE = {
    "CrossDeviceOps": ("the run chooses how gradients are summed", "leave out cross_device_ops"),
    "DistributedDataset": ("a distributed dataset is an iterable of batches", "experimental_distribute_dataset(data)"),
    "DistributedIterator": ("a distributed dataset is an iterable of batches", "iter(dataset)"),
    "DistributedValues": ("each worker has one replica, whose value it is", "the value itself"),
    "HierarchicalCopyAllReduce": ("the run chooses how gradients are summed", "leave out cross_device_ops"),
    "InputOptions": ("batches are fetched ahead by the data itself", "leave out options"),
    "NcclAllReduce": ("the run chooses how gradients are summed: NCCL on GPUs", "leave out cross_device_ops"),
    "ReductionToOneDevice": ("the run chooses how gradients are summed", "leave out cross_device_ops"),
    "RunOptions": ("functions run eagerly", "leave out options"),
    "StrategyExtended": ("strategies are extended by engines of manyhands", "docs/architecture.md, a strategy"),
    "InputReplicationMode": ("each worker has a pipeline of its data", "leave out input_replication_mode"),
    "TPUStrategy": ("torch on TPUs is another library, which is not used", "MirroredStrategy()"),
    "experimental_set_strategy": ("a scope ends where its block ends", "with strategy.scope():"),
    "placeholder": ("there is no graph to feed", "a function's arguments"),
}
"""Names that mean nothing here: why, and what to write instead."""

MISSPELT = "MultiWorkerMirroredStrategy"

__all__ = [
    "CentralStorageStrategy",
    "GradientTape",
    "InputContext",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReduceOp",
    "ReplicaContext",
    "Server",
    "Strategy",
    "TensorSpec",
    "UnconnectedGradients",
    "cluster_resolver",
    "compute_average_loss",
    "coordinator",
    "experimental",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "mixed_precision",
    "scale_regularization_loss",
    "train",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name in NOT_HERE:
            raise importlib.import_module(f"{__name__}.train.notices").not_here(name, NOT_HERE)
        if name not in _HOME:
            notices = importlib.import_module(f"{__name__}.train.notices")
            if notices.is_misspelt(name, MISSPELT):
                notices.say_once(f"{name} is taken for {MISSPELT}.")
                return __getattr__(MISSPELT)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        called = _CALLED.get(name, name)
        value = lazy_names.find(__name__, {called: _HOME[name]}, called)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
