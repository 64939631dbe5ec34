"""`mh status`: the state of a run; without a run, of all runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from manyhands import exact_json
from manyhands.control.messages.agent_messages import LentHost
from manyhands.control.messages.status_messages import MemberStatus, ServerStatus
from manyhands.errors import UsageError
from manyhands.observe.event_text import clean, count, duration, evaluated_beside, results, size, slow_line, used_lines
from manyhands.observe.run_status import RunStatus, all_runs, find_run, look_at
from manyhands.observe.terminal import BottomLines, columns, is_terminal

if TYPE_CHECKING:
    from manyhands.parameter_server.protocol.variable_listing import ServedVariable

__all__ = ["host_line", "status"]

REFRESH_S = 1.0


@click.command()
@click.argument("run", required=False)
@click.option("--live", "-f", is_flag=True, help="Refresh every second until the run ends.")
@click.option("--variables", is_flag=True, help="List what the parameter servers of a live run hold, by name.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document; with --live one per line.")
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
        raise UsageError("--variables cannot refresh with --live.", where="--live", fix=["without --live"])
    from manyhands.parameter_server.loop.variable_file import read_variables  # imports torch, which is slow

    return read_variables(path)


def _listed(variables: Sequence[ServedVariable]) -> list[str]:
    """A table of variables: which servers hold how many chunks, and how many updates were applied."""
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
    """Version, or range of versions of its shards, which differ while an update is being applied."""
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


def _lines(overview: RunStatus) -> list[str]:
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
        ("evaluator", _evaluator(overview)),
        ("elastic", _elastic(overview)),
        ("restarts", _restarts(overview)),
        ("dropped", f"{overview.events_dropped} events could not be recorded" if overview.events_dropped else ""),
        ("warning", overview.last_warning or ""),
    ]
    rows += [("slow", f"{slow_line(one)} (step {one.step})") for one in overview.slow]
    rows += [("used", text) for text in used_lines(overview.used)]
    if len(overview.lent) > 1 or any(host.seat for host in overview.lent):
        rows += [("host", host_line(host)) for host in overview.lent]
    rows += [(_name(member), _member(member)) for member in overview.ranks]
    rows += [(f"server {member.server}", _server(member)) for member in overview.servers]
    rows += [("spare", _server(overview.spare))] if overview.spare is not None else []
    return [f"{name:<10}  {clean(text)}" for name, text in rows if text]


def _name(member: MemberStatus) -> str:
    """In an elastic run by slot: ranks change, slots do not."""
    return f"rank {member.rank}" if member.slot is None else f"worker {member.slot}"


def host_line(host: LentHost) -> str:
    """ "n2 (slurm 4711, 3h12m left), 2 workers": also what `mh hosts` prints."""
    seat, name = host.seat, host.name
    if seat is not None:
        by = f"{seat.placer} {seat.job}".strip()
        left = "" if seat.seconds_left is None else f", {duration(seat.seconds_left)} left"
        name = f"{seat.node or host.name} ({by}{left})"
    state = "silent" if host.silent else "leaving" if host.leaving else ""
    return ", ".join(text for text in (name, f"{host.slots} worker{'s'[: host.slots != 1]}", state) if text)


def _member(member: MemberStatus) -> str:
    where = f"step {member.step}, {member.phase}" if member.step is not None else member.status
    if member.slot is not None:
        rank = f"rank {member.rank}" if member.rank >= 0 else member.status
        where = f"{rank}, {where}" if member.step is not None else rank
        where += f", call {member.call}" if member.call else ""
    return f"{where}, {duration(member.age_s)} ago, pid {member.pid}"


def _server(member: ServerStatus) -> str:
    doing = f", {member.phase}" if member.phase else ""
    before = f", process {member.deaths + 1} after {member.deaths} died" if member.deaths else ""
    return f"{member.status}{doing}, last report {duration(member.age_s)} ago, pid {member.pid}{before}"


def _elastic(overview: RunStatus) -> str:
    if overview.elastic is None:
        return ""
    least, most = overview.elastic
    wanted = f", {overview.workers_wanted} wanted" if overview.workers_wanted is not None else ""
    members = sum(member.rank >= 0 for member in overview.ranks)
    return f"{members} workers on this host, {least} to {most} in all{wanted}; generation {overview.generation}"


def _state(overview: RunStatus) -> str:
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


def _workers(overview: RunStatus) -> str:
    if overview.workers is None:
        return ""
    return f"{overview.workers}, {overview.strategy}, V={overview.slices}, {overview.precision}"


def _step(overview: RunStatus) -> str:
    if overview.step is None:
        return ""
    total = f"/{overview.total_steps}" if overview.total_steps else ""
    training = f" of training {overview.training}" if overview.training > 1 else ""
    epoch, ago = (overview.epoch or 0) + 1, duration(overview.last_step_age_s or 0)
    return f"{overview.step}{total}{training}, epoch {epoch}, {ago} ago"


def _speed(overview: RunStatus) -> str:
    if overview.samples_per_s is None or overview.state != "running":
        return ""
    eta = f", eta {duration(overview.eta_s)}" if overview.eta_s else ""
    return f"{count(overview.samples_per_s)} samples/s{eta}"


def _checkpoint(overview: RunStatus) -> str:
    if overview.checkpoint is None:
        return "none seen"
    saved = overview.checkpoint
    return f"step {saved.step}, {duration(saved.age_s)} ago, {saved.path}"


def _evaluator(overview: RunStatus) -> str:
    seen = overview.evaluator
    return f"step {seen.step}, {duration(time.time() - seen.time_s)} ago, {evaluated_beside(seen)}" if seen else ""


def _restarts(overview: RunStatus) -> str:
    lost = f"; last lost: {overview.last_lost}" if overview.last_lost else ""
    return f"{overview.restarts}{lost}" if overview.restarts or lost else ""


def _table(overviews: list[RunStatus]) -> str:
    if not overviews:
        return "No runs in runs/."
    width = max(len(overview.run) for overview in overviews)
    return "\n".join(f"{clean(overview.run):<{width}}  {_row(overview)}" for overview in overviews)


def _row(overview: RunStatus) -> str:
    total = f"/{overview.total_steps}" if overview.total_steps else ""
    parts = [
        f"{overview.state:<8}",
        "" if overview.step is None else f"step {overview.step}{total}",
        "" if overview.loss is None else f"loss {overview.loss:.4g}",
        _speed(overview),
        "" if not overview.restarts else f"{overview.restarts} restarts",
    ]
    return "  ".join(part for part in parts if part).rstrip()
