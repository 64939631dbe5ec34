"""`mh graph`: draws the data-flow graph of a script's model."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from manyhands import exact_json
from manyhands.cli.common.setting_options import BOTH_SPELLINGS
from manyhands.errors import EnvironmentProblem, UsageError
from manyhands.launcher.launch import script_command

__all__ = ["graph"]

FORMATS = (".svg", ".html", ".dot")
EXAMPLES = """
\b
Examples:
  mh graph train.py -o graph.svg                       a picture, folded so that it can be read
  mh graph train.py -o graph.html                      modules that fold and unfold, in a browser
  mh graph train.py --strategy pipeline -n 2 -o p.svg  coloured by stage
  mh graph train.py --tensorboard logs                 for tensorboard --logdir logs
"""


@click.command(context_settings={**BOTH_SPELLINGS, "max_content_width": 110}, epilog=EXAMPLES)
@click.option("-o", "--output", metavar="FILE", help="What to write: a .svg, .html or .dot.")
@click.option("--tensorboard", "log_dir", metavar="DIR", help="Write an event file for TensorBoard's graph tab.")
@click.option("--depth", type=int, help="Fold modules that are inside so many others. Default: what can be read.")
@click.option("--modules", "modules_only", is_flag=True, help="Show calls of modules, without torch.export.")
@click.option("-n", "--workers", type=int, default=0, help="How many workers. Default: as many as the script asks for.")
@click.option("--strategy", default="", help="Overrides the script's: tensor, pipeline, sharded, mirrored ...")
@click.option("--wait", "wait_s", type=float, default=300.0, help="Seconds that the script may take. Default: 300.")
@click.option("--json", "as_json", is_flag=True, help="Print the graph as one JSON document.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def graph(
    script: str,
    arguments: tuple[str, ...],
    output: str | None,
    log_dir: str | None,
    depth: int | None,
    modules_only: bool,
    workers: int,
    strategy: str,
    wait_s: float,
    as_json: bool,
    module: bool,
) -> None:
    """Draw the data-flow graph of SCRIPT's model: operations, tensors with shapes and bytes, FLOPs and measured time.

    Runs SCRIPT in one process until it calls its model for the first time, and ends there. The model is exported by
    torch.export; if it cannot be, calls of its modules are recorded instead, and the graph says so. Colours: stages of
    a pipeline, layers that are divided over workers, or that each worker has whole. Arguments of SCRIPT that begin with
    a dash follow `--`.
    """
    for name, value, least in (("-n", workers, 0), ("--depth", depth, 0)):
        if value is not None and value < least:
            raise UsageError(f"{name} is {value}, but must not be below {least}.", where=name, fix=[f"{name} 2"])
    command = script_command(script, arguments, is_module=module)
    _check_output(output, log_dir, as_json)
    # Loaded only now: it takes torch, and a second.
    from manyhands.dataflow.graph_request import ask_for_graph
    from manyhands.dataflow.tensorboard_graph import write_graph

    found = ask_for_graph(command, strategy, workers, wait_s, modules_only=modules_only)
    if output is not None:
        from manyhands.dataflow.picture import picture_of

        Path(output).write_text(picture_of(found, Path(output).suffix, depth), encoding="utf-8")
    event_file = write_graph(found, Path(log_dir)) if log_dir is not None else None
    if as_json:
        facts = {**msgspec.to_builtins(found), "flops": found.flops, "seconds": found.seconds}
        click.echo(exact_json.encode(facts, indent=2))
        return
    from manyhands.dataflow.svg_picture import summary

    for line in [f"{found.model}, {summary(found)}", *found.notes]:
        click.echo(line)
    for path in (output, str(event_file) if event_file is not None else None):
        if path is not None:
            click.echo(f"written to {path}")


def _check_output(output: str | None, log_dir: str | None, as_json: bool) -> None:
    """Before the script runs: an error at the end would waste its time."""
    if output is None:
        if log_dir is None and not as_json:
            raise UsageError(
                "Nothing says where the graph goes.",
                where="-o",
                fix=["-o graph.svg", "-o graph.html", "--tensorboard logs", "--json"],
            )
        return
    if Path(output).suffix not in FORMATS:
        raise UsageError(
            f"{output} does not end with {', '.join(FORMATS)}, which says what to write.",
            where="-o",
            fix=[f"-o {Path(output).stem or 'graph'}{ending}" for ending in FORMATS],
        )
    folder = os.path.dirname(os.path.realpath(output))
    if not os.access(folder, os.W_OK) or os.path.isdir(output):
        raise EnvironmentProblem(f"{output} cannot be written.", where="-o", fix=["-o graph.svg"])
