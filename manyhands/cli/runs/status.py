"""`mh status`: what a run is doing, or did; without a run, all of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from manyhands import exact_json
from manyhands.control.messages.status_messages import MemberStatus, ServerStatus
from manyhands.errors import UsageError
from manyhands.observe.event_text import clean, count, duration, results, size, slow_line, used_lines
from manyhands.observe.run_status import Overview, all_runs, find_run, look_at
from manyhands.observe.terminal import BottomLines, columns, is_terminal

if TYPE_CHECKING:
    from manyhands.parameter_server.protocol.variable_listing import ServedVariable

__all__ = ["status"]

REFRESH_S = 1.0


@click.command()
@click.argument("run", required=False)
@click.option("--live", "-f", is_flag=True, help="Refresh every second until the run ends.")
@click.option("--variables", is_flag=True, help="What the parameter servers of a live run keep, by name.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document; with --live one a line.")
def status(run: str | None, live: bool, variables: bool, as_json: bool) -> None:
    """Show what RUN is doing, or did: a run directory, or its name under runs/.

    Without RUN: all runs under runs/, the newest first; with --live or --variables: the newest.
    """
    if variables:
        found = _variables(find_run(run), live)
        click.echo(_document(found) if as_json else "\n".join(_listed(found)))
        return
    if run is None and not live:
        overviews = [look_at(path, ask=False) for path in all_runs()]
        click.echo(_document(overviews) if as_json else _table(overviews))
        return
    path = find_run(run)
    if live:
        _follow(path, as_json)
    elif as_json:
        click.echo(_document(look_at(path)))
    else:
        click.echo("\n".join(_lines(look_at(path))))


def _variables(path: Path, live: bool) -> list[ServedVariable]:
    if live:
        raise UsageError("--variables shows how things are at one moment.", where="--live", fix=["without --live"])
    from manyhands.parameter_server.loop.variable_file import read_variables  # with torch, which takes its time

    return read_variables(path)


def _listed(variables: Sequence[ServedVariable]) -> list[str]:
    """A table: who keeps how many chunks of what, and how many updates it has seen."""
    rows = [("name", "shape", "dtype", "bytes", "servers", "version")]
    rows += [
        (
            clean(one.name),
            "x".join(map(str, one.shape)) or "-",
            one.dtype,
            size(one.num_bytes),
            _kept(one),
            _version(one),
        )
        for one in variables
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    servers = {share.server for one in variables for share in one.shares}
    total = size(sum(one.num_bytes for one in variables))
    where = f"server{'s' if len(servers) > 1 else ''} {', '.join(map(str, sorted(servers)))}"
    return [*table, f"{len(variables)} variables, {total}, on {where}"]


def _kept(variable: ServedVariable) -> str:
    if all(share.chunks == 1 for share in variable.shares):
        return ", ".join(str(share.server) for share in variable.shares)
    return ", ".join(f"{share.server} ({share.chunks} chunks)" for share in variable.shares)


def _version(variable: ServedVariable) -> str:
    """Of its shares; they differ while an update is on its way."""
    known = sorted({share.version for share in variable.shares if share.version is not None})
    return " to ".join(map(str, dict.fromkeys((known[0], known[-1])))) if known else "?"


def _document(value: object) -> bytes:
    return exact_json.encode(value, indent=2)


def _follow(path: Path, as_json: bool) -> None:
    in_place = is_terminal(sys.stdout) and not as_json
    screen = BottomLines(sys.stdout)
    while True:
        overview = look_at(path)
        ended = overview.state != "running"
        if as_json:
            click.echo(exact_json.encode(overview))
        elif in_place and not ended:
            width = columns(sys.stdout) - 1
            screen.draw([line[:width] for line in _lines(overview)])
        elif in_place:
            screen.erase()
            click.echo("\n".join(_lines(overview)))
        else:
            click.echo(_row(overview))
        if ended:
            return
        time.sleep(REFRESH_S)


def _lines(overview: Overview) -> list[str]:
    rows = [
        ("run", overview.path),
        ("state", _state(overview)),
        ("command", " ".join(overview.command)),
        ("workers", _workers(overview)),
        ("step", _step(overview)),
        ("loss", "" if overview.loss is None else f"{overview.loss:.4g}"),
        ("speed", _speed(overview)),
        ("evaluated", results(overview.results)),
        ("checkpoint", _checkpoint(overview)),
        ("elastic", _elastic(overview)),
        ("restarts", _restarts(overview)),
        ("dropped", f"{overview.events_dropped} events could not be recorded" if overview.events_dropped else ""),
        ("warning", overview.last_warning or ""),
    ]
    rows += [("slow", f"{slow_line(one)} (step {one.step})") for one in overview.slow]
    rows += [("used", text) for text in used_lines(overview.used)]
    rows += [(_name(place), _place(place)) for place in overview.ranks]
    rows += [(f"server {place.server}", _server(place)) for place in overview.servers]
    rows += [("spare", _server(overview.spare))] if overview.spare is not None else []
    return [f"{name:<10}  {clean(text)}" for name, text in rows if text]


def _name(place: MemberStatus) -> str:
    """An elastic run's ranks change; its slots do not."""
    return f"rank {place.rank}" if place.slot is None else f"worker {place.slot}"


def _place(place: MemberStatus) -> str:
    where = f"step {place.step}, {place.phase}" if place.step is not None else place.status
    if place.slot is not None:
        rank = f"rank {place.rank}" if place.rank >= 0 else place.status
        where = f"{rank}, {where}" if place.step is not None else rank
        where += f", call {place.call}" if place.call else ""
    return f"{where}, {duration(place.age_s)} ago, pid {place.pid}"


def _server(place: ServerStatus) -> str:
    doing = f", {place.phase}" if place.phase else ""
    before = f", number {place.deaths + 1} after {place.deaths} that died" if place.deaths else ""
    return f"{place.status}{doing}, heard {duration(place.age_s)} ago, pid {place.pid}{before}"


def _elastic(overview: Overview) -> str:
    if overview.elastic is None:
        return ""
    least, most = overview.elastic
    wanted = f", {overview.workers_wanted} wanted" if overview.workers_wanted is not None else ""
    members = sum(place.rank >= 0 for place in overview.ranks)
    return f"{members} workers on this host, {least} to {most} in all{wanted}; generation {overview.generation}"


def _state(overview: Overview) -> str:
    text = overview.state
    if overview.state == "died":
        text = f"died: it was running as pid {overview.pid}, which is gone; the same command resumes it"
    elif overview.state == "running":
        text = f"running, pid {overview.pid} on {overview.host or 'this host'}"
        if overview.started_s:
            text += f", for {duration(time.time() - overview.started_s)}"
    elif overview.exit_code is not None:
        text += f", exit code {overview.exit_code}"
    return text


def _workers(overview: Overview) -> str:
    if overview.workers is None:
        return ""
    return f"{overview.workers}, {overview.strategy}, V={overview.slices}, {overview.precision}"


def _step(overview: Overview) -> str:
    if overview.step is None:
        return ""
    total = f"/{overview.total_steps}" if overview.total_steps else ""
    training = f" of training {overview.training}" if overview.training > 1 else ""
    epoch, ago = (overview.epoch or 0) + 1, duration(overview.last_step_age_s or 0)
    return f"{overview.step}{total}{training}, epoch {epoch}, {ago} ago"


def _speed(overview: Overview) -> str:
    if overview.samples_per_s is None or overview.state != "running":
        return ""
    eta = f", eta {duration(overview.eta_s)}" if overview.eta_s else ""
    return f"{count(overview.samples_per_s)} samples/s{eta}"


def _checkpoint(overview: Overview) -> str:
    if overview.checkpoint is None:
        return "none seen"
    saved = overview.checkpoint
    return f"step {saved.step}, {duration(saved.age_s)} ago, {saved.path}"


def _restarts(overview: Overview) -> str:
    lost = f"; last lost: {overview.last_lost}" if overview.last_lost else ""
    return f"{overview.restarts}{lost}" if overview.restarts or lost else ""


def _table(overviews: list[Overview]) -> str:
    if not overviews:
        return "No runs in runs/."
    width = max(len(overview.run) for overview in overviews)
    return "\n".join(f"{clean(overview.run):<{width}}  {_row(overview)}" for overview in overviews)


def _row(overview: Overview) -> str:
    total = f"/{overview.total_steps}" if overview.total_steps else ""
    parts = [
        f"{overview.state:<8}",
        "" if overview.step is None else f"step {overview.step}{total}",
        "" if overview.loss is None else f"loss {overview.loss:.4g}",
        _speed(overview),
        "" if not overview.restarts else f"{overview.restarts} restarts",
    ]
    return "  ".join(part for part in parts if part).rstrip()
