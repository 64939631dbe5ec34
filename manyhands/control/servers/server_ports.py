"""Where workers of other hosts reach this host's servers: one port per server number, kept when a server is replaced.

A socket that is bound and never listens reserves the port, so no other process gets it while a server is being
replaced. In a run of one host no server is reached from other hosts, and nothing is bound.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from manyhands.errors import EnvironmentProblem

__all__ = ["ServerPorts", "reserve_port", "tcp_endpoint"]


def tcp_endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class ServerPorts:
    def __init__(self, address: str | None, listed: tuple[str, int] | None = None) -> None:
        """`address`: of this host, for other hosts. `listed`: the address of this host's only server in a cluster."""
        self.address, self._listed = address, listed
        self._reserved: dict[int, socket.socket] = {}

    def endpoints(self, numbers: Sequence[int]) -> dict[int, str]:
        """Endpoints of these servers, and of all requested before: some may still have state to hand over."""
        if self.address is None:
            return {}
        if self._listed is not None:
            return {number: tcp_endpoint(*self._listed) for number in numbers}
        for number in numbers:
            if number not in self._reserved:
                self._reserved[number] = reserve_port(self.address)
        return {
            number: tcp_endpoint(self.address, reserved.getsockname()[1]) for number, reserved in self._reserved.items()
        }

    def close(self) -> None:
        for reserved in self._reserved.values():
            reserved.close()


def reserve_port(address: str) -> socket.socket:
    """Bind a free port of this address, so that no other process gets it."""
    reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    # Both sockets have to allow sharing the port; ZeroMQ does.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((address, 0))
    except OSError as error:
        reserved.close()
        raise EnvironmentProblem(
            f"Servers cannot listen at {address}: {error.strerror}.", fix=["--listen with an address of this host"]
        ) from error
    return reserved
