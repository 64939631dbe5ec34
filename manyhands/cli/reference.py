"""docs/cli.md, written from the commands themselves: `python -m manyhands.cli.reference > docs/cli.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from manyhands.cli.main import cli

__all__ = ["reference"]

INTRODUCTION = """\
# The command line

`mh` is short for `manyhands`. Results go to standard output, everything else to standard error. Every command has
`--json`. Flags may be written with `-` or `_`. `NO_COLOR`, `FORCE_COLOR` and `CI` are honoured.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the training code failed |
| 2 | usage or config |
| 3 | environment: the machine or the network cannot do it |
| 4 | gave up after the restart budget |
| 70 | a bug of ours; please report it |
| 75 | preempted, with a committed checkpoint: safe to start again |
| 130, 143 | stopped by the user without a checkpoint |

Settings come, lowest first, from defaults, `--config FILE` (or `MANYHANDS_CONFIG`), `MANYHANDS_<KEY>`, the script's own
arguments, and flags; `mh config show` gives every value with its origin. [launching.md](launching.md) tells how these
fit together. This page is written by `python -m manyhands.cli.reference`.
"""


def reference() -> str:
    return "\n".join([INTRODUCTION, *(_section(path, command) for path, command in _walk("mh", cli) if path != "mh")])


def _walk(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _walk(f"{path} {name}", inner)


def _section(path: str, command: click.Command) -> str:
    usage = " ".join([path, *command.collect_usage_pieces(click.Context(command))])
    lines = [f"## {path}", "", f"`{usage}`", "", _text(command.help), "", *_examples(command)]
    options = [option for option in command.params if isinstance(option, click.Option)]
    if options:
        lines += ["| flag | meaning |", "|---|---|", *map(_row, options), ""]
    return "\n".join(lines)


def _examples(command: click.Command) -> list[str]:
    examples = getattr(command, "examples", {})
    width = max(map(len, examples), default=0)
    lines = [f"{example.ljust(width)}   # {meaning}" for example, meaning in examples.items()]
    return ["```sh", *lines, "```", ""] if lines else []


def _row(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    choices = option.type.choices if isinstance(option.type, click.Choice) else ()
    of = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
    return f"| {names} | {_text(option.help)}{of} |"


def _text(help_text: str | None) -> str:
    return inspect.cleandoc(help_text or "").replace("|", "/").replace("<", "\\<")


if __name__ == "__main__":
    click.echo(reference(), nl=False)
