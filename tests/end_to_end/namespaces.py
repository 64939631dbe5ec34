"""Hosts for tests: network namespaces of this machine, joined by a veth pair. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.231.7.1", "10.231.7.2")


def why_not() -> str | None:
    """What is missing to make namespaces here, or None."""
    if os.geteuid() != 0:
        return "NOT SHOWN HERE: two hosts in network namespaces need root"
    if shutil.which("ip") is None:
        return "NOT SHOWN HERE: two hosts in network namespaces need the Debian package iproute2"
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Two argument prefixes; what is run behind the first has the first of ADDRESSES, and so on."""
    names = [f"mh{os.getpid()}{letter}" for letter in "ab"]
    links = [f"mhv{os.getpid() % 100000}{letter}" for letter in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield ["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        subprocess.run(["ip", "link", "delete", links[0]], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
