"""Command-line options for the settings of a run: one flag for each key of `RunSpec`, for every command that uses them.

Names and types come from the spec; only the help texts are here. Whether values fit together is checked where they are
declared.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar

import click

from manyhands.errors import UsageError
from manyhands.spec.load import KEYS, Key, flag_name
from manyhands.spec.strategy_names import SAME_STRATEGY, strategy_name

__all__ = ["BOTH_SPELLINGS", "HELP", "LIFELINE_HELP", "settings_options", "take_settings"]

Command = TypeVar("Command", bound=Callable[..., Any])

BOTH_SPELLINGS = {"token_normalize_func": lambda name: name.replace("_", "-")}
"""Context settings under which --run-dir and --run_dir are the same flag, as in torchrun."""

LIFELINE_HELP = "Take the end of standard input for one SIGTERM: no agent outlives what placed it."

LEVELS = {"zero1": "optimizer", "zero2": "gradients"}
SHORT = {"workers": "-n", "verbose": "-v", "hosts": "-N"}
METAVARS = {"elastic": "LEAST:MOST", "hosts": "HOSTS", "time": "H:M:S", "setup": "LINE", "extra": "OPTION"}

HELP = {
    "run_dir": "Where the run writes everything. Default: runs/<time>-<script>.",
    "overwrite": "Start over in the directory of a finished run.",
    "group_readable": "Let the directory's group read what the run writes: mh status, logs and ckpt, also for others.",
    "seed": "Determines all randomness and the data order.",
    "max_restarts": "How often a lost worker may restart the run from its last checkpoint.",
    "grace_s": "Seconds that workers get to commit a checkpoint after SIGTERM.",
    "heartbeat_s": "Elastic runs: seconds without a heartbeat after which a worker is replaced.",
    "hang_s": "Elastic runs: seconds (at least ten slow steps) without a step after which a worker shows its stack.",
    "strategy": f"How the work is distributed; {', '.join(SAME_STRATEGY)} are accepted as names, too.",
    "precision": "Number format of forward and backward; weights stay fp32, except with fp64, which applies to all.",
    "slices": "V: number of slices that every global batch is cut into. Default: accumulate x workers.",
    "accumulate": "Slices per worker and step, if --slices is not given.",
    "exact": "The same bits for every number of workers.",
    "clip_norm": "Scale the gradient down to this global norm if it is larger.",
    "balance": "Move slices from slow workers to fast ones; results stay the same. Needs more slices than workers.",
    "straggler_factor": "Report a worker that takes more than this many times as long as the others.",
    "straggler_steps": "Steps over which workers are compared.",
    "manage_gc": "Collect Python's garbage between steps, on all workers at once, and never inside one.",
    "loader_timeout_s": "Seconds to wait for a slice from loader processes before the run fails; 0: no limit.",
    "check_every": "Compare the workers' copies of the weights after every so many steps; 0: never.",
    "audit": "Compute one slice of every step on two workers, and compare its gradients.",
    "check_loss": "Warn if the loss is not a mean over examples, by computing it for a few examples of the first step.",
    "workers": "Workers on this host. Default: one per accelerator, else one.",
    "threads": "Threads per worker. Default: cores / workers.",
    "servers": "Parameter servers, beside the workers; for strategy parameter_server, where the default is 2.",
    "elastic": "Minimum and maximum of workers, such as 2:8: they may join, leave and die while the others train.",
    "hosts_wanted": "Start when this many hosts have joined.",
    "listen": "Address (or ADDR:PORT) at which other hosts reach this one.",
    "insecure_data_plane": "Accept that tensors travel between hosts unencrypted and without authentication.",
    "allocator": "keep: the worker keeps freed memory for the next step. system: glibc's defaults.",
    "start": "How workers are started: auto forks them from one process that has imported torch, unless the host has "
    "accelerators; spawn makes each a new interpreter.",
    "memory_format": "Memory format of the model and its inputs.",
    "ui": "Progress: a live bar, plain lines, none, or what fits the terminal.",
    "verbose": "Print more: slices, precision, threads, memory; what each worker used; every frame of a traceback.",
    "plane": "auto: workers of one host communicate through shared memory if possible. gloo: over sockets.",
    "timeout_s": "Seconds that a collective waits for its slowest peer.",
    "bucket_bytes": "Gradients are sent in buckets of about this size.",
    "reducer": "How gradients are sent: exact, in half the bytes (bf16), or in a quarter (int8, with error feedback).",
    "every_steps": "Commit a checkpoint every so many steps.",
    "every_s": "Commit a checkpoint every so many seconds.",
    "keep_last": "How many of the newest checkpoints are kept.",
    "keep_best": 'Also keep the best by a result: "loss", "accuracy", "min:NAME" or "max:NAME".',
    "on": "Who starts the run's agents: slurm (a job), ssh (on --hosts), kubernetes (a manifest); here: this command.",
    "hosts": "How many hosts: 4, or 2:8 if they may join and leave; for ssh their names: a,b:2,c (b: 2 workers).",
    "cpus": "Cores of each host. Default: whole hosts.",
    "gpus": "Accelerators of each host; without -n, each gets a worker.",
    "memory": "Memory of each host, such as 64G.",
    "time": "Time limit: 8:00:00, 2-00:00:00 (two days), or minutes. Default: the queue's.",
    "notice": "Seconds before the time limit at which the run is to commit a checkpoint and end.",
    "requeue": "Queue a run again that ended with 75, a committed checkpoint; it resumes.",
    "queue": "Slurm: the partition.",
    "more_queue": "Slurm: the partition for hosts above the least number; preemptible ones are fine.",
    "account": "Slurm: the account.",
    "array": "Slurm: separate runs of the same command, such as 0-3%2; the task is SLURM_ARRAY_TASK_ID.",
    "setup": "A shell line that runs on every host before the agent; may be repeated.",
    "extra": "An option for sbatch or ssh, such as --extra=--constraint=a100; may be repeated.",
    "code": "here: the script is on all hosts under the same path. ship: the files that git tracks are copied.",
    "image": "Kubernetes: the container image, which has the script and manyhands.",
    "namespace": "Kubernetes: the namespace. Default: kubectl's.",
    "manifest": "Kubernetes: a JobSet, whose controller is a separate installation, or a plain Job.",
}


class StrategyName(click.Choice[str]):
    """A strategy, by our name or by its name in other libraries; `strategy_name` maps them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if str(value).lower() in LEVELS:
            raise UsageError(
                f"{value} is one of three levels of strategy sharded; the flag can only select the highest, zero3.",
                where="--strategy",
                fix=[f'strategy=mh.Sharded("{LEVELS[str(value).lower()]}") in the script', "--strategy sharded"],
            )
        return super().convert(strategy_name(str(value)), param, ctx)


def _click_type(key: Key) -> Any:
    is_union = typing.get_origin(key.type) in (typing.Union, types.UnionType)
    if key.name == "hosts":
        return str
    kind = next(one for one in typing.get_args(key.type) if one is not type(None)) if is_union else key.type
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        return StrategyName(choices) if key.name == "strategy" else click.Choice(choices)
    return str if typing.get_origin(kind) is tuple else kind


def settings_options(command: Command, names: Collection[str] = KEYS) -> Command:
    """Add a flag for every setting, or for `names`; the command gets each by its name, None if not given."""
    for key in reversed([key for key in KEYS.values() if key.name in names]):
        kind, flag = _click_type(key), flag_name(key.name)
        spellings = [f"{flag}/--no-{flag[2:]}" if kind is bool else flag, key.name]
        if key.name in SHORT:
            spellings.insert(0, SHORT[key.name])
        option = {} if kind is bool else {"type": kind}
        if key.name in METAVARS:
            option["metavar"] = METAVARS[key.name]
        if typing.get_args(key.type) == (str, ...):
            option |= {"type": str, "multiple": True}
        command = click.option(*spellings, **option, default=None, help=HELP[key.name])(command)
    return command


def take_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among a command's options: only those given, by name."""
    return {name: options[name] for name in KEYS if options.get(name) not in (None, ())}
