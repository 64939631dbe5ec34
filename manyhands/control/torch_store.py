"""A TCPStore for scripts that call `init_process_group` themselves, on a socket the agent bound.

Left to itself TCPStore listens on every interface; handed a bound socket it stays there. The process that holds it is
started only when something connects, so runs of manyhands' own programs never have one. It has no authentication: on
one host it is on loopback, between hosts on the data address, and the docs say so.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta

from manyhands.control.fence import die_with_parent

__all__ = ["TorchMeeting", "main"]


class TorchMeeting:
    """MASTER_ADDR and MASTER_PORT of one generation, and the store behind it once somebody comes."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket: socket.socket | None = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(128)
        self.master = (address, int(self._socket.getsockname()[1]))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def waiting_fd(self) -> int | None:
        """To be watched for the first connection; None when there is nothing to watch."""
        return self._socket.fileno() if self._socket is not None and self._process is None else None

    def serve(self, environment: dict[str, str]) -> None:
        """Somebody connected: hand the socket to a TCPStore."""
        assert self._socket is not None
        fd = self._socket.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.control.torch_store", "--fd", str(fd), "--parent", str(os.getpid())],
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
    asked = parser.parse_args()
    die_with_parent(asked.parent)
    import torch.distributed as dist  # two seconds that the agent itself need not spend

    with socket.socket(fileno=os.dup(asked.fd)) as bound:
        address, port = bound.getsockname()[:2]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=300),
        master_listen_fd=asked.fd,
    )
    signal.pause()
    del store


if __name__ == "__main__":
    main()
