"""A line between a worker and its cluster that a test can cut."""

from __future__ import annotations

import socket
import threading


class Line:
    """Forwards connections to `target` until it is cut; then it closes every new connection."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._cut = False
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def _run(self, function: object, *args: object) -> None:
        self._threads.append(threading.Thread(target=function, args=args))  # type: ignore[arg-type]
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._cut:
                near.close()
                continue
            far = socket.create_connection(self._target)
            self._ends += [near, far]
            self._run(_carry, near, far)
            self._run(_carry, far, near)

    def cut(self) -> None:
        self._cut = True
        for end in self._ends:
            _hang_up(end)

    def close(self) -> None:
        self.cut()
        _hang_up(self._listener)
        for thread in self._threads:
            thread.join()
        for end in (*self._ends, self._listener):
            end.close()


def _carry(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    _hang_up(target)


def _hang_up(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
