"""`mh run`: starts workers for a script or module, with our flags or torchrun's."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from msgspec.structs import replace

from manyhands import exact_json
from manyhands.cli.common.json_display import display_for
from manyhands.cli.common.misplaced_flags import behind_the_script, notes_on_arguments
from manyhands.cli.common.setting_options import BOTH_SPELLINGS, LIFELINE_HELP, settings_options, take_settings
from manyhands.control.agent.preflight import imports_manyhands
from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.errors import UsageError
from manyhands.launcher.launch import describe, evaluate_here, launch_command, make_request, place, script_command
from manyhands.launcher.placers.shell import PlacingOptions, is_elsewhere, start_elsewhere
from manyhands.recipes import RECIPES
from manyhands.spec.flag_conflicts import check_flags
from manyhands.spec.load import (
    RESUME_VARIABLE,
    Resolved,
    environment,
    flag_name,
    nearest,
    resolve,
    torchrun_defaults,
)
from manyhands.spec.placement import IGNORED_FLAGS, TORCHRUN_FLAGS

__all__ = ["run"]

Command = TypeVar("Command", bound=Callable[..., Any])

TORCHRUN_HELP = {
    "nproc_per_node": "torchrun: workers on this host; a number, auto, cpu or gpu.",
    "nnodes": "torchrun: number of hosts; the same command runs on each.",
    "node_rank": "torchrun: number of this host, from 0.",
    "master_addr": "torchrun: address of host 0. Default: 127.0.0.1.",
    "master_port": "torchrun: port on host 0. Default: 29500.",
    "standalone": "torchrun: only this host.",
    "rdzv_backend": "torchrun: static (by --node-rank), or c10d (the coordinator assigns host numbers).",
    "rdzv_endpoint": "torchrun: HOST:PORT of the rendezvous.",
    "local_addr": "torchrun: address at which other hosts reach this one.",
}
SHORT = {"redirects": "-r", "tee": "-t"}

EXAMPLES = {
    "mh run -n 2 train.py": "two workers on this machine",
    "mh run -n 2 train.py --epochs 3": "what follows the script is passed to it",
    "mh run -n 4 --elastic 2:4 train.py": "workers may die; the others continue, and new ones join",
    "mh run -n 2 --strategy sharded train.py": "model and optimizer sharded over the workers (FSDP)",
    "mh run --run-dir runs/a -n 2 train.py": "the same command again resumes a stopped run",
    "mh run --on slurm -N 4 --insecure-data-plane train.py": "submits a job of four hosts, and shows its output",
    "mh run --hosts a,b:2 --insecure-data-plane train.py": "two hosts that ssh reaches, two workers on the second",
}
GROUPS = {
    "Workers": ("workers", "strategy", "elastic", "servers", "threads"),
    "Runs": (
        *("run_dir", "overwrite", "group_readable", "seed", "config_file", "module", "recipe", "max_restarts"),
        "grace_s",
    ),
    "Output": ("verbose", "ui", "as_json", "dry_run"),
    "Checkpoints": ("every_steps", "every_s", "keep_last", "keep_best"),
    "Hosts of a cluster": (
        *("on", "hosts", "detach", "shows", "time", "notice", "requeue", "queue", "more_queue", "account", "array"),
        *("cpus", "gpus", "memory", "setup", "extra", "code", "image", "namespace", "manifest"),
    ),
    "Several hosts": ("hosts_wanted", "listen", "join_file", "insecure_data_plane", "lifeline"),
    "Maths": ("precision", "slices", "accumulate", "exact", "clip_norm", "reducer"),
    "Monitoring": (
        *("heartbeat_s", "hang_s", "balance", "straggler_factor", "straggler_steps", "check_every", "audit"),
        "timeout_s",
    ),
    "Speed": ("start", "allocator", "memory_format", "manage_gc", "plane", "bucket_bytes"),
}
"""Options by their heading in --help; the rest are torchrun's."""


class RunCommand(click.Command):
    """Prints help in groups, with examples; suggests the right order if a flag of the script comes before it."""

    examples = EXAMPLES

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            meant = behind_the_script(words, flags_of(self))
            if meant is None:
                raise
            # Without their dashes: click counts those as letters that agree.
            word = error.option_name.lstrip("-")
            close = [flag for flag in error.possibilities or () if flag != "--help" and nearest(word, [flag[2:]])][:1]
            raise UsageError(
                f"mh run has no flag {error.option_name}. Flags of the script go after it.",
                where="the command line",
                fix=[*(f"{flag}, if that was meant" for flag in close), shlex.join(["mh", "run", *meant])],
            ) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            formatter.write_dl(list(EXAMPLES.items()), col_max=42)
        named = {option.name: option for option in self.get_params(ctx) if isinstance(option, click.Option)}
        grouped = {name for names in GROUPS.values() for name in names}
        rest = [name for name in named if name is not None and name not in grouped]
        for heading, names in {**GROUPS, "torchrun's flags, and help": tuple(rest)}.items():
            records = [record for name in names if (record := named[name].get_help_record(ctx)) is not None]
            with formatter.section(heading):
                formatter.write_dl(records)


def flags_of(command: click.Command) -> set[str]:
    options = [one for one in command.params if isinstance(one, click.Option)]
    return {flag for option in options for flag in (*option.opts, *option.secondary_opts)} | {"--help"}


def torchrun_options(command: Command) -> Command:
    for name in reversed(TORCHRUN_FLAGS):
        text = TORCHRUN_HELP.get(name) or f"torchrun: accepted and ignored: {IGNORED_FLAGS[name]}."
        names = [*([SHORT[name]] if name in SHORT else []), flag_name(name), name]
        kind: dict[str, Any] = {"is_flag": True} if name == "standalone" else {"type": str, "metavar": "TEXT"}
        command = click.option(*names, **kind, default=None, help=text)(command)
    return command


@click.command(
    cls=RunCommand, context_settings={**BOTH_SPELLINGS, "allow_interspersed_args": False, "max_content_width": 110}
)
@click.option("--config", "config_file", metavar="FILE", help="A TOML file of settings; see `mh config show`.")
@settings_options
@click.option("-m", "--module", is_flag=True, default=None, help="SCRIPT is a module, as in `python -m`.")
@click.option("--recipe", metavar="NAME", help=f"A built-in training instead of SCRIPT: {' or '.join(RECIPES)}.")
@click.option("--join-file", metavar="PATH", help="The join file to write for other hosts.")
@click.option("--lifeline", is_flag=True, help=LIFELINE_HELP)
@click.option("--dry-run", is_flag=True, help="Print hosts, ranks, environment and command, and start nothing.")
@click.option("--print", "shows", is_flag=True, help="With --on or --hosts: print the script or manifest only.")
@click.option("--detach", is_flag=True, help="With --on or --hosts: return as soon as the run is submitted or started.")
@click.option("--json", "as_json", is_flag=True, help="Events, output and failures as JSON lines on stdout.")
@click.option("--no-python", is_flag=True, default=None, help="torchrun: SCRIPT is an executable; it has to be Python.")
@torchrun_options
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    script: str | None,
    arguments: tuple[str, ...],
    config_file: str | None,
    module: bool | None,
    recipe: str | None,
    no_python: bool | None,
    join_file: str | None,
    lifeline: bool,
    dry_run: bool,
    shows: bool,
    detach: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Train: start workers for SCRIPT, or with -m for a module; arguments after it are passed to the script.

    With --recipe, arguments after `--` are passed to the recipe. The output of the chief is shown; that of the other
    workers goes to the logs in the run directory. Further hosts join with `mh agent`, or run the same command with
    torchrun's flags.
    """
    environ = environment()
    defaults = torchrun_defaults(environ)
    torchrun = _torchrun_flags(options, defaults)
    module, no_python = (
        _is_set(given, defaults.get(name)) for given, name in ((module, "module"), (no_python, "no_python"))
    )
    if recipe is not None:
        script, arguments, module, no_python = *_recipe(recipe, script, arguments), True, False
    if script is None:
        raise UsageError("Neither SCRIPT nor --recipe was given.", fix=["mh run train.py", "mh run --recipe digits"])
    command = _program(script, arguments) if no_python else script_command(script, arguments, is_module=module)
    settings = take_settings(options)
    if "max_restarts" in defaults:
        settings.setdefault("max_restarts", _whole(defaults["max_restarts"], "PET_MAX_RESTARTS"))
    resolved = resolve(flags=settings, environ=environ, config_file=config_file)
    if is_elsewhere(resolved, environ):
        _check_elsewhere(resolved, torchrun, join_file)
        return start_elsewhere(
            resolved, command, environ, PlacingOptions(shows, dry_run, detach, as_json), _resume(sys.argv[1:], settings)
        )
    if shows or detach:
        flag = "--print" if shows else "--detach"
        raise UsageError(f"{flag} is for runs whose agents are placed elsewhere.", fix=["--on slurm", "--hosts a,b"])
    placement = place(resolved, environ, torchrun=torchrun)
    check_flags(resolved, placement)
    if recipe is None and (source := _text_of(command)) is not None:
        start = ["-m", script] if module else [script]
        notes = notes_on_arguments(start, arguments, source, flags_of(run))
        placement = replace(placement, notes=[*placement.notes, *notes])
    request = make_request(
        resolved,
        command,
        placement,
        environ,
        # Only a flag is final: the script's constructor arguments override the environment and the config file.
        run_dir=settings.get("run_dir"),
        resume=environ.get(RESUME_VARIABLE) or _resume(sys.argv[1:], settings),
        torchrun=bool(torchrun),
        join_file=join_file,
        lifeline=lifeline,
    )
    if dry_run:
        _print_plan(describe(request, placement, environ), as_json)
        return 0
    if placement.evaluates and imports_manyhands(command):  # one that does not would train here, alone
        evaluate_here(command, resolved.flags(), request.environment, as_json=as_json)
    return launch_command(request, placement, display_for(resolved, environ, as_json=as_json))


def _check_elsewhere(resolved: Resolved, torchrun: Mapping[str, Any], join_file: str | None) -> None:
    given = [flag_name(name) for name in torchrun] + (["--join-file"] if join_file is not None else [])
    if given:
        placer = resolved.spec.cluster.placer
        raise UsageError(
            f"{given[0]} says how hosts find each other, which {placer} does here.",
            where="the command line",
            fix=[f"without {given[0]}", "--on here"],
        )


def _text_of(command: WorkerCommand) -> str | None:
    """The source of the script or module, if it is one file that can be found without importing anything."""
    path = Path(command.target)
    if command.kind == "module":
        folder = Path(*command.target.split("."))
        path = next((one for one in (folder.with_suffix(".py"), folder / "__main__.py") if one.is_file()), folder)
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _recipe(name: str, script: str | None, arguments: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The recipe's module and its arguments: those that `mh run` did not take."""
    if name not in RECIPES:
        raise UsageError(f"There is no recipe {name!r}.", where="--recipe", fix=[f"--recipe {one}" for one in RECIPES])
    return f"manyhands.recipes.{name}", (*([script] if script is not None else []), *arguments)


def _torchrun_flags(options: Mapping[str, Any], defaults: Mapping[str, str]) -> dict[str, Any]:
    """torchrun's flags that were given, on the command line or as PET_<FLAG>."""
    given = {name: options[name] for name in TORCHRUN_FLAGS if options[name] not in (None, False)}
    given = {name: defaults[name] for name in TORCHRUN_FLAGS if name in defaults} | given
    if "standalone" in given and not _is_set(None, str(given["standalone"])):
        del given["standalone"]
    return given


def _is_set(given: bool | None, text: str | None) -> bool:
    return bool(given) or (text or "").lower() in ("1", "true", "yes", "on")


def _whole(text: str, name: str) -> int:
    if not text.isdigit():
        raise UsageError(f"{name} is {text!r}, but must be a whole number.", where="the environment", fix=[f"{name}=0"])
    return int(text)


def _program(program: str, arguments: Sequence[str]) -> WorkerCommand:
    """--no-python: workers are Python processes, so the program has to be Python or a Python script."""
    if re.fullmatch(r"python[\d.]*", os.path.basename(program)):
        words = [word for word in arguments if word != "-u"]
        if words[:1] == ["-m"] and len(words) > 1:
            return script_command(words[1], words[2:], is_module=True)
        if words and not words[0].startswith("-"):
            return script_command(words[0], words[1:])
    elif os.path.isfile(program):
        with open(program, "rb") as file:
            first = file.readline(256)
        if program.endswith(".py") or (first.startswith(b"#!") and b"python" in first):
            return script_command(program, arguments)
    raise UsageError(f"{program} is not a Python script; workers are Python processes.", where="--no-python")


def _resume(words: Sequence[str], settings: Mapping[str, Any]) -> str:
    """The command line that resumes this run in its directory."""
    position = words.index("run") + 1 if "run" in words else 0
    directory = [] if "run_dir" in settings else ["--run-dir", "{run_dir}"]
    again = [word for word in words[position:] if word != "--overwrite"]
    return " ".join(["mh run", *directory, shlex.join(again)])


def _print_plan(plan: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(exact_json.encode(plan, indent=2))
        return
    for name, value in plan.items():
        if isinstance(value, dict):
            click.echo(f"{name}:")
            for key, inner in value.items():
                click.echo(f"  {key} = {inner if isinstance(inner, str) else json.dumps(inner)}")
        elif isinstance(value, str):
            click.echo(f"{name}: {value}")
        else:
            click.echo(f"{name}: {'-' if value is None else json.dumps(value)}")
