"""`mh logs`: the output of a run's workers and servers, one of them raw or all of them merged."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import click

from manyhands.errors import UsageError
from manyhands.observe.event_text import clean
from manyhands.observe.run_status import attempts_of, find_run, look_at
from manyhands.observe.terminal import is_terminal

__all__ = ["logs"]

POLL_S = 0.2
CHUNK_BYTES = 1 << 16


@click.command()
@click.argument("run", required=False)
@click.option("--rank", type=click.IntRange(0), help="One worker's output only, byte for byte.")
@click.option("--server", type=click.IntRange(0), help="One parameter server's output only, byte for byte.")
@click.option("--attempt", type=click.IntRange(1), help="Which start of the run. Default: the last.")
@click.option("--follow", "-f", is_flag=True, help="Keep printing new output, across restarts, until the run ends.")
@click.option("--err", "stream", flag_value="err", help="Standard error only.")
@click.option("--out", "stream", flag_value="out", help="Standard output only.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines: attempt, rank or server, stream, line.")
def logs(
    run: str | None,
    rank: int | None,
    server: int | None,
    attempt: int | None,
    follow: bool,
    stream: str | None,
    as_json: bool,
) -> None:
    """Show the output of RUN's workers: a run directory, or its name under runs/; without it, the newest run.

    The output of several workers and servers is merged, each line prefixed with its rank or server number.
    """
    if rank is not None and server is not None:
        raise UsageError(
            "--rank and --server select different processes.", fix=[f"--rank {rank}", f"--server {server}"]
        )
    one = ("rank", rank) if rank is not None else ("server", server) if server is not None else None
    chosen = _Choice(find_run(run), one, stream)
    _check(chosen, attempt, follow)
    if as_json:
        show: Callable[[_Source, bytes], None] = _show_json
    elif one is not None:
        show = _show_raw
    else:
        show = _show_escaped if is_terminal(sys.stdout) else _show_merged
    whole_lines = as_json or one is None
    for source, data in _pieces(chosen, attempt, follow, whole_lines):
        show(source, data)


_Who = tuple[str, int]
"""("rank", 0) or ("server", 0)."""


class _Source(NamedTuple):
    attempt: int
    who: _Who
    stream: str
    path: Path


class _Choice(NamedTuple):
    run: Path
    who: _Who | None
    stream: str | None

    def sources(self, attempt: int) -> list[_Source]:
        """The existing log files of one attempt: workers by rank, then servers by number."""
        found = []
        for path in (self.run / "logs" / f"attempt-{attempt}").glob("*-*.*"):
            (role, _, number), stream = path.stem.partition("-"), path.suffix[1:]
            if role in ("rank", "server") and number.isdigit() and stream in ("out", "err"):
                found.append(_Source(attempt, (role, int(number)), stream, path))
        wanted = [each for each in found if self.who in (None, each.who) and self.stream in (None, each.stream)]
        return sorted(wanted, key=lambda each: (each.who, each.stream != "out"))


def _check(chosen: _Choice, attempt: int | None, follow: bool) -> None:
    """Refuse a selection without output; while following a live run, output may still come."""
    attempts = attempts_of(chosen.run)
    if follow and look_at(chosen.run, ask=False).state == "running":
        return
    if not attempts:
        raise UsageError(
            f"{chosen.run} has no logs: a run of one process prints where it was started.",
            fix=[f"mh status {chosen.run}"],
        )
    if attempt is not None and attempt not in attempts:
        raise UsageError(f"{chosen.run} has no attempt {attempt}.", fix=[f"--attempt {number}" for number in attempts])
    last = attempt or attempts[-1]
    if not chosen.sources(last):
        with_output = sorted({each.who for each in _Choice(chosen.run, None, chosen.stream).sources(last)})
        who = "The run" if chosen.who is None else "{} {}".format(*chosen.who).capitalize()
        raise UsageError(
            f"{who} has no output in attempt {last} of {chosen.run}.",
            fix=[f"--{role} {number}" for role, number in with_output] or ["without --rank, --err and --out"],
        )


def _pieces(chosen: _Choice, attempt: int | None, follow: bool, whole_lines: bool) -> Iterator[tuple[_Source, bytes]]:
    tails: dict[_Source, _Tail] = {}
    while True:
        ended = not follow or look_at(chosen.run, ask=False).state != "running"  # before reading: no output is missed
        attempts = attempts_of(chosen.run)
        numbers = [attempt] if attempt else [number for number in attempts if number >= _first(tails, attempts)]
        for source in (each for number in numbers for each in chosen.sources(number)):
            tail = tails.setdefault(source, _Tail(source.path, whole_lines))
            for data in tail.read(to_the_end=ended or source.attempt < max(attempts)):
                yield source, data
        if ended:
            return
        sys.stdout.flush()
        time.sleep(POLL_S)


def _first(tails: dict[_Source, _Tail], attempts: list[int]) -> int:
    return min((source.attempt for source in tails), default=max(attempts, default=1))


class _Tail:
    """Reads a growing file, in whole lines or in raw chunks."""

    def __init__(self, path: Path, whole_lines: bool) -> None:
        self._path, self._whole_lines = path, whole_lines
        self._offset, self._rest = 0, b""

    def read(self, *, to_the_end: bool) -> Iterator[bytes]:
        """The new data. An unfinished line is held back until it is complete, except at the end."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while data := file.read(CHUNK_BYTES):
                self._offset += len(data)
                if not self._whole_lines:
                    yield data
                    continue
                *lines, self._rest = (self._rest + data).split(b"\n")
                yield from lines
        if to_the_end and self._rest:
            last, self._rest = self._rest, b""
            yield last


def _show_raw(source: _Source, data: bytes) -> None:
    click.echo(data, nl=False)


def _show_merged(source: _Source, line: bytes) -> None:
    click.echo(_prefix(source).encode() + line)


def _show_escaped(source: _Source, line: bytes) -> None:
    # A worker's progress bar or escape sequence must not repaint a terminal that also shows other workers.
    text = line.decode(errors="replace").removesuffix("\r").expandtabs()
    click.echo(_prefix(source) + clean(text))


def _show_json(source: _Source, line: bytes) -> None:
    role, number = source.who
    fields = {"attempt": source.attempt, role: number, "stream": source.stream}
    click.echo(json.dumps({**fields, "line": line.decode(errors="replace")}))


def _prefix(source: _Source) -> str:
    role, number = source.who
    return f"[{role} {number}] " if source.stream == "out" else f"[{role} {number} err] "
