"""Addresses as users write them: of a cluster's task, with a port, and of an interface to listen on."""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Any

from manyhands.errors import ClusterError, UsageError

__all__ = ["EXAMPLE_ADDRESS", "Address", "is_loopback", "parse_address", "parse_task_address", "shown"]

EXAMPLE_ADDRESS = "10.0.0.1:2222"

Address = tuple[str, int]

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]")


def parse_task_address(text: Any, field: str, where: str | None = None) -> Address:
    """ "10.0.0.1:2222" or "[::1]:2222" -> host and port; `field` is its name in error messages."""

    def refuse(why: str) -> ClusterError:
        return ClusterError(f"{field} is {shown(text)}, {why}.", where=where, fix=[f'"{EXAMPLE_ADDRESS}"'])

    if not isinstance(text, str):
        raise refuse('but must be text of the form "host:port"')
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        raise refuse("an address without a port") if not colon else refuse("which is not host:port")
    if not _HOST.fullmatch(host):
        raise refuse("which has no valid host name before the port")
    if not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535):
        raise refuse(f"but a port is a number from 1 to 65535, not {shown(port)}")
    return host.strip("[]"), int(port)


def parse_address(text: str, default_port: int = 0) -> Address:
    """ADDR or ADDR:PORT, [IPv6]:PORT included."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    else:
        host, port = text, ""
    if not host or (port and not (port.isdigit() and int(port) < 65536)):
        raise ClusterError(f"{text!r} is not an address.", fix=["ADDR or ADDR:PORT, such as 10.0.0.1:29500"])
    if host in ("0.0.0.0", "::", "*"):
        raise UsageError(
            f"{host} is every interface; a run listens on one.", fix=["the one address the other hosts use"]
        )
    return host, int(port) if port else default_port


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def shown(value: Any) -> str:
    """A short, printable form of any JSON value."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:80] + "…"
