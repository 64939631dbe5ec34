"""`mh`: finds the command, runs it, and turns exceptions into a message and an exit code.

Commands are imported when they are called, so `mh --help` is quick and loads no torch. A user error prints two or three
lines; a traceback means a bug in manyhands (exit 70). Start reading at `main`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NoReturn

import click

from manyhands.cli.common.misplaced_flags import script_in
from manyhands.errors import EnvironmentProblem, ManyhandsError, UsageError
from manyhands.private_files import owner_and_mode
from manyhands.spec.load import environment, nearest
from manyhands.spec.undecodable_names import check_name
from manyhands.supported import check_system

__all__ = ["COMMANDS", "cli", "main", "report"]

COMMANDS = {
    "demo": "Train on handwritten digits in ten modes, compare them, and survive a kill.",
    "run": "Train: start workers for a script or module on this host.",
    "tune": "Find the fastest settings for a script on this machine, by measurement.",
    "profile": "Find what holds a run back: data, the exchange between workers, or computation.",
    "plan": "Show how a script's model would be split over workers, and the memory that each needs.",
    "graph": "Draw the data-flow graph of a script's model.",
    "check": "Compare a script's result under every layout with that of one process.",
    "chaos": "Inject random faults into a script's run, and report how it recovered.",
    "evaluate": "Evaluate a run's checkpoints beside its training.",
    "agent": "Add this host to a run that waits for more hosts.",
    "stop": "Ask a live run to commit a checkpoint and end.",
    "scale": "Ask a live elastic run for more or fewer workers.",
    "hosts": "Show who lends hosts to a run; ask for more, or give one back.",
    "status": "Show what a run is doing, or did.",
    "logs": "Show the output of a run's workers.",
    "ckpt": "List, verify and export checkpoints.",
    "cluster": "Serve a queue of jobs on this machine, or simulate one.",
    "submit": "Put a script into the queue, to be run with as many workers as the cluster gives it.",
    "queue": "Show the jobs of the queue, and why each has the workers that it has.",
    "cancel": "Take a job out of the queue; a running one commits a checkpoint and ends.",
    "config": "Show settings with their origin; the schema of config files.",
    "doctor": "Check that this machine can train.",
    "keygen": "Make a key file for runs over several hosts.",
}
"""Every command with its one-line help; each is a function in the module of the same name."""

FOLDERS = {
    "start": ("demo", "run", "chaos", "evaluate", "agent"),
    "explore": ("tune", "profile", "plan", "graph", "check"),
    "runs": ("stop", "scale", "hosts", "status", "logs", "ckpt"),
    "cluster": ("cluster", "submit", "queue", "cancel"),
    "machine": ("config", "doctor", "keygen"),
}
"""Commands by subfolder."""

BUG = "This is a bug in manyhands. Please report it with the traceback above, the command and `mh doctor --json`."


class LazyGroup(click.Group):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        check_system()
        folder = next(name for name, commands in FOLDERS.items() if cmd_name in commands)
        command = getattr(importlib.import_module(f"manyhands.cli.{folder}.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for word in args:
            check_name(word, "On the command line,")
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption:
            if script_in(words) is not None:
                raise _needs_run(f"{words[0]} is not a flag of mh, and no command was given", words) from None
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and script_in(args[:1]) is not None:
            raise _needs_run(f"{args[0]} is a script, and no command was given", args)
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            meant = [f"Did you mean {name}?" for name in nearest(args[0], COMMANDS)]
            ctx.fail(" ".join([f"No such command {args[0]!r}.", *meant]))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _needs_run(what: str, words: Sequence[str]) -> UsageError:
    return UsageError(f"{what}.", where="the command line", fix=[shlex.join(["mh", "run", *words])])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="manyhands", prog_name="manyhands")
def cli() -> None:
    """Train one PyTorch model with any number of workers.

    Exit codes: 0 done, 1 the training code failed, 2 usage or config, 3 environment, 4 gave up after the restart
    budget, 70 a bug in manyhands, 75 preempted with a committed checkpoint, 130 and 143 stopped by the user without
    one.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one `mh` command and end the process with its exit code."""
    try:
        code = cli.main(args=arguments, prog_name="mh", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe closed it (`mh logs | head`): there is no output to write to. click also exits with 1.
        sys.stdout = None
        code = 1
    except BaseException as error:
        code = report(error, sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def report(error: BaseException, stream: IO[str]) -> int:
    """Print the error in the form that fits its kind; return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return 130
    if isinstance(error, ManyhandsError) and type(error) is not ManyhandsError:
        _print(stream, type(error).__name__, str(error))
        return error.exit_code
    if isinstance(error, click.ClickException):
        help_of = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "mh"
        _print(stream, "UsageError", f"{error.format_message()}\n  try: {help_of} --help")
        return 2
    if isinstance(error, PermissionError) and error.filename is not None:
        _print(stream, "EnvironmentProblem", str(_denied(error)))
        return EnvironmentProblem.exit_code
    traceback.print_exception(error, file=stream)
    print(BUG, file=stream)
    return 70


def _denied(error: PermissionError) -> EnvironmentProblem:
    """The error for another user's file, usually of their run: names its owner and mode."""
    denied = Path(os.fsdecode(error.filename)).absolute()
    for path in (denied, *denied.parents):  # the closest one that this user may stat
        with contextlib.suppress(OSError):
            owner, mode = owner_and_mode(path)
            break
    return EnvironmentProblem(
        f"This user may not access {denied}: {path} belongs to {owner} and has mode {mode}.",
        fix=[
            f"as {owner}: the same command",
            f"as {owner}: mh run --group-readable ..., for a run that the directory's group may read",
            "one of your runs; a run is private to the user who started it",
        ],
    )


def _print(stream: IO[str], name: str, text: str) -> None:
    styled = click.style(name, fg="red", bold=True) if _wants_color(stream) else name
    print(f"{styled}: {text}", file=stream, flush=True)


def _wants_color(stream: IO[str]) -> bool:
    environ = environment()
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or (stream.isatty() and not environ.get("CI"))


if __name__ == "__main__":
    main()
