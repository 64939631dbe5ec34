"""`mh plan`: shows how a script's model would be split over workers, and the memory that each needs."""

from __future__ import annotations

from collections.abc import Sequence

import click

from manyhands import exact_json
from manyhands.cli.common.setting_options import BOTH_SPELLINGS
from manyhands.errors import UsageError
from manyhands.launcher.launch import script_command
from manyhands.observe.event_text import PHASES_OF_MEMORY, size
from manyhands.planner.measure.memory_plan import ModelPlan
from manyhands.planner.measure.plan_request import ask_for_plan

__all__ = ["plan"]


@click.group()
def plan() -> None:
    """Show how a script's model would be split over workers, without starting a run."""


@plan.command(context_settings={**BOTH_SPELLINGS, "allow_interspersed_args": False, "max_content_width": 110})
@click.option("-n", "--workers", type=int, default=0, help="How many workers. Default: as many as the script asks for.")
@click.option("--strategy", default="", help="Overrides the script's: tensor, pipeline, sharded, mirrored ...")
@click.option("--wait", "wait_s", type=float, default=300.0, help="Seconds that the script may take. Default: 300.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON document.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def show(
    script: str, arguments: tuple[str, ...], workers: int, strategy: str, wait_s: float, as_json: bool, module: bool
) -> None:
    """Print every layer of SCRIPT's model with its split and its bytes, and the memory that each worker needs.

    Runs SCRIPT in one process up to its `fit`, reads one slice of its data, and ends there.
    """
    if workers < 0:
        raise UsageError(f"-n is {workers}, but must be at least 1.", where="-n", fix=["-n 2"])
    found = ask_for_plan(script_command(script, arguments, is_module=module), strategy, workers, wait_s)
    click.echo(exact_json.encode(found, indent=2) if as_json else _text(found))


def _text(plan: ModelPlan) -> str:
    staged = any(layer.stage is not None for layer in plan.layers)
    head = ("layer", "class", "split", *(("stage",) if staged else ()), "bytes", "per worker", "why")
    rows = [
        (
            layer.name,
            layer.kind,
            layer.split,
            *((str(layer.stage if layer.stage is not None else 0),) if staged else ()),
            size(layer.num_bytes),
            size(layer.bytes_per_worker),
            layer.why,
        )
        for layer in plan.layers
    ]
    sizes = ("weights", "gradients", "states", "activations", "base", "start", "step", "save")
    memory_head = ("worker", "pipeline", "data", "tensor", *sizes, "peak", "when")
    memory = [
        (
            *(str(one) for one in (worker.rank, worker.pipeline, worker.data, worker.tensor)),
            *(size(getattr(worker, one)) for one in sizes),
            size(worker.total),
            PHASES_OF_MEMORY[worker.largest],
        )
        for worker in plan.memory
    ]
    parts = [f"{plan.strategy}, {plan.workers} workers", _table(head, rows), _table(memory_head, memory), plan.schedule]
    return "\n\n".join(part for part in parts if part)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows])
    return "\n".join(line.rstrip() for line in lines)
