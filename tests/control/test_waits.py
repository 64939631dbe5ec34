"""Every function in which a worker waits for another process is known to hang detection by its stack.

Each is really waited in, in a thread, until its stack shows it; then what it waits for happens.
"""

from __future__ import annotations

import faulthandler
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from manyhands.comm.axis import Axis, gloo_options
from manyhands.comm.host_memory import HostMemory, Segment
from manyhands.comm.shared_memory import Plane
from manyhands.control.membership.hang_detection import main_stack, waits_for_others
from manyhands.control.messages.worker_messages import Offer, StoreReply, StoreRequest
from manyhands.errors import PeerLost
from manyhands.parameter_server.protocol.messages import OpenRows
from manyhands.parameter_server.worker.server_connection import ServerConnection
from tests.control.conftest import until
from tests.control.test_session import FakeAgent, group


def stack_of(thread: threading.Thread) -> list[str]:
    """As `main_stack` gives it, of what faulthandler writes for this thread."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        dumps = file.read().split("\n\n")
    (own,) = [one for one in dumps if f"{thread.ident:016x}" in one.partition("\n")[0]]
    return main_stack(own)


def assert_recognised(wait: Callable[[], object], end: Callable[[], object]) -> None:
    def quietly() -> None:
        with suppress(PeerLost):
            wait()

    thread = threading.Thread(target=quietly)
    thread.start()
    try:
        until(lambda: thread.is_alive() and waits_for_others(stack_of(thread)))
    finally:
        end()
        thread.join(60)
    assert not thread.is_alive()


@contextmanager
def plane() -> Iterator[Plane]:
    memory = HostMemory()
    num_bytes = Plane.num_bytes(2)
    segment = Segment(memory.fd, num_bytes, memory.allot("plane", num_bytes, 2))
    yield Plane(segment, 0, 2, timeout_s=60)
    memory.close()


PROGRAM = struct.pack("3i", 0, 1, -1)


class Silent:
    """A transfer that a server never answers."""

    server, is_done = 0, False

    def due(self) -> list[Any]:
        return []

    def hear(self, message: object) -> bool:
        return False

    def again(self) -> None: ...


@pytest.mark.parametrize(
    "call", ["barrier", "wait_posted", "all_reduce_", "all_gather", "reduce_scatter", "broadcast_"]
)
def test_in_shared_memory(call: str) -> None:
    one, two = torch.zeros(4), torch.zeros(8)
    with plane() as mine:
        waits: dict[str, Callable[[], object]] = {
            "barrier": lambda: mine.barrier("here"),
            "wait_posted": lambda: mine.wait_posted(1, "here"),
            "all_reduce_": lambda: mine.all_reduce_(one, PROGRAM, "here"),
            "all_gather": lambda: mine.all_gather(two, one, "here"),
            "reduce_scatter": lambda: mine.reduce_scatter(one, two, PROGRAM, "here"),
            "broadcast_": lambda: mine.broadcast_(one, "here", source=1),
        }
        assert_recognised(waits[call], lambda: mine.abort(1))


def test_in_a_collective_over_the_network() -> None:
    store, ranks = dist.HashStore(), {}

    def connect(number: int) -> None:
        options = gloo_options("127.0.0.1", timedelta(seconds=60))
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), number, 2, options)
        ranks[number] = Axis(number, 2, gloo, timeout_s=60.0, lost=lambda: False)

    threads = [threading.Thread(target=connect, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert_recognised(lambda: ranks[0].barrier("here"), lambda: ranks[1].barrier("here"))


def test_for_its_agent(tmp_path: Path) -> None:
    with ExitStack() as stack:

        def fake(name: str, *, joining: bool) -> FakeAgent:
            (tmp_path / name).mkdir()
            agent = FakeAgent(tmp_path / name, joining=joining)
            stack.callback(agent.close)
            return agent

        agent = fake("member", joining=False)
        assert_recognised(lambda: agent.session.await_group(60.0), lambda: agent.announce(group(2)))
        assert_recognised(
            lambda: agent.session.await_end_of_call(3, 60.0), lambda: agent.announce(group(2), run_call=4)
        )

        def answer() -> None:
            asked = agent.receive(StoreRequest)
            agent.port.send(StoreReply(ticket=asked.ticket, ok=True, value=b"found"), to=agent.peer)

        assert_recognised(lambda: agent.session.get("key", 60.0), answer)
        newcomer = fake("newcomer", joining=True)

        def admit() -> None:
            newcomer.receive(Offer)
            newcomer.announce(group(2))

        assert_recognised(lambda: newcomer.session.offer(1, 60.0), admit)


def test_for_a_server(tmp_path: Path) -> None:
    over = threading.Event()
    link = ServerConnection(lambda server: f"ipc://{tmp_path}/unused", b"worker")
    opening = OpenRows(number=(1, 1, 1), servers=1, step=0, base=0)
    assert_recognised(lambda: link.open(opening, lambda: not over.is_set()), over.set)
    over.clear()
    assert_recognised(lambda: link.carry([Silent()], "answer", lambda: not over.is_set()), over.set)
    link.close()
