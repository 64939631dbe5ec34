"""Where workers of other hosts reach this host's servers: a port for each, the same for all who ever have its number.

A port is held by a socket that is bound and never listens, so nobody else gets it while a server is being replaced.
On one host there is nothing to reach from elsewhere, and nothing is bound.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from manyhands.errors import EnvironmentProblem

__all__ = ["ServerPorts", "hold", "tcp_endpoint"]


def tcp_endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class ServerPorts:
    def __init__(self, address: str | None, listed: tuple[str, int] | None = None) -> None:
        """`address`: of this host, where others may come. `listed`: where a cluster has this host's only server."""
        self.address, self._listed = address, listed
        self._held: dict[int, socket.socket] = {}

    def endpoints(self, numbers: Sequence[int]) -> dict[int, str]:
        """Of servers by these numbers, and by all ever asked for: some may still have something to hand over."""
        if self.address is None:
            return {}
        if self._listed is not None:
            return {number: tcp_endpoint(*self._listed) for number in numbers}
        for number in numbers:
            if number not in self._held:
                self._held[number] = hold(self.address)
        return {number: tcp_endpoint(self.address, held.getsockname()[1]) for number, held in self._held.items()}

    def close(self) -> None:
        for held in self._held.values():
            held.close()


def hold(address: str) -> socket.socket:
    """A port of this address that nobody else gets."""
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    # Both ends of the sharing have to allow it; ZeroMQ does.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((address, 0))
    except OSError as error:
        held.close()
        raise EnvironmentProblem(
            f"Servers cannot listen at {address}: {error.strerror}.", fix=["--listen with an address of this host"]
        ) from error
    return held
