"""Two hosts: network namespaces of this machine, joined by a rate-limited link. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.driver.baton import Process, Side, interleave
from bench.driver.child import ROOT
from bench.driver.sides import MH, plain_environment
from bench.programs.workloads import WORKLOADS
from bench.results.compare import Measured, Size, divide

__all__ = ["ADDRESSES", "REDUCER", "Hosts", "ddp_on", "measure", "run_on", "two_hosts", "why_not"]

ADDRESSES = ("10.231.8.1", "10.231.8.2")
RATE = "1gbit"
REDUCER = "--reducer"
"""The flag of `mh run` that says how gradients are sent between hosts."""
MODEL = "mlp-10m"
# By workload: how gradients are sent, and how many workers there are on each host.
SIDES = {"mlp-10m": (("bf16", "int8"), 1), "two-each": (("exact", "bf16", "int8"), 2)}


class Hosts(NamedTuple):
    prefixes: tuple[list[str], list[str]]
    """The prefix of a command that runs on that host."""
    links: tuple[str, str]


def why_not(_workload: str = "") -> str | None:
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "hosts in network namespaces need ip and tc (Debian package iproute2)"
    shown = subprocess.run([*MH, "run", "--help"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    return None if REDUCER in shown.stdout else f"`mh run` has no {REDUCER}"


def measure(workload: str, size: Size) -> Measured:
    reducers, each = SIDES[workload]
    workers, model = 2 * each, WORKLOADS[MODEL]
    with two_hosts() as hosts:
        sides = [_trainer(hosts, reducer, each) for reducer in reducers]
        sides += [ddp_on(hosts, MODEL, name, port, each) for port, name in ((29501, "DDP"), (29502, "DDP again"))]
        found = [interleave(sides, blocks, size.block_s) for blocks in divide(size)]
    facts = found[-1][1]
    settings = {"model": model.model, "batch": workers * model.batch, "workers": workers, "threads": 1, "link": RATE}
    return Measured([seconds for seconds, _ in found], {**settings, **facts})


@contextmanager
def two_hosts(rate: str = RATE) -> Iterator[Hosts]:
    names = (f"mhb{os.getpid()}a", f"mhb{os.getpid()}b")
    links = (f"mhb{os.getpid() % 1000000}va", f"mhb{os.getpid() % 1000000}vb")
    try:
        for name in names:
            _do("ip", "netns", "add", name)
        _do("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            _do("ip", "link", "set", link, "netns", name)
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            _do("ip", "-n", name, "link", "set", link, "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
            # Each end limits what it sends; bursts of 256 KB pass, so that the kernel's large packets are not split.
            limit = ("rate", rate, "burst", "256kb", "latency", "50ms")
            _do("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *limit)
        prefixes = [["ip", "netns", "exec", name] for name in names]
        yield Hosts((prefixes[0], prefixes[1]), links)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", links[0]], capture_output=True, check=False)


def run_on(hosts: Hosts, folder: str, options: Sequence[str], script: Sequence[str], each: int = 1) -> list[Process]:
    """`mh run` on the first host with `each` workers, and `mh agent` with as many on the second."""
    join = f"{folder}/join"
    common = ("-n", str(each), "--threads", "1", "--ui", "none")
    lead = ("run", *common, "--run-dir", f"{folder}/run")
    rendezvous = ("--hosts-wanted", "2", "--listen", ADDRESSES[0], "--join-file", join, "--insecure-data-plane")
    environment = plain_environment(allocator=False)
    return [
        Process([*hosts.prefixes[0], *MH, *lead, *rendezvous, *options, *script], environment),
        Process(
            [*hosts.prefixes[1], *MH, "agent", "--join", join, *common],
            environment,
            after=Path(join),
        ),
    ]


def _trainer(hosts: Hosts, reducer: str, each: int) -> Side:
    script = ("-m", "bench.programs.trainer_side", MODEL, "mirrored", str(2 * each))
    return Side(reducer, 2 * each, lambda folder: run_on(hosts, folder, (REDUCER, reducer), script, each))


def ddp_on(hosts: Hosts, workload: str, name: str, port: int, each: int = 1) -> Side:
    command = (MH[0], "-m", "bench.programs.torch_side", "ddp", workload)
    rendezvous = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port), "WORLD_SIZE": str(2 * each)}
    processes = []
    for rank in range(2 * each):
        prefix, link = hosts.prefixes[rank // each], hosts.links[rank // each]
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank % each), "GLOO_SOCKET_IFNAME": link}
        processes.append(Process([*prefix, *command], {**plain_environment(), **rendezvous, **ranks}))
    return Side(name, 2 * each, lambda _: processes)


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
