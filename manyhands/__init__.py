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
    from manyhands import rows as rows
    from manyhands.data.source import InputContext as InputContext
    from manyhands.embedding import Embedding as Embedding
    from manyhands.embedding import EmbeddingBag as EmbeddingBag
    from manyhands.runtime.call import launch as launch
    from manyhands.runtime.cluster import Cluster as Cluster
    from manyhands.runtime.dispatch_worker import Worker as Worker
    from manyhands.runtime.dispatching import Coordinator as Coordinator
    from manyhands.runtime.dispatching import RemoteValue as RemoteValue
    from manyhands.runtime.hands import Hands as Hands
    from manyhands.runtime.hands import join as join
    from manyhands.runtime.history import History as History
    from manyhands.runtime.hooks import EarlyStop as EarlyStop
    from manyhands.runtime.run_events import read_events as read_events
    from manyhands.runtime.saving import Checkpoints as Checkpoints
    from manyhands.runtime.server import Server as Server
    from manyhands.runtime.step_functions import step as step
    from manyhands.runtime.summaries import TensorBoardHook as TensorBoardHook
    from manyhands.runtime.trainer import Trainer as Trainer
    from manyhands.spec.cluster import ClusterSpec as ClusterSpec
    from manyhands.strategies.choices import CentralStorage as CentralStorage
    from manyhands.strategies.choices import LocalSGD as LocalSGD
    from manyhands.strategies.choices import Mirrored as Mirrored
    from manyhands.strategies.choices import MultiWorker as MultiWorker
    from manyhands.strategies.choices import ParameterServer as ParameterServer
    from manyhands.strategies.choices import Sharded as Sharded
    from manyhands.strategies.choices import Single as Single
    from manyhands.strategies.divided import Mesh as Mesh
    from manyhands.strategies.divided import Pipeline as Pipeline
    from manyhands.strategies.divided import Tensor as Tensor

__version__ = "0.1.0"

_HOME = {
    "CentralStorage": "strategies.choices",
    "Checkpoints": "runtime.saving",
    "Cluster": "runtime.cluster",
    "ClusterSpec": "spec.cluster",
    "Coordinator": "runtime.dispatching",
    "EarlyStop": "runtime.hooks",
    "Embedding": "embedding",
    "EmbeddingBag": "embedding",
    "Hands": "runtime.hands",
    "History": "runtime.history",
    "InputContext": "data.source",
    "LocalSGD": "strategies.choices",
    "Mesh": "strategies.divided",
    "Mirrored": "strategies.choices",
    "MultiWorker": "strategies.choices",
    "ParameterServer": "strategies.choices",
    "Pipeline": "strategies.divided",
    "RemoteValue": "runtime.dispatching",
    "Server": "runtime.server",
    "Sharded": "strategies.choices",
    "Single": "strategies.choices",
    "Tensor": "strategies.divided",
    "TensorBoardHook": "runtime.summaries",
    "Trainer": "runtime.trainer",
    "Worker": "runtime.dispatch_worker",
    "join": "runtime.hands",
    "launch": "runtime.call",
    "read_events": "runtime.run_events",
    "step": "runtime.step_functions",
}

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
        if name in ("optim", "order", "rows"):
            return importlib.import_module(f"manyhands.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
        importlib.import_module("manyhands.runtime.script_end").watch_ending()
        check_system()
        value = getattr(importlib.import_module(f"manyhands.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
