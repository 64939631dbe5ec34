"""manyhands trains one PyTorch model with any number of workers; the result does not depend on how many.

The names below are public, and only those:

- train: `Trainer`, or `join` for a user loop, which gets `Hands`; `Checkpoints`, `EarlyStop`, `TensorBoardHook`,
  `Dataset`, `InputContext`, `History`, `launch`, `read_events`
- strategies: `Single`, `Mirrored` (also as `MultiWorker`), `CentralStorage`, `ParameterServer`, `Sharded`,
  `TensorParallel`, `PipelineParallel`, `Mesh`, `LocalSGD`
- a cluster, task by task: `ClusterSpec`, `Server`
- modules: `nn` (embeddings), `optim` (FTRL, optimizers of rows), `order` (of samples), `images` (augmentation),
  `dispatch` (calls to a cluster), `distribute` (TensorFlow's names), `errors` (`ManyhandsError` is the base of all of
  them)

Importing them is cheap: modules that need torch are imported on first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from manyhands import errors, lazy_names
from manyhands.errors import ManyhandsError

if TYPE_CHECKING:
    from manyhands import dispatch as dispatch
    from manyhands import distribute as distribute
    from manyhands import images as images
    from manyhands import nn as nn
    from manyhands import optim as optim
    from manyhands import order as order
    from manyhands.data.pipeline.dataset import Dataset as Dataset
    from manyhands.data.sources.as_source import InputContext as InputContext
    from manyhands.launcher.cluster_server import Server as Server
    from manyhands.launcher.function_launch import launch as launch
    from manyhands.launcher.placers.spec import Kubernetes as Kubernetes
    from manyhands.launcher.placers.spec import Slurm as Slurm
    from manyhands.launcher.placers.spec import Ssh as Ssh
    from manyhands.observe.run_events import read_events as read_events
    from manyhands.observe.tensorboard import TensorBoardHook as TensorBoardHook
    from manyhands.spec.cluster import ClusterSpec as ClusterSpec
    from manyhands.strategies.choices import CentralStorage as CentralStorage
    from manyhands.strategies.choices import LocalSGD as LocalSGD
    from manyhands.strategies.choices import Mirrored as Mirrored
    from manyhands.strategies.choices import MultiWorker as MultiWorker
    from manyhands.strategies.choices import ParameterServer as ParameterServer
    from manyhands.strategies.choices import Sharded as Sharded
    from manyhands.strategies.choices import Single as Single
    from manyhands.strategies.model_parallel import Mesh as Mesh
    from manyhands.strategies.model_parallel import PipelineParallel as PipelineParallel
    from manyhands.strategies.model_parallel import TensorParallel as TensorParallel
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
    "ClusterSpec": "spec.cluster",
    "Dataset": "data.pipeline.dataset",
    "EarlyStop": "training.step.hooks",
    "Hands": "training.own_loop",
    "History": "training.history",
    "InputContext": "data.sources.as_source",
    "LocalSGD": "strategies.choices",
    "Mesh": "strategies.model_parallel",
    "Mirrored": "strategies.choices",
    "MultiWorker": "strategies.choices",
    "ParameterServer": "strategies.choices",
    "PipelineParallel": "strategies.model_parallel",
    "Kubernetes": "launcher.placers.spec",
    "Server": "launcher.cluster_server",
    "Sharded": "strategies.choices",
    "Slurm": "launcher.placers.spec",
    "Ssh": "launcher.placers.spec",
    "Single": "strategies.choices",
    "TensorBoardHook": "observe.tensorboard",
    "TensorParallel": "strategies.model_parallel",
    "Trainer": "training.trainer",
    "join": "training.own_loop",
    "launch": "launcher.function_launch",
    "read_events": "observe.run_events",
}
_MODULES = ("dispatch", "distribute", "images", "nn", "optim", "order")
_RENAMED = {
    "Cluster": "mh.dispatch.Cluster",
    "Coordinator": "mh.dispatch.Dispatcher",
    "Embedding": "mh.nn.Embedding",
    "EmbeddingBag": "mh.nn.EmbeddingBag",
    "Pipeline": "mh.PipelineParallel",
    "RemoteValue": "mh.dispatch.RemoteValue",
    "Tensor": "mh.TensorParallel",
    "Worker": "mh.dispatch.RemoteWorker",
    "rows": "mh.optim.rows",
    "step": "mh.dispatch.remote",
}

__all__ = [
    "CentralStorage",
    "Checkpoints",
    "ClusterSpec",
    "Dataset",
    "EarlyStop",
    "Hands",
    "History",
    "InputContext",
    "Kubernetes",
    "LocalSGD",
    "ManyhandsError",
    "Mesh",
    "Mirrored",
    "MultiWorker",
    "ParameterServer",
    "PipelineParallel",
    "Server",
    "Sharded",
    "Single",
    "Slurm",
    "Ssh",
    "TensorBoardHook",
    "TensorParallel",
    "Trainer",
    "dispatch",
    "distribute",
    "errors",
    "images",
    "join",
    "launch",
    "nn",
    "optim",
    "order",
    "read_events",
]


if not TYPE_CHECKING:  # for type checkers only the names above exist: a misspelt one is an error

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"manyhands.{name}")
        lazy_names.refuse_renamed(_RENAMED, name, sys._getframe(1))
        value = lazy_names.find(__name__, _HOME, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
