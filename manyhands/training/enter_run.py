"""How a process enters a run: with the worker identity that an agent gave it, as a solo run, or as the launcher.

`Trainer` and `join` call `enter` first. A process that an agent started uses its worker identity. Any other process
runs solo; if more workers are asked for, or a cluster is described, it becomes the launcher, and `enter` does not
return. Start reading at `enter`.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from manyhands.control.session.run_session import RunSession
from manyhands.control.session.session import Session
from manyhands.errors import SpecError, UsageError
from manyhands.launcher import launch
from manyhands.launcher.cluster_server import Server
from manyhands.launcher.evaluator_session import EvaluatorSession
from manyhands.launcher.placers.seats import find_seat, only_task
from manyhands.launcher.script_exit import watch_ending
from manyhands.launcher.solo_run import SoloSession
from manyhands.launcher.worker_process import process_settings
from manyhands.launcher.worker_process.lazy_compiler import load_compiler_late
from manyhands.launcher.worker_process.template import modules_from_elsewhere, variables_set_too_late
from manyhands.spec import load
from manyhands.spec.cluster import ClusterTask
from manyhands.spec.load import Resolved
from manyhands.spec.probe_requests import (
    EvaluateOrder,
    GraphOrder,
    PlanOrder,
    evaluate_order,
    graph_order,
    order_of_this_worker,
    plan_order,
)
from manyhands.spec.worker_identity import WorkerIdentity
from manyhands.strategies.choices import Single
from manyhands.strategies.registry import STRATEGIES
from manyhands.torch_private import check_strategy_names
from manyhands.training.worker.script_trainings import ScriptTrainings
from manyhands.training.worker.server_requests import ask_for_servers
from manyhands.training.worker.strategy_lookup import (
    Planned,
    StrategyChoice,
    as_strategy,
    check_promises,
    check_strategy,
    in_place_of,
)
from manyhands.training.worker.worker import Worker, _current_session

__all__ = ["enter"]


EVALUATOR_FLAGS = ("launch.threads", "launch.ui", "launch.verbose", "launch.memory_format")
"""Settings of the launch that an evaluator obeys; the others are about the workers of the run."""

_script: ScriptTrainings | None = None
"""The trainings of this process, once there is one."""


def enter(
    strategy: str | StrategyChoice | None, arguments: Mapping[str, Any], *, tune: bool = False, kind: str = "Trainer"
) -> Worker:
    """This process as a worker of a run. Does not return if the process becomes the launcher of several workers.

    With `tune`, a script started by hand first measures which settings are fastest.
    """
    load_compiler_late()
    order = plan_order() or graph_order()
    if order is not None:
        return _planning_worker(as_strategy(strategy), order, arguments)
    beside = evaluate_order()
    if beside is not None:
        return _evaluating_worker(as_strategy(strategy), beside, arguments, kind)
    in_test: tuple[Any, ScriptTrainings | None] = _current_session.get() or (None, None)
    session, script = in_test
    identity = session.identity if session is not None else load.own_identity()
    if identity is None:
        watch_ending()
    chosen = as_strategy(strategy)
    reducer = getattr(chosen, "reducer", None)
    given = {
        "strategy": chosen.name if strategy is not None else None,
        "workers": getattr(chosen, "workers", None),
        "servers": getattr(chosen, "servers", None),
        "threads": chosen.threads,
        "reducer": reducer if isinstance(reducer, str) else None,  # a pipeline's is a function
        "elastic": getattr(chosen, "elastic", None),
        **arguments,
    }
    if identity is None and getattr(chosen, "on", None) is not None:
        given |= chosen.on.settings()  # type: ignore[union-attr]
    flags = identity.flags if identity is not None else _tuned_flags(chosen, given) if tune else {}
    resolved = load.resolve(flags=flags, arguments=given)
    if resolved.spec.train.strategy != chosen.name:  # a flag, the environment or a config file asked for another one
        asked, chosen = chosen, in_place_of(chosen, resolved.spec.train.strategy)
        if callable(reducer):
            raise SpecError(
                f"The script's mh.{type(asked).__name__} has its own reducer, which another strategy would drop.",
                where=resolved.origins["train.strategy"],
                fix=["the script's strategy", "no reducer="],
            )
    check_strategy_names(chosen.name, STRATEGIES[chosen.name].uses)
    checked = order_of_this_worker()
    if checked is not None:
        chosen = in_place_of(chosen, checked.strategy, **checked.settings)
    check_promises(chosen, resolved.spec)
    if identity is None:
        task = _task_of(chosen)
        if launch.needs_launcher(resolved, task=task):
            here = task or load.cluster_task(load.environment())
            if here is not None and here.job == "evaluator" and kind == "Trainer":
                return _evaluating_worker(chosen, EvaluateOrder(), arguments, kind)
            launch.become_launcher(resolved, task=task)
        worker = Worker(_solo(resolved), resolved, chosen, kind)
        if resolved.spec.launch.allocator == "keep":  # workers of a launcher get this through their environment
            process_settings.keep_freed_memory()
        for line in (*_missing_devices(chosen, worker.session.identity), *_separate_tasks(load.environment())):
            worker.events.warn(line)
        return worker
    if session is None and chosen.on_servers and not identity.num_servers:
        ask_for_servers(identity, resolved.spec.num_servers)
    check_strategy(chosen, identity, resolved.spec)
    worker = Worker(script or _own_script(lambda: Session(identity)), resolved, chosen, kind)
    for line in (
        *resolved.overrides,
        *_differences(resolved, identity),
        *_missing_devices(chosen, identity),
        *_late_variables(),
    ):
        worker.events.warn(line)
    return worker


def _planning_worker(chosen: StrategyChoice, order: PlanOrder | GraphOrder, arguments: Mapping[str, Any]) -> Worker:
    """The single process of `mh plan show` or `mh graph`: it trains nothing, and answers for the workers asked for."""
    if order.strategy and order.strategy != chosen.name:
        chosen = in_place_of(chosen, order.strategy)
    workers = order.workers or getattr(chosen, "workers", None) or 1
    alone = {"train.strategy": "single", "launch.workers": 1, "launch.ui": "none"}
    # Only used where a script's own loop runs until it calls its model.
    alone["run.run_dir"] = f"{order.path}.run"
    resolved = load.resolve(flags=alone, arguments={"slices": arguments.get("slices")})
    worker = Worker(ScriptTrainings(SoloSession(resolved)), resolved, Single())
    graph = order if isinstance(order, GraphOrder) else None
    worker.planned = Planned(chosen, workers, resolved.spec.train.slices, order.path, graph)
    return worker


def _evaluating_worker(chosen: StrategyChoice, order: EvaluateOrder, arguments: Mapping[str, Any], kind: str) -> Worker:
    """The single process that evaluates a run's checkpoints. How the run divides its work does not matter to it."""
    watch_ending()
    if kind != "Trainer":
        task = _task_of(chosen) or load.cluster_task(load.environment())
        if task is not None and not task.trains:  # as the other tasks that do not train
            print("This script has its own loop, so its evaluator waits for the end of the run.", file=sys.stderr)
            raise SystemExit(launch.wait_for_end(task.chief_address))
        raise UsageError(
            "This script has its own training loop, so it is not known how to evaluate its checkpoints.",
            where="mh evaluate",
            fix=["mh.Trainer(...).fit(..., validation=...)"],
        )
    mine = {key: value for key, value in order.flags.items() if not key.startswith("launch.") or key in EVALUATOR_FLAGS}
    alone = {"train.strategy": "single", "launch.workers": 1, "launch.elastic": "none", "launch.servers": "none"}
    resolved = load.resolve(flags={**mine, **alone}, arguments={**arguments, "threads": chosen.threads})
    run_dir = resolved.spec.run.run_dir
    if run_dir is None:
        raise UsageError(
            "An evaluator reads the checkpoints of the run, but it is not known where the run keeps them.",
            where="the evaluator's task",
            fix=["--run-dir DIR, the same on every task, a directory that all of them share", "run_dir= in the script"],
        )
    script = _own_script(lambda: EvaluatorSession(resolved, Path(run_dir), as_json=order.as_json))
    return Worker(script, resolved, Single(), kind)


def _missing_devices(strategy: StrategyChoice, identity: WorkerIdentity) -> Iterator[str]:
    """A warning if the machine does not have this worker's device: it computes on the CPU instead."""
    if strategy.devices and not identity.is_server:
        asked = process_settings.asked_device(strategy.devices, identity.local_rank)
        if not process_settings.is_there(asked):
            yield f"rank {identity.rank} is to compute on {asked}, which this machine does not have: it uses the CPU."


def _separate_tasks(environ: Mapping[str, str]) -> Iterator[str]:
    """A warning only: `srun -n2 python train.py` may be intended, as a sweep with another seed in every task."""
    seat = find_seat(environ)
    if seat is not None and not only_task(seat):
        yield (
            f"{seat.command} started this script in {seat.num_tasks} tasks ({seat.variable}), and each trains a "
            "separate model; for one training over all of them: mh run, see docs/clusters.md"
        )


def _late_variables() -> Iterator[str]:
    for name in variables_set_too_late():
        yield (
            f"{name} was set by the script, but is read when torch is imported, which was before: it has no effect. "
            f"Set it for mh run, or use --start spawn."
        )
    for name in modules_from_elsewhere():
        yield (
            f"The script's search path leads to another {name}, but {name} was imported before the script ran. "
            f"Set PYTHONPATH for mh run, or use --start spawn."
        )


def _differences(resolved: Resolved, identity: WorkerIdentity) -> Iterator[str]:
    """Warnings where the script asks for something other than its launcher has started."""
    launch = resolved.spec.launch
    if launch.elastic is not None and not identity.most_workers:
        least, most = launch.elastic
        yield f"The script asks for elastic=({least}, {most}), the launcher does not: mh run --elastic {least}:{most}"
    for name, flag, started in (
        ("workers", "-n", identity.local_world_size),
        ("servers", "--servers", identity.num_servers),
    ):
        wanted = getattr(launch, name)
        if resolved.origins[f"launch.{name}"] == "constructor" and wanted != started:
            yield f"The script asks for {wanted} {name}, the launcher started {started}: mh run {flag} {wanted}"


def _tuned_flags(strategy: StrategyChoice, arguments: Mapping[str, Any]) -> dict[str, Any]:
    from manyhands.trials.trial_runner import tune_this_script

    if _task_of(strategy) is not None:
        raise UsageError("tune=True measures one host, and cluster= describes several.", fix=["mh tune on one of them"])
    return tune_this_script(arguments)


def _own_script(session: Callable[[], RunSession]) -> ScriptTrainings:
    """The trainings of this process: the first call creates the object, later calls return it."""
    global _script
    if _script is None:
        _script = ScriptTrainings(session())
        atexit.register(_script.close)
    return _script


def _solo(resolved: Resolved) -> ScriptTrainings:
    """A training that asks for another run directory is a new run; otherwise it is one more training of this run."""
    global _script
    session = _script.session if _script is not None else None
    if isinstance(session, SoloSession) and not session.takes(resolved):
        _script = None
    return _own_script(lambda: SoloSession(resolved))


def _task_of(strategy: StrategyChoice) -> ClusterTask | None:
    cluster = getattr(strategy, "cluster", None)
    if cluster is None or isinstance(cluster, ClusterTask):
        return cluster
    if isinstance(cluster, Server):
        return cluster.task
    raise SpecError(
        f"cluster= is a {type(cluster).__name__}, from which it is not known which task this process is.",
        fix=['mh.Mirrored(cluster=mh.Server(cluster, "worker", 0))', "TF_CONFIG, and no cluster="],
    )
