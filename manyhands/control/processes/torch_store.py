"""A TCPStore for scripts that call `init_process_group` themselves, on a socket that the agent has bound.

By default TCPStore listens on every interface; given a bound socket, it uses only that. The socket does not listen
before a worker needs it (`launcher.worker_process.store_requests`), and the process with the store is started only
when a client connects, so runs of manyhands programs have neither. It has no authentication: on one host it is on
loopback, between hosts on the data address, and the docs say so.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from manyhands import signals
from manyhands.control.processes.fence import die_with_parent

if TYPE_CHECKING:
    from manyhands.control.processes.worker_process import WorkerProcess

__all__ = ["TorchStoreProcess", "main"]


class TorchStoreProcess:
    """MASTER_ADDR and MASTER_PORT of one generation, and the store behind it once a client connects.

    Bound at once, so that the port is known and reserved. If no worker sends Hello or WantsStore within `patience_s`,
    one may connect in a way that the agent cannot see, for instance from a child process: then the socket listens too.
    """

    def __init__(self, address: str, patience_s: float) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket: socket.socket | None = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._listening = False
        self._patience_s = patience_s
        self.master = (address, int(self._socket.getsockname()[1]))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def waiting_fd(self) -> int | None:
        """To be polled for the first connection; None when there is nothing to poll."""
        return self._socket.fileno() if self._socket and self._listening and self._process is None else None

    def look(self, workers: Sequence[WorkerProcess], waited_s: float) -> None:
        """Listen, or close, depending on what the generation's workers have sent this long after their start."""
        if not any(worker.alive for worker in workers):
            return  # their request was for the previous store
        if any(worker.wants_store for worker in workers):
            self._listen()
        elif any(worker.greeted for worker in workers):
            if self._listening:
                self.close()
        elif waited_s >= self._patience_s:
            self._listen()

    def _listen(self) -> None:
        if self._socket is not None and not self._listening:
            self._socket.listen(128)
            self._listening = True

    def serve(self, environment: dict[str, str]) -> None:
        """A client connected: pass the socket to a TCPStore process."""
        assert self._socket is not None
        fd = self._socket.fileno()
        with signals.held_back():
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "manyhands.control.processes.torch_store",
                    "--fd",
                    str(fd),
                    "--parent",
                    str(os.getpid()),
                ],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment or None,
                start_new_session=True,
            )

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    signals.ignore()
    import torch.distributed as dist  # takes two seconds, which the agent itself is spared

    with socket.socket(fileno=os.dup(arguments.fd)) as bound:
        address, port = bound.getsockname()[:2]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=300),
        master_listen_fd=arguments.fd,
    )
    while store:
        signal.pause()  # until it is killed


if __name__ == "__main__":
    main()
