"""manyhands trains one PyTorch model with any number of workers; the result does not depend on how many.

The names below are public, and only those. Importing them is cheap: what needs torch is loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from manyhands import errors
from manyhands.errors import ManyhandsError
from manyhands.supported import check_system

if TYPE_CHECKING:
    from manyhands import optim as optim
    from manyhands import order as order
    from manyhands.data.sources.as_source import InputContext as InputContext
    from manyhands.dispatch.cluster import Cluster as Cluster
    from manyhands.dispatch.dispatcher import Coordinator as Coordinator
    from manyhands.dispatch.dispatcher import RemoteValue as RemoteValue
    from manyhands.dispatch.remote_worker import Worker as Worker
    from manyhands.dispatch.step_functions import step as step
    from manyhands.embedding.layers import Embedding as Embedding
    from manyhands.embedding.layers import EmbeddingBag as EmbeddingBag
    from manyhands.launcher.cluster_server import Server as Server
    from manyhands.launcher.function_launch import launch as launch
    from manyhands.observe.run_events import read_events as read_events
    from manyhands.observe.tensorboard import TensorBoardHook as TensorBoardHook
    from manyhands.optim import rows as rows
    from manyhands.spec.cluster import ClusterSpec as ClusterSpec
    from manyhands.strategies.choices import CentralStorage as CentralStorage
    from manyhands.strategies.choices import LocalSGD as LocalSGD
    from manyhands.strategies.choices import Mirrored as Mirrored
    from manyhands.strategies.choices import MultiWorker as MultiWorker
    from manyhands.strategies.choices import ParameterServer as ParameterServer
    from manyhands.strategies.choices import Sharded as Sharded
    from manyhands.strategies.choices import Single as Single
    from manyhands.strategies.model_parallel import Mesh as Mesh
    from manyhands.strategies.model_parallel import Pipeline as Pipeline
    from manyhands.strategies.model_parallel import Tensor as Tensor
    from manyhands.training.history import History as History
    from manyhands.training.own_loop import Hands as Hands
    from manyhands.training.own_loop import join as join
    from manyhands.training.state.checkpointing import Checkpoints as Checkpoints
    from manyhands.training.step.hooks import EarlyStop as EarlyStop
    from manyhands.training.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOME = {
    "CentralStorage": "strategies.choices",
    "Checkpoints": "training.state.checkpointing",
    "Cluster": "dispatch.cluster",
    "ClusterSpec": "spec.cluster",
    "Coordinator": "dispatch.dispatcher",
    "EarlyStop": "training.step.hooks",
    "Embedding": "embedding.layers",
    "EmbeddingBag": "embedding.layers",
    "Hands": "training.own_loop",
    "History": "training.history",
    "InputContext": "data.sources.as_source",
    "LocalSGD": "strategies.choices",
    "Mesh": "strategies.model_parallel",
    "Mirrored": "strategies.choices",
    "MultiWorker": "strategies.choices",
    "ParameterServer": "strategies.choices",
    "Pipeline": "strategies.model_parallel",
    "RemoteValue": "dispatch.dispatcher",
    "Server": "launcher.cluster_server",
    "Sharded": "strategies.choices",
    "Single": "strategies.choices",
    "Tensor": "strategies.model_parallel",
    "TensorBoardHook": "observe.tensorboard",
    "Trainer": "training.trainer",
    "Worker": "dispatch.remote_worker",
    "join": "training.own_loop",
    "launch": "launcher.function_launch",
    "read_events": "observe.run_events",
    "step": "dispatch.step_functions",
}

_MODULES = {"optim": "manyhands.optim", "order": "manyhands.order", "rows": "manyhands.optim.rows"}

__all__ = [
    "CentralStorage",
    "Checkpoints",
    "Cluster",
    "ClusterSpec",
    "Coordinator",
    "EarlyStop",
    "Embedding",
    "EmbeddingBag",
    "Hands",
    "History",
    "InputContext",
    "LocalSGD",
    "ManyhandsError",
    "Mesh",
    "Mirrored",
    "MultiWorker",
    "ParameterServer",
    "Pipeline",
    "RemoteValue",
    "Server",
    "Sharded",
    "Single",
    "Tensor",
    "TensorBoardHook",
    "Trainer",
    "Worker",
    "errors",
    "join",
    "launch",
    "optim",
    "order",
    "read_events",
    "rows",
    "step",
]


if not TYPE_CHECKING:  # type checkers see the names above and no others: a misspelt one is an error

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        if name not in _HOME:
            raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
        importlib.import_module("manyhands.launcher.script_exit").watch_ending()
        check_system()
        value = getattr(importlib.import_module(f"manyhands.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
