"""`mh demo`: the same network on digits in ten modes, compared with one process; then a kill, a stop and a resume.

All runs are real: launched in this process one after the other, as `mh run` does it, with their records below the
run directory. Start reading at `demo`, then `demo_modes.run_mode` and `demo_kill.kill_and_resume`.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import click

from manyhands import exact_json
from manyhands.cli.start.demo_kill import kill_and_resume, summary
from manyhands.cli.start.demo_modes import Interrupted, ModeResult, run_mode
from manyhands.cli.start.demo_texts import Texts, table_line, texts_for
from manyhands.control.processes.template_process import shared_template
from manyhands.errors import EnvironmentProblem, UsageError
from manyhands.launcher.launch import default_environment
from manyhands.observe.terminal import is_terminal
from manyhands.recipes.every_mode import MODES, Mode, command_of
from manyhands.spec.load import environment

__all__ = ["demo"]

GO_ON_WITH = "tensor"
"""The mode in the commands at the end."""
# Characters; the first words may be Chinese, which take two columns each.
WRAP_AT = 70


@click.command()
@click.option("--only", type=click.Choice(["modes", "kill"]), help="Only the comparison of modes, or only the kill.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Directory of the runs. Default: runs/<time>-demo.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def demo(only: Literal["modes", "kill"] | None, run_dir: Path | None, as_json: bool) -> int:
    """Train one small network on handwritten digits in ten modes, and survive a kill.

    Prints a line for each mode: what it divides among its workers, rows per second, memory and exchanged bytes per
    worker, the distance of its weights from those of one process, and its accuracy. Then two workers train, one is
    killed, the run is stopped and resumed on one worker. Exit code 1 if a mode fails or deviates. In Chinese where
    LC_ALL, LC_MESSAGES or LANG begins with zh.
    """
    started, home = time.monotonic(), run_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-demo"
    texts = texts_for(environment(), sys.stdout.encoding)
    _make_home(home, texts)
    talk = _Talk(texts, as_json)
    report: dict[str, Any] = {"run_dir": str(home), "cores": len(os.sched_getaffinity(0))}
    try:
        with shared_template(default_environment(threads=1)):
            if only != "kill":
                results = _show_modes(home, talk)
                report["modes"] = results
            if only != "modes":
                talk.where = "kill"
                report["kill"] = kill_and_resume(home / "kill", talk, as_json=as_json)
    except (Interrupted, KeyboardInterrupt) as stopped:
        talk.end_progress()
        talk.warn(talk.texts.interrupted.format(where=talk.place(), home=home))
        return stopped.exit_code if isinstance(stopped, Interrupted) else 130
    report |= {"seconds": round(time.monotonic() - started, 1), "cpu_seconds": round(_cpu_s(), 1)}
    if as_json:
        click.echo(exact_json.encode(report))
    else:
        _conclude(report, talk.texts, home)
    return 1 if any(result.is_wrong for result in report.get("modes", ())) else 0


def _make_home(home: Path, texts: Texts) -> None:
    """So that what cannot be written is known before anything is started."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        probe = home / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise EnvironmentProblem(
            texts.cannot_write.format(home=home, why=error.strerror), fix=[texts.writable]
        ) from error
    if any(home.iterdir()):
        raise UsageError(texts.not_empty.format(home=home), where="--run-dir", fix=[f"--run-dir {home}-2"])


class _Talk:
    """Prints the narration, and on a terminal a line of progress that is overwritten; with --json neither."""

    def __init__(self, texts: Texts, as_json: bool) -> None:
        self.texts, self._quiet = texts, as_json
        self._moves = not as_json and is_terminal(sys.stderr) and not _is_plain()
        self._shown = False
        self.where = MODES[0].name
        """The mode that runs, or "kill"."""

    def place(self) -> str:
        if self.where != "kill":
            return self.texts.labels[self.where]
        return self.texts.kill_part

    def say(self, line: str) -> None:
        """Between two runs."""
        if not self._quiet:
            self.end_progress()
            click.secho(line, bold=True, err=True)

    def warn(self, line: str) -> None:
        click.secho(line, bold=True, err=True)

    def print(self, line: str) -> None:
        """A part of the result."""
        if not self._quiet:
            self.end_progress()
            click.echo(line)

    def run_line(self, line: str) -> None:
        """What a run reports."""
        if not self._quiet:
            self.end_progress()
            click.echo(line, err=True)

    def progress_line(self, line: str) -> None:
        self._move(line)

    def progress(self, mode: Mode) -> Callable[[int, int], None]:
        self.where = mode.name
        self._move(f"{self.texts.labels[mode.name]} ...")
        return lambda step, total: self._move(f"{self.texts.labels[mode.name]} {step}/{total}")

    def _move(self, line: str) -> None:
        if self._moves:
            click.echo(f"\r\x1b[K{line}", nl=False, err=True)
            self._shown = True

    def end_progress(self) -> None:
        if self._shown:
            click.echo("\r\x1b[K", nl=False, err=True)
            self._shown = False


def _is_plain() -> bool:
    environ = environment()
    return bool(environ.get("CI")) or environ.get("TERM") == "dumb"


def _show_modes(home: Path, talk: _Talk) -> list[ModeResult]:
    texts, cores = talk.texts, len(os.sched_getaffinity(0))
    talk.say(texts.title.format(home=home))
    if cores == 1:
        talk.say(texts.one_core)
    talk.print(table_line(texts.columns))
    results = []
    for mode in MODES:
        results.append(run_mode(mode, home, talk.progress(mode)))
        talk.print(_line(results[-1], texts))
    held_out = next((result.held_out for result in results if result.held_out), 0)
    talk.print(texts.legend.format(cores=_cores(cores, texts), held_out=held_out))
    return results


def _cores(count: int, texts: Texts) -> str:
    return texts.core if count == 1 else texts.cores.format(cores=count)


def _line(result: ModeResult, texts: Texts) -> str:
    label, divided = texts.labels[result.mode], texts.divided[result.mode]
    if result.not_run or result.failed:
        why = texts.not_run.format(why=result.not_run) if result.not_run else texts.failed.format(why=result.failed)
        why = fill(why, WRAP_AT, initial_indent="  ", subsequent_indent="  ")
        return f"{table_line((label, divided, *[''] * 5))}\n{why}"
    cells = (
        f"{result.rows_per_s:,.0f}" if result.rows_per_s else "?",
        f"{result.memory_bytes / 1e6:.0f}" if result.memory_bytes is not None else "?",
        f"{result.bytes_per_step / 1e3:,.0f}" if result.bytes_per_step is not None else "?",
        f"{result.distance:.0e}" if result.distance else "0" if result.distance is not None else "-",
        f"{result.accuracy:.1%}" if result.accuracy is not None else "?",
    )
    line = table_line((label, divided, *cells))
    return f"{line}\n  {texts.deviates.format(distance=cells[3])}" if result.deviates else line


def _conclude(report: dict[str, Any], texts: Texts, home: Path) -> None:
    if "kill" in report:
        click.echo(f"\n{summary(report['kill'], texts)}")
    click.echo(f"\n{texts.go_on.format(**report)}")
    (mode,) = (one for one in MODES if one.name == GO_ON_WITH)
    commands = (
        f"mh status {home / ('kill' if 'kill' in report else GO_ON_WITH)}",
        " ".join(command_of(mode)),
        "mh run -n 2 --recipe digits",
    )
    for command, note in zip(commands, texts.notes, strict=True):
        click.echo(f"  {command}\n      {note}")


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
