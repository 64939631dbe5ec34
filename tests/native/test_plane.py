"""Collectives in shared memory against torch's own arithmetic, and what happens when a rank does not come."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands.comm.host_memory import HostMemory, Segment, free_bytes
from manyhands.comm.shared_memory import Plane
from manyhands.errors import EnvironmentProblem
from manyhands.native import why_not
from manyhands.parallel.gradients.slice_tree import finish, program

MAX_WORLD = 5
DTYPES = ["float32", "float64", "bfloat16", "float16", "int64"]
SEGMENT_BYTES = 4 * 2**20
SOURCES = Path(__file__).parents[2] / "manyhands" / "native"

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")


class Ranks:
    """Processes that map one segment, forked by one that has torch already."""

    def __init__(self, count: int) -> None:
        self.memory = HostMemory()
        self.segment = Segment(self.memory.fd, SEGMENT_BYTES, self.memory.allot("plane", SEGMENT_BYTES))
        self._control, theirs = socket.socketpair()
        words = [sys.executable, str(Path(__file__).with_name("rank.py"))]
        fds = [self.memory.fd, theirs.fileno()]
        self._source = subprocess.Popen([*words, str(fds[0]), str(SEGMENT_BYTES), str(fds[1])], pass_fds=fds)
        theirs.close()
        self.pids: list[int] = []
        self._lines: list[Any] = []
        for rank in range(count):
            self.start(rank)

    def start(self, rank: int) -> None:
        here, there = socket.socketpair()
        with there:
            socket.send_fds(self._control, [b"1"], [there.fileno()])
            pid = int.from_bytes(self._control.recv(4), "little")
        self.pids[rank:] = [pid, *self.pids[rank + 1 :]]
        with here:
            self._lines[rank:] = [here.makefile("rw"), *self._lines[rank + 1 :]]

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def kill(self, rank: int) -> None:
        self.signal(rank, signal.SIGKILL)
        while self._lines[rank].readline():  # what it had said; then the end, as it is gone
            pass
        self._lines[rank].close()

    def open(self, world: int, area_bytes: int, timeout_s: float = 60.0) -> None:
        """A fresh plane of the first `world` processes."""
        os.pwrite(self.memory.fd, bytes(Plane.num_bytes(world, area_bytes)), 0)
        command = {"op": "open", "world": world, "area_bytes": area_bytes, "timeout_s": timeout_s}
        self.call([{**command, "rank": rank} for rank in range(world)])

    def call(self, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for rank, one in enumerate(commands):
            self.send(rank, one)
        return [self.receive(rank) for rank in range(len(commands))]

    def send(self, rank: int, command: dict[str, Any]) -> None:
        self._lines[rank].write(json.dumps(command) + "\n")
        self._lines[rank].flush()

    def send_and_see_it_arrive(self, rank: int, command: dict[str, Any]) -> None:
        """A rank that arrives at a barrier writes so at the start of the segment."""
        before = os.pread(self.memory.fd, 4096, 0)
        self.send(rank, command)
        deadline = time.monotonic() + 60
        while os.pread(self.memory.fd, 4096, 0) == before:
            assert time.monotonic() < deadline, "it never arrived"
            time.sleep(0.001)

    def receive(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._lines[rank].readline())
        return found

    def close(self) -> None:
        for line in self._lines:
            line.close()  # a rank whose line ends, ends
        self._control.close()
        self._source.wait(timeout=60)
        self.segment.close()
        self.memory.close()


@pytest.fixture(scope="module")
def warm() -> Iterator[Ranks]:
    ranks = Ranks(MAX_WORLD)
    yield ranks
    ranks.close()


def made(dtype: str, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == "int64":
        return torch.randint(-(2**62), 2**62, (count,), generator=generator)
    values = torch.randn(count, generator=generator, dtype=torch.float64) * 10 ** torch.randint(
        -3, 4, (count,), generator=generator
    )
    values[seed % count : seed % count + 1] = [float("nan"), float("inf"), -0.0, 1.0][seed % 4]
    return values.to(getattr(torch, dtype))


def hex_of(tensor: torch.Tensor) -> str:
    return tensor.view(torch.uint8).numpy().tobytes().hex() if tensor.numel() else ""


def with_one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """NaNs have many bit patterns, and torch itself does not keep to one."""
    return (
        torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
        if tensor.is_floating_point()
        else tensor
    )


def tensor_of(data: str, dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray.fromhex(data), dtype=kind) if data else torch.empty(0, dtype=kind)


def assert_sums(found: list[dict[str, Any]], expected: list[torch.Tensor], dtype: str) -> None:
    for one, right in zip(found, expected, strict=True):
        assert hex_of(with_one_nan(tensor_of(one["data"], dtype))) == hex_of(with_one_nan(right))


def tree_sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    return finish({(0, i): tensor for i, tensor in enumerate(tensors)}, len(tensors), add=torch.add)


def over(world: int) -> str:
    return program([(0, rank) for rank in range(world)], world).hex()


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world=st.integers(1, MAX_WORLD),
    dtype=st.sampled_from(DTYPES),
    count=st.one_of(st.integers(0, 40), st.integers(0, 9000)),
    area_bytes=st.sampled_from([320, 4096, 65536]),
    seed=st.integers(0, 2**31),
)
def test_every_collective_gives_what_torch_gives_to_the_bit(
    warm: Ranks, world: int, dtype: str, count: int, area_bytes: int, seed: int
) -> None:
    warm.open(world, area_bytes)
    inputs = [made(dtype, count, seed + rank) if count else torch.empty(0) for rank in range(world)]
    inputs = [tensor.to(getattr(torch, dtype)) for tensor in inputs]
    commands = [{"dtype": dtype, "data": hex_of(tensor), "program": over(world)} for tensor in inputs]

    summed = warm.call([{**one, "op": "all_reduce"} for one in commands])
    assert_sums(summed, [tree_sum(inputs)] * world, dtype)
    assert len({one["data"] for one in summed}) == 1, "the same bits on every rank, NaN or not"

    gathered = warm.call([{**one, "op": "all_gather"} for one in commands])
    assert [one["data"] for one in gathered] == ["".join(one["data"] for one in commands)] * world

    source = seed % world
    sent = warm.call([{**one, "op": "broadcast", "source": source} for one in commands])
    assert [one["data"] for one in sent] == [commands[source]["data"]] * world

    whole = [tensor[: count // world * world] for tensor in inputs]
    scattered = warm.call(
        [{**t, "data": hex_of(w), "op": "reduce_scatter"} for t, w in zip(commands, whole, strict=True)]
    )
    parts = tree_sum(whole).chunk(world) if count >= world else [torch.empty(0)] * world
    assert_sums(scattered, list(parts), dtype)


OPS = ["barrier", "all_reduce", "all_gather", "broadcast", "reduce_scatter"]


def assert_rank_1_is_missed(warm: Ranks, command: dict[str, Any]) -> None:
    began = time.monotonic()
    for rank in (0, 2):
        warm.send(rank, command)
    errors = [warm.receive(rank)["error"] for rank in (0, 2)]
    assert time.monotonic() - began < 30
    assert any("PeerTimeout" in error and "rank 1" in error for error in errors)
    assert all("PeerTimeout" in error or "PeerLost" in error for error in errors)


def call_of(op: str, count: int = 9) -> dict[str, Any]:
    return {"op": op, "dtype": "float32", "data": hex_of(torch.ones(count)), "program": over(3), "source": 1}


@pytest.mark.faults
@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_hangs_is_named_in_bounded_time(warm: Ranks, op: str) -> None:
    warm.open(3, 4096, timeout_s=0.3)
    warm.call([call_of(op)] * 3)
    warm.signal(1, signal.SIGSTOP)
    try:
        assert_rank_1_is_missed(warm, call_of(op))
    finally:
        warm.signal(1, signal.SIGCONT)


@pytest.mark.faults
@pytest.mark.slow
def test_a_rank_killed_inside_is_named_in_bounded_time() -> None:
    ranks = Ranks(3)
    try:
        for op in OPS:
            ranks.open(3, 4096, timeout_s=0.3)
            # 36 kB go through areas of 4 kB in many turns: the dead rank has reached the first and no further.
            ranks.send_and_see_it_arrive(1, call_of(op, 9 * 1024))
            ranks.kill(1)
            if op == "barrier":  # it had arrived, so the barrier completes
                ranks.send(0, call_of(op))
                ranks.send(2, call_of(op))
                assert "error" not in ranks.receive(0) | ranks.receive(2)
            assert_rank_1_is_missed(ranks, call_of(op, 9 * 1024))
            ranks.start(1)
    finally:
        ranks.close()


def test_an_abort_wakes_those_who_wait_and_those_who_come_later(warm: Ranks) -> None:
    warm.open(3, 4096, timeout_s=60)
    plane = Plane(warm.segment, 2, 3, area_bytes=4096)
    began = time.monotonic()
    warm.send_and_see_it_arrive(0, {"op": "barrier"})
    plane.abort(1)
    assert "PeerLost: Rank 0 was in 'barrier' when rank 1 was lost" in warm.receive(0)["error"]
    assert "PeerLost" in warm.call([{"op": "barrier"}])[0]["error"]
    assert time.monotonic() - began < 30


def test_a_barrier_that_completed_counts_for_ranks_that_look_later(warm: Ranks) -> None:
    """No rank misses one that left right after the last barrier."""
    warm.open(2, 4096)
    plane = Plane(warm.segment, 1, 2, area_bytes=4096)
    warm.signal(0, signal.SIGSTOP)
    try:
        warm.send(0, {"op": "barrier"})
    finally:
        warm.signal(0, signal.SIGCONT)
    plane.barrier("barrier")
    plane.abort(1)
    assert "error" not in warm.receive(0)


def test_posts_are_seen_by_who_looks_and_awaited_by_who_waits(warm: Ranks) -> None:
    warm.open(3, 4096)
    for rank, times in ((0, 2), (1, 3)):
        warm.send(rank, {"op": "post", "times": times})
        warm.receive(rank)
    wanted = {"op": "all_posted", "times": 2}
    assert [one["data"] for one in warm.call([wanted] * 3)] == ["False"] * 3
    warm.send(0, {"op": "wait_posted", "times": 2})
    warm.send(2, {"op": "post", "times": 2})
    assert "error" not in warm.receive(0) | warm.receive(2)
    assert [one["data"] for one in warm.call([wanted] * 3)] == ["True"] * 3
    assert [one["data"] for one in warm.call([{**wanted, "times": 3}] * 3)] == ["False"] * 3


@pytest.mark.faults
def test_a_rank_that_posts_no_more_is_named_and_one_that_is_lost_wakes_who_waits(warm: Ranks) -> None:
    waiting = {"op": "wait_posted", "times": 1}
    warm.open(3, 4096, timeout_s=0.3)
    warm.send(0, {"op": "post"})
    warm.receive(0)
    warm.send(0, waiting)
    assert "PeerTimeout: Rank 0 waited 0.3 s for rank 1 in 'posts'" in warm.receive(0)["error"]
    assert "PeerLost" in warm.call([waiting])[0]["error"], "no rank waits that long again"
    warm.open(3, 4096, timeout_s=60)
    began = time.monotonic()
    warm.send(0, waiting)
    Plane(warm.segment, 2, 3, area_bytes=4096).abort(1)
    assert "PeerLost: Rank 0 was in 'posts' when rank 1 was lost" in warm.receive(0)["error"]
    assert time.monotonic() - began < 30


def test_memory_that_is_not_there_is_an_error_to_every_process_that_asks_for_it() -> None:
    memory = HostMemory()
    try:
        for _ in range(2):
            with pytest.raises(EnvironmentProblem, match=r"Cannot allocate 4611686018427.4 MB .* MB are free"):
                memory.allot("weights", 2**62)
        assert memory.allot("plane", 5000) == 0
        assert memory.allot("more", 1) == 8192
        assert memory.allot("plane", 5000) == 0
    finally:
        memory.close()


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    assert free_bytes(tmp_path) == 3_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path) > 5_000_000


@pytest.mark.long
@pytest.mark.slow
def test_a_build_with_sanitizers_finds_nothing(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("NOT SHOWN HERE: sanitizers need gcc")
    binary = tmp_path / "sanitized"
    flags = ["-std=c11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-I", str(SOURCES)]
    core = [str(path) for path in SOURCES.glob("*.c") if not path.stem.endswith("module")]
    files = [str(Path(__file__).with_name(name)) for name in ("sanitized.c", "sanitized_rows.c")] + core
    subprocess.run(["gcc", *flags, "-o", str(binary), *files, "-lm"], check=True, timeout=200)
    ran = subprocess.run([str(binary)], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "ok\n"
