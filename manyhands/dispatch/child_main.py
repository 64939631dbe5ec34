"""Main function of a cluster's child process: a worker or a variable server, by the `ChildConfig` on standard input.

Run as `python -m manyhands.dispatch.child_main PARENT`. Start reading at `main`.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any, NoReturn

import msgspec

from manyhands import signals
from manyhands.control.processes.fence import die_with_parent
from manyhands.dispatch.child_processes import ChildConfig, become_child
from manyhands.launcher.worker_process.bootstrap import leave
from manyhands.launcher.worker_process.lazy_compiler import load_compiler_late

__all__ = ["main"]

TRACEBACK_CHARS = 6000


def main() -> NoReturn:
    die_with_parent(int(sys.argv[1]))
    signals.ignore()  # the parent process ends it
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ChildConfig)
    become_child(config.role)
    sys.path[:] = config.path
    load_compiler_late()
    try:
        _serve(config)
    except Exception as error:
        _report(config, error)
        raise
    leave(0)


def _serve(config: ChildConfig) -> None:
    import torch

    torch.set_num_threads(config.threads)
    if config.role == "server":
        from manyhands.dispatch.variable_server import ServerConfig, VariableServer

        server = VariableServer(msgspec.convert(config.server, ServerConfig))
        try:
            server.run()
        finally:
            server.close()
    else:
        from manyhands.dispatch.remote_worker import RemoteWorker
        from manyhands.dispatch.worker_session import WorkerConfig

        RemoteWorker(WorkerConfig(address=config.hub, number=config.number, steps=tuple(config.steps))).run()


def _report(config: ChildConfig, error: Exception) -> None:
    """Send the error to the cluster, which would otherwise keep starting replacements that fail as well."""
    import zmq

    from manyhands.comm.transport import open_port
    from manyhands.dispatch.messages import NotReady

    context: zmq.Context[Any] = zmq.Context()
    port = open_port(context, zmq.DEALER, config.hub, NotReady)
    what = "".join(traceback.format_exception(error))[-TRACEBACK_CHARS:]
    port.send(NotReady(role=config.role, number=config.number, what=what))
    port.close(linger_ms=1000)
    context.term()


if __name__ == "__main__":
    main()
