"""`mh evaluate`: evaluates the checkpoints of a run beside its training, with the script's own trainer and data."""

from __future__ import annotations

import click

from manyhands.launcher.launch import evaluate_here, script_command
from manyhands.observe.run_status import find_run
from manyhands.spec.load import environment

__all__ = ["evaluate"]


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--threads", type=click.IntRange(min=1), help="Threads. Default: the cores that the training leaves.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.option("--json", "as_json", is_flag=True, help="Results as JSON lines on stdout, one per checkpoint.")
@click.argument("run")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def evaluate(
    run: str, script: str, arguments: tuple[str, ...], threads: int | None, module: bool, as_json: bool
) -> None:
    """Evaluate each checkpoint of RUN on the validation data of SCRIPT, beside the training and until its end.

    SCRIPT and the arguments after it are those of the training: its fit(..., validation=...) trains nothing here. The
    results go to the run's record, where `mh status` shows them. A finished run's checkpoints are evaluated, too.
    """
    command = script_command(script, arguments, is_module=module)
    flags = {"run.run_dir": str(find_run(run).absolute()), "launch.threads": threads}
    given = {name: value for name, value in flags.items() if value is not None}
    evaluate_here(command, given, environment(), as_json=as_json)
