"""`mh chaos`: injects random faults into a script's run, and reports whether it recovered."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click
import msgspec

from manyhands import exact_json
from manyhands.chaos.chaos_report import ChaosReport, FaultOutcome, Weights
from manyhands.chaos.fault_schedule import KINDS, ON_SERVERS, ON_TEMPLATE, Fault, Kind, schedule
from manyhands.cli.common.setting_options import BOTH_SPELLINGS, settings_options, take_settings
from manyhands.errors import UsageError
from manyhands.launcher.launch import forks_workers, script_command
from manyhands.spec.load import environment, resolve
from manyhands.trials.tuning_search import words_of

__all__ = ["chaos"]

# Settings of a run that make sense here; run directory, display and other hosts do not.
TAKEN = (
    *("max_restarts", "heartbeat_s", "hang_s", "strategy", "precision", "slices", "accumulate", "exact"),
    *("clip_norm", "workers", "servers", "threads", "elastic", "allocator", "memory_format", "plane", "timeout_s"),
    "start",
    *("bucket_bytes", "reducer", "every_steps", "every_s", "keep_last"),
)
WORKERS = 4
# The faults that we inject must not exhaust the restart budget.
MAX_RESTARTS = 1000


@click.command(context_settings={**BOTH_SPELLINGS, "allow_interspersed_args": False, "max_content_width": 110})
@click.option("--seed", type=int, default=0, help="Determines the faults, their times and targets. Default: 0.")
@click.option("--mtbf", "mtbf_s", type=float, default=10.0, help="Mean seconds between faults. Default: 10.")
@click.option("--minutes", type=float, default=1.0, help="How long to inject faults, from the first step. Default: 1.")
@click.option(
    "--faults", "kinds", metavar="KIND,...",
    help=f"Some of {', '.join(KINDS)}. Default: all that apply to this run.",
)  # fmt: skip
@click.option("--agents", type=int, default=1, help="Simulate this many hosts on this one. Default: 1.")
@click.option("--reference/--no-reference", default=True, help="Also run it without faults, and compare. Default: yes.")
@click.option(
    "--wait", "wait_s", type=float, default=300.0,
    help="Seconds that the run may take to its first step, and to its end after the faults. Default: 300.",
)  # fmt: skip
@click.option("--run-dir", "folder", type=click.Path(path_type=Path), help="Default: runs/<time>-chaos.")
@click.option("--dry-run", is_flag=True, help="Print the schedule, and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print schedule and report as one JSON document.")
@click.option("--config", "config_file", metavar="FILE", help="A TOML file of settings; see `mh config show`.")
@functools.partial(settings_options, names=TAKEN)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def chaos(
    script: str,
    arguments: tuple[str, ...],
    seed: int,
    mtbf_s: float,
    minutes: float,
    kinds: str | None,
    agents: int,
    reference: bool,
    wait_s: float,
    folder: Path | None,
    dry_run: bool,
    as_json: bool,
    config_file: str | None,
    module: bool,
    **options: Any,
) -> int:
    """Run SCRIPT as an elastic run, inject random faults, and report the outcome of each.

    Faults: kill (SIGKILL to a worker), stop (SIGSTOP), hang (a deadlock that holds the interpreter lock), slow (the
    worker is stopped half of the time), coordinator (SIGKILL), disk (no worker can write to files), agent (SIGKILL to
    one that is not the first, and so to its workers; another one starts), kill-server and stop-server (a parameter
    server, with --servers), kill-template and stop-template (the process that workers are forked from). By default 4
    workers, elastic 1:4; with --agents, -n is per agent.
    The script runs to its end, twice: it should take about as long as faults are injected. Exit code 0 if the run
    recovered from every fault and ended with the weights of the run without faults (asynchronous servers: at the same
    step), else 1.
    """
    command = script_command(script, arguments, is_module=module)
    _check(mtbf_s, minutes, wait_s)
    settings = _completed(take_settings(options), agents)
    max_restarts = settings.pop("max_restarts")
    resolved = resolve(flags=settings, config_file=config_file)
    assert resolved.spec.launch.elastic is not None
    workers, servers = resolved.spec.launch.elastic[1], resolved.spec.num_servers
    chosen = _kinds(kinds, agents, servers, forks=forks_workers(resolved, environment()))
    faults = schedule(seed, mtbf_s=mtbf_s, minutes=minutes, workers=workers, servers=servers, kinds=chosen)
    if dry_run:
        click.echo(exact_json.encode(faults, indent=2) if as_json else _listed(faults))
        return 0
    from manyhands.chaos.chaos_run import Chaos, play

    home = folder or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-chaos"
    call = ["-m", command.target] if module else [command.target]
    config = ["--config", config_file] if config_file else []
    asked = Chaos(
        words=[*config, *words_of(settings), *call, *arguments],
        folder=home,
        max_restarts=max_restarts,
        agents=agents,
        agent_words=words_of({name: settings[name] for name in ("workers", "threads") if name in settings}),
        faults=faults,
        minutes=minutes,
        wait_s=wait_s,
        reference=reference,
    )
    report = play(asked, functools.partial(click.echo, err=True))
    document = _document(faults, report, home)
    (home / "report.json").write_bytes(document)
    title = f"seed {seed}, a fault every {mtbf_s:g} s for {minutes:g} min, {_size(workers, servers)}"
    click.echo(document if as_json else _text(report, title, home))
    return 0 if report.passed else 1


def _size(workers: int, servers: int) -> str:
    return f"up to {workers} workers" + (f", {servers} servers" if servers else "")


def _completed(settings: dict[str, Any], agents: int) -> dict[str, Any]:
    """The settings with the defaults of `mh chaos`."""
    if agents < 1:
        raise UsageError(f"--agents is {agents}, but must be at least 1.", where="--agents", fix=["--agents 2"])
    workers = settings.get("workers", WORKERS)
    defaults = {"max_restarts": MAX_RESTARTS, "workers": workers, "elastic": f"1:{agents * workers}"}
    return {**defaults, **settings}


def _kinds(text: str | None, agents: int, servers: int, *, forks: bool) -> list[Kind]:
    if agents > 1 and servers:
        raise UsageError("Faults on parameter servers need a run with one agent.", where="--agents", fix=["--agents 1"])
    has = {"agent": agents > 1, **dict.fromkeys(ON_SERVERS, servers > 0), **dict.fromkeys(ON_TEMPLATE, forks)}
    possible = [kind for kind in KINDS if has.get(kind, True)]
    if text is None:
        return possible
    asked = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in asked if word not in get_args(Kind)]
    if unknown or not asked:
        what = f"There is no fault {', '.join(unknown)}" if unknown else "--faults names no fault"
        raise UsageError(f"{what}; faults are {', '.join(KINDS)}.", where="--faults", fix=["--faults kill,stop"])
    if "agent" in asked and agents == 1:
        raise UsageError(
            "The first agent of a run is its launcher, and the run ends with it.", where="--faults", fix=["--agents 2"]
        )
    if not servers and (no_target := [kind for kind in ON_SERVERS if kind in asked]):
        raise UsageError(
            f"{no_target[0]} needs a server, but this run has none.", where="--faults", fix=["--servers 2"]
        )
    if not forks and (no_target := [kind for kind in ON_TEMPLATE if kind in asked]):
        raise UsageError(
            f"{no_target[0]} needs workers that are forked from a template, but these are spawned.",
            where="--faults",
            fix=["--start auto, on a host without accelerators"],
        )
    return [kind for kind in possible if kind in asked]


def _check(mtbf_s: float, minutes: float, wait_s: float) -> None:
    for flag, value, example in (("--mtbf", mtbf_s, 10), ("--minutes", minutes, 1), ("--wait", wait_s, 300)):
        if not (0 < value < 1e6) or math.isnan(value):
            raise UsageError(
                f"{flag} is {value:g}, but must be above 0 and below a million.", where=flag, fix=[f"{flag} {example}"]
            )


def _listed(faults: Sequence[Fault]) -> str:
    rows = [f"{one.number:>3}  {one.at_s:8.2f} s  {one.kind:<11}  {_where(one)}".rstrip() for one in faults]
    return "\n".join(rows) if rows else "No fault is scheduled in this time."


def _where(fault: Fault) -> str:
    if fault.kind in ON_SERVERS:
        return f"server {fault.slot}"
    return "" if fault.slot is None or fault.kind == "agent" else f"worker {fault.slot}"


def _document(faults: Sequence[Fault], report: ChaosReport, home: Path) -> bytes:
    facts = {"passed": report.passed, "folder": str(home), "faults": faults, **msgspec.structs.asdict(report)}
    return exact_json.encode(facts, indent=2)


def _text(report: ChaosReport, title: str, home: Path) -> str:
    rows = [("", "at", "fault", "detected", "recovered", "steps lost", ""), *map(_cells, report.outcomes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([title, *table, "", *_findings(report), f"everything is in {home}"])


def _cells(one: FaultOutcome) -> tuple[str, ...]:
    recovered = "skipped" if one.skipped else _seconds(one.recovered_s, "never")
    fault = one.kind if one.who == one.kind else f"{one.kind} {one.who}"
    lost = "" if one.skipped else str(one.steps_lost)
    return str(one.number), f"{one.at_s:.1f} s", fault, _seconds(one.detected_s, "-"), recovered, lost, one.note


def _seconds(value: float | None, without: str) -> str:
    return without if value is None else f"{value:.2f} s"


def _findings(report: ChaosReport) -> list[str]:
    injected = [one for one in report.outcomes if not one.skipped]
    ledger = report.ledger
    share = f", {report.goodput:.0%} of the run without faults in equal time" if report.goodput is not None else ""
    unrecorded = f" ({ledger.unrecorded} inferred from the steps around them)" if ledger.unrecorded else ""
    lines = [
        f"faults: {len(injected)} of {report.scheduled} injected{_why_fewer(report)}, "
        f"{sum(one.is_bad for one in injected)} not recovered from; the run ended with exit code {report.exit_code}",
        f"steps: {report.steps} in {report.seconds:.1f} s{share}; {report.recovering_s:.1f} s in recovery",
        f"ledger: steps 1 to {ledger.last_step} committed once each{unrecorded} over {ledger.generations} generations; "
        f"{ledger.steps_lost} rolled back, samples lost {ledger.samples_lost}, repeated {ledger.samples_repeated}"
        if not ledger.problems
        else "ledger: " + "; ".join(ledger.problems),
    ]
    if report.weights is not None:
        compared = _compared(report.weights, report.exact) if report.expects_equal else _reached(report)
        lines.append(compared)
    return [*lines, "passed" if report.passed else "FAILED"]


def _why_fewer(report: ChaosReport) -> str:
    skipped, late = sum(one.skipped for one in report.outcomes), report.scheduled - len(report.outcomes)
    reasons = [f"{skipped} had no target"] * bool(skipped) + [f"the run ended before {late}"] * bool(late)
    return f" ({', '.join(reasons)})" if reasons else ""


def _compared(weights: Weights, exact: bool) -> str:
    promise = "" if exact else "; only exact=True promises that: --exact"
    if weights.equal:
        return f"weights: all {weights.tensors} tensors equal those of the run without faults, bit for bit{promise}"
    if not weights.same_step:
        return _other_step(weights)
    names = ", ".join(weights.different[:3]) + (", ..." if len(weights.different) > 3 else "")
    return f"weights: {len(weights.different)} of {weights.tensors} tensors DIFFER ({names}){promise}"


def _reached(report: ChaosReport) -> str:
    assert report.weights is not None
    if not report.weights.same_step:
        return _other_step(report.weights)
    found = "equal" if report.weights.equal else "different"
    return (
        f"weights: {found} at step {report.weights.step}; with mode={report.mode!r} they depend on the workers' speed"
    )


def _other_step(weights: Weights) -> str:
    return f"weights: the last saved step is {weights.step}, that of the run without faults {weights.reference_step}"
