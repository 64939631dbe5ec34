"""TensorFlow 1's names for a training: `tf.train` and what programs of its time use beside it, over `mh.join`.

A session is this worker's `Hands`: `sess.run(train_op)` is one step of a user loop, with the run's checkpoints and
restarts. What a graph alone can mean is refused, with what to write instead.
May import `dispatch`, `spec` and `errors`.
Start reading at `session.MonitoredTrainingSession`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manyhands import lazy_names

if TYPE_CHECKING:
    from manyhands.distribute.train.cluster import ClusterSpec as ClusterSpec
    from manyhands.distribute.train.cluster import Server as Server
    from manyhands.distribute.train.coordinator import QueueRunner as QueueRunner
    from manyhands.distribute.train.coordinator import ThreadCoordinator as Coordinator
    from manyhands.distribute.train.coordinator import add_queue_runner as add_queue_runner
    from manyhands.distribute.train.coordinator import start_queue_runners as start_queue_runners
    from manyhands.distribute.train.hooks import CheckpointSaverHook as CheckpointSaverHook
    from manyhands.distribute.train.hooks import LoggingTensorHook as LoggingTensorHook
    from manyhands.distribute.train.hooks import NanTensorHook as NanTensorHook
    from manyhands.distribute.train.hooks import SessionRunArgs as SessionRunArgs
    from manyhands.distribute.train.hooks import SessionRunContext as SessionRunContext
    from manyhands.distribute.train.hooks import SessionRunHook as SessionRunHook
    from manyhands.distribute.train.hooks import SessionRunValues as SessionRunValues
    from manyhands.distribute.train.hooks import StepCounterHook as StepCounterHook
    from manyhands.distribute.train.hooks import StopAtStepHook as StopAtStepHook
    from manyhands.distribute.train.hooks import SummarySaverHook as SummarySaverHook
    from manyhands.distribute.train.model_copies import Progbar as Progbar
    from manyhands.distribute.train.model_copies import multi_gpu_model as multi_gpu_model
    from manyhands.distribute.train.optimizers import AdagradOptimizer as AdagradOptimizer
    from manyhands.distribute.train.optimizers import FtrlOptimizer as FtrlOptimizer
    from manyhands.distribute.train.optimizers import GradientDescentOptimizer as GradientDescentOptimizer
    from manyhands.distribute.train.optimizers import MomentumOptimizer as MomentumOptimizer
    from manyhands.distribute.train.optimizers import SyncReplicasOptimizer as SyncReplicasOptimizer
    from manyhands.distribute.train.optimizers import TowerOptimizer as TowerOptimizer
    from manyhands.distribute.train.optimizers import get_or_create_global_step as get_global_step
    from manyhands.distribute.train.optimizers import get_or_create_global_step as get_or_create_global_step
    from manyhands.distribute.train.optimizers import minimize as minimize
    from manyhands.distribute.train.placement import ConfigProto as ConfigProto
    from manyhands.distribute.train.placement import GPUOptions as GPUOptions
    from manyhands.distribute.train.placement import device as device
    from manyhands.distribute.train.placement import replica_device_setter as replica_device_setter
    from manyhands.distribute.train.processes import PSWorker as PSWorker
    from manyhands.distribute.train.processes import TFCluster as TFCluster
    from manyhands.distribute.train.processes import limit_gpu_memory as limit_gpu_memory
    from manyhands.distribute.train.saver import WeightsSaver as Saver
    from manyhands.distribute.train.saver import latest_checkpoint as latest_checkpoint
    from manyhands.distribute.train.session import EndOfSession as OutOfRangeError
    from manyhands.distribute.train.session import MonitoredTrainingSession as MonitoredTrainingSession

_HOME = {
    "AdagradOptimizer": "optimizers",
    "CheckpointSaverHook": "hooks",
    "ClusterSpec": "cluster",
    "ConfigProto": "placement",
    "Coordinator": "coordinator",
    "FtrlOptimizer": "optimizers",
    "GPUOptions": "placement",
    "GradientDescentOptimizer": "optimizers",
    "LoggingTensorHook": "hooks",
    "MomentumOptimizer": "optimizers",
    "MonitoredTrainingSession": "session",
    "NanTensorHook": "hooks",
    "OutOfRangeError": "session",
    "PSWorker": "processes",
    "Progbar": "model_copies",
    "QueueRunner": "coordinator",
    "Saver": "saver",
    "Server": "cluster",
    "SessionRunArgs": "hooks",
    "SessionRunContext": "hooks",
    "SessionRunHook": "hooks",
    "SessionRunValues": "hooks",
    "StepCounterHook": "hooks",
    "StopAtStepHook": "hooks",
    "SummarySaverHook": "hooks",
    "SyncReplicasOptimizer": "optimizers",
    "TFCluster": "processes",
    "TowerOptimizer": "optimizers",
    "add_queue_runner": "coordinator",
    "device": "placement",
    "get_global_step": "optimizers",
    "get_or_create_global_step": "optimizers",
    "latest_checkpoint": "saver",
    "limit_gpu_memory": "processes",
    "minimize": "optimizers",
    "multi_gpu_model": "model_copies",
    "replica_device_setter": "placement",
    "start_queue_runners": "coordinator",
}
# TensorFlow's name -> the class, where another class of ours has that name, or the name says something else here.
_CALLED = {
    "Coordinator": "ThreadCoordinator",
    "OutOfRangeError": "EndOfSession",
    "Saver": "WeightsSaver",
    "get_global_step": "get_or_create_global_step",
}
_RUN = "the run itself saves, restores and continues"
_RECORDS = "data is in files and arrays, not in records of TensorFlow"
_QUEUES = "there is no graph of queues"
_ADAM = "torch adds its epsilon at another place, so results would differ slightly"
NOT_HERE = {
    "ClusterDef": ("clusters are given in code", "ClusterSpec(...)"),
    "ExponentialMovingAverage": ("averages of weights are torch's or Keras's", "torch.optim.swa_utils, use_ema=True"),
    "LooperThread": ("threads are Python's", "threading.Thread, and coord.should_stop()"),
    "ServerDef": ("servers are given in code", "Server(cluster, job_name=, task_index=)"),
    "checkpoint_exists": ("paths are files", "pathlib.Path(path).exists()"),
    "get_checkpoint_state": ("checkpoints are in a directory of the run", "latest_checkpoint(directory)"),
    "input_producer": ("there is no graph of queues", "mh.Dataset.from_tensor_slices(...)"),
    "list_variables": ("files are safetensors", "safetensors.safe_open(path)"),
    "load_checkpoint": ("files are safetensors", "Saver(model).restore(None, path)"),
    "slice_input_producer": ("there is no graph of queues", "mh.Dataset.from_tensor_slices(...)"),
    "AdamOptimizer": (_ADAM, "minimize(..., optimizer=lambda params: torch.optim.Adam(params, lr=1e-3))"),
    "RMSPropOptimizer": (_ADAM, "minimize(..., optimizer=lambda params: torch.optim.RMSprop(params, lr=1e-3))"),
    "AdadeltaOptimizer": (
        "torch has other defaults of rho and epsilon",
        "minimize(..., optimizer=lambda params: torch.optim.Adadelta(params, lr=1.0))",
    ),
    "Checkpoint": (_RUN, "MonitoredTrainingSession(checkpoint_dir=...), model.fit, or Saver(model).save(None, path)"),
    "CheckpointManager": (_RUN, "MonitoredTrainingSession(checkpoint_dir=...), mh.Checkpoints(keep_last=3)"),
    "CheckpointSaverListener": (_RUN, "SessionRunHook.after_run"),
    "ChiefSessionCreator": (_RUN, "MonitoredTrainingSession(...)"),
    "Example": (_RECORDS, "mh.Dataset.from_files, mh.Dataset.from_generator"),
    "Feature": (_RECORDS, "mh.Dataset.from_files, mh.Dataset.from_generator"),
    "Features": (_RECORDS, "mh.Dataset.from_files, mh.Dataset.from_generator"),
    "FeedFnHook": ("there is no graph to feed", "minimize(..., data=(x, y), batch_size=32)"),
    "FinalOpsHook": ("there is no graph to fetch from", "SessionRunHook.end"),
    "GlobalStepWaiterHook": ("workers begin together", "leave it out"),
    "MonitoredSession": (_RUN, "MonitoredTrainingSession(...)"),
    "NanLossDuringTrainingError": ("it is an error of ours", "mh.errors.NonFinite"),
    "ProfilerHook": ("the run measures its steps", "the line of each step, and mh.TensorBoardHook"),
    "Scaffold": (_RUN, "leave it out"),
    "SingularMonitoredSession": (_RUN, "MonitoredTrainingSession(...)"),
    "WorkerSessionCreator": (_RUN, "MonitoredTrainingSession(...)"),
    "batch": (_QUEUES, "mh.Dataset.from_tensor_slices(...).batch(32)"),
    "exponential_decay": ("schedules are torch's", "a scheduler of mh.Trainer, such as torch.optim.lr_scheduler"),
    "import_meta_graph": ("models are Python objects, and no graph is built", "Saver(model).restore(None, path)"),
    "shuffle_batch": (_QUEUES, "mh.Dataset.from_tensor_slices(...).shuffle(1000).batch(32)"),
    "string_input_producer": (_QUEUES, 'mh.Dataset.list_files("data/*.txt")'),
    "write_graph": ("no graph is built", "mh.TensorBoardHook"),
    "Graph": ("models are Python objects, and no graph is built", "model = make_model()"),
    "Session": ("there is no graph to run parts of", "MonitoredTrainingSession(...), and sess.run(train_op)"),
    "SessionManager": ("the run itself restores, waits for workers and replaces them", "MonitoredTrainingSession(...)"),
    "Supervisor": ("the run itself restores, waits for workers and replaces them", "MonitoredTrainingSession(...)"),
    "global_variables_initializer": ("weights are there when the model is made", "leave it out"),
    "placeholder": ("there is no graph to feed", "minimize(..., data=(x, y), batch_size=32)"),
    "variable_scope": ("parameters are named by their modules", "a torch.nn.Module of that name"),
}
"""Names that mean nothing here: why, and what to write instead."""

__all__ = [
    "AdagradOptimizer",
    "CheckpointSaverHook",
    "ClusterSpec",
    "ConfigProto",
    "Coordinator",
    "FtrlOptimizer",
    "GPUOptions",
    "GradientDescentOptimizer",
    "LoggingTensorHook",
    "MomentumOptimizer",
    "MonitoredTrainingSession",
    "NanTensorHook",
    "OutOfRangeError",
    "PSWorker",
    "Progbar",
    "QueueRunner",
    "Saver",
    "Server",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "SyncReplicasOptimizer",
    "TFCluster",
    "TowerOptimizer",
    "add_queue_runner",
    "device",
    "get_global_step",
    "get_or_create_global_step",
    "latest_checkpoint",
    "limit_gpu_memory",
    "minimize",
    "multi_gpu_model",
    "replica_device_setter",
    "start_queue_runners",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in NOT_HERE:
            from manyhands.distribute.train.notices import not_here

            raise not_here(name, NOT_HERE)
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        called = _CALLED.get(name, name)
        value = lazy_names.find(__name__, {called: f"distribute.train.{_HOME[name]}"}, called)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
