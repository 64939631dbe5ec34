"""Remote calls on a cluster: start a `Cluster`, register functions with `remote`, schedule them with a `Dispatcher`
and wait for their `RemoteValue`s. `RemoteWorker` is a worker that is started by hand.

The names are imported when they are first used, without torch.
May import `spec`, `comm`, `data`, `control`, `observe` and `launcher`.
Start reading at `dispatcher.Dispatcher`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manyhands import lazy_names

if TYPE_CHECKING:
    from manyhands.dispatch.cluster import Cluster as Cluster
    from manyhands.dispatch.dispatcher import Dispatcher as Dispatcher
    from manyhands.dispatch.dispatcher import RemoteValue as RemoteValue
    from manyhands.dispatch.remote_worker import RemoteWorker as RemoteWorker
    from manyhands.dispatch.step_functions import remote as remote

_HOME = {
    "Cluster": "dispatch.cluster",
    "Dispatcher": "dispatch.dispatcher",
    "RemoteValue": "dispatch.dispatcher",
    "RemoteWorker": "dispatch.remote_worker",
    "remote": "dispatch.step_functions",
}

__all__ = ["Cluster", "Dispatcher", "RemoteValue", "RemoteWorker", "remote"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        value = lazy_names.find(__name__, _HOME, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
