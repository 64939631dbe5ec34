"""Sides in processes of their own take turns: real processes, a real socket, steps that take no time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.driver.baton import Process, Side, interleave, rotated, steps_per_block, taking_turns
from bench.driver.child import ScriptFailed
from bench.replicas.memory import bytes_of

# Every run of steps is written down with its beginning and its end, so that the test sees who ran when.
SIDE = """
import sys, time
from bench.driver.turns import Turns, take_turns
def run(steps):
    with open(sys.argv[1], "a") as book:
        book.write(f"{sys.argv[2]} {time.monotonic()} ")
        time.sleep(0.001 * steps)
        book.write(f"{time.monotonic()}\\n")
take_turns(Turns(versions={"peer": "1"}), run)
"""
FAILS = "import sys; sys.exit('no such model')"


def side(name: str, code: str = SIDE, *words: str, num_ranks: int = 1) -> Side:
    def processes(folder: str) -> list[Process]:
        command = [sys.executable, "-c", code, *words, name]
        return [Process(command, {**os.environ, "RANK": str(rank)}) for rank in range(num_ranks)]

    return Side(name, num_ranks, processes)


def test_one_side_runs_at_a_time_and_all_run_as_many_blocks(tmp_path: Path) -> None:
    book = tmp_path / "book"
    sides = [side(name, SIDE, str(book), num_ranks=ranks) for name, ranks in (("ours", 2), ("peer", 1))]
    seconds, told = interleave(sides, num_blocks=3, block_s=0.01)
    assert {name: len(values) for name, values in seconds.items()} == {"ours": 3, "peer": 3}
    assert all(value >= 0.001 for values in seconds.values() for value in values)
    assert told["of_sides"]["peer"]["versions"] == {"peer": "1"}
    runs = sorted(
        (float(start), float(end), name) for name, start, end in map(str.split, book.read_text().splitlines())
    )
    together = [(a, b) for a in runs for b in runs if a[2] != b[2] and a[0] < b[1] and b[0] < a[1]]
    assert not together


def test_a_side_that_fails_is_named_with_what_it_wrote_and_the_others_are_ended(tmp_path: Path) -> None:
    started: list[int] = []
    with (
        pytest.raises(ScriptFailed, match=r"(?s)peer ended before its first step.*no such model"),
        taking_turns([side("ours", SIDE, str(tmp_path / "book")), side("peer", FAILS)], watch=started.extend),
    ):
        raise AssertionError("nothing to run")
    assert started
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_everybody_is_first_in_turn_and_blocks_have_some_steps() -> None:
    assert [rotated("abc", turn) for turn in range(3)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert (steps_per_block(0.1, 1.0), steps_per_block(10.0, 1.0), steps_per_block(1e-9, 1.0)) == (10, 4, 2000)


def test_shared_memory_counts_in_full_although_nobody_touched_it() -> None:
    before = bytes_of([os.getpid()])
    fd = os.memfd_create("test")
    try:
        os.posix_fallocate(fd, 0, 64 * 2**20)
        taken = bytes_of([os.getpid()]) - before
    finally:
        os.close(fd)
    assert 63 * 2**20 < taken < 80 * 2**20
