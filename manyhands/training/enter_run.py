"""How a process finds its place: it takes the seat that an agent gave it, runs alone, or becomes the launcher.

`enter` is what `Trainer` and `join` call first. In a process that an agent started it takes the seat; alone it runs
solo, and when more workers are asked for, or a cluster is described, the process becomes the launcher and never
returns. Start reading at `enter`.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from manyhands.control.session.session import Session
from manyhands.errors import SpecError, UsageError
from manyhands.launcher import launch
from manyhands.launcher.cluster_server import Server
from manyhands.launcher.script_exit import watch_ending
from manyhands.launcher.solo_run import Solo
from manyhands.launcher.worker_process import process_settings
from manyhands.launcher.worker_process.lazy_compiler import load_compiler_late
from manyhands.spec import load
from manyhands.spec.cluster import ClusterTask
from manyhands.spec.launcher_tasks import engine_task
from manyhands.spec.load import Resolved
from manyhands.spec.plan_order import PlanOrder, plan_order
from manyhands.spec.probe_requests import order_of_this_worker
from manyhands.spec.worker_identity import Seat
from manyhands.strategies.choices import Single
from manyhands.torch_private import check_strategy_names
from manyhands.training.worker.script_trainings import Script
from manyhands.training.worker.server_requests import ask_for_servers
from manyhands.training.worker.strategy_lookup import (
    Planned,
    StrategyChoice,
    as_strategy,
    check_promises,
    check_strategy,
    in_place_of,
)
from manyhands.training.worker.worker import Worker, _seated

__all__ = ["enter"]


_script: Script | None = None
"""Of this process, once there is one."""


def enter(
    strategy: str | StrategyChoice | None, arguments: Mapping[str, Any], *, tune: bool = False, kind: str = "Trainer"
) -> Worker:
    """Find this process's seat. Does not return where the process turns into the launcher of several workers.

    With `tune`, a script started by hand first measures which settings to go on with.
    """
    load_compiler_late()
    order = plan_order()
    if order is not None:
        return _planning(as_strategy(strategy), order, arguments)
    seated_here: tuple[Any, Script | None] = _seated.get() or (None, None)
    session, script = seated_here
    seat = session.seat if session is not None else load.seat()
    if seat is None:
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
    flags = seat.flags if seat is not None else _tuned(chosen, given) if tune else {}
    resolved = _resolved(flags, given, seat.num_hosts if seat is not None else 1)
    if resolved.spec.train.strategy != chosen.name:  # a flag, the environment or a config file asked for another one
        chosen = in_place_of(chosen, resolved.spec.train.strategy)
    check_strategy_names(chosen.name)
    checked = order_of_this_worker()
    if checked is not None:
        chosen = in_place_of(chosen, checked.strategy, **checked.settings)
    check_promises(chosen, resolved.spec)
    if seat is None:
        task = _task_of(chosen)
        if launch.needs_launcher(resolved, task=task):
            launch.become_launcher(resolved, task=task)
        worker = Worker(_solo(resolved), resolved, chosen, kind)
        for line in (*_not_there(chosen, worker.session.seat), *_not_alone(load.environment())):
            worker.warn(line)
        return worker
    if session is None and chosen.on_servers and not seat.num_servers:
        ask_for_servers(seat, resolved.spec.num_servers)
    check_strategy(chosen, seat, resolved.spec)
    worker = Worker(script or _own_script(lambda: Session(seat)), resolved, chosen, kind)
    for line in (*resolved.overrides, *_differences(resolved, seat), *_not_there(chosen, seat)):
        worker.warn(line)
    return worker


def _resolved(flags: Mapping[str, Any], given: Mapping[str, Any], num_hosts: int) -> Resolved:
    """All settings. Where no source names a strategy, the default one fits the number of hosts."""
    resolved = load.resolve(flags=flags, arguments=given)
    if num_hosts == 1 or resolved.given("train.strategy"):
        return resolved
    return load.resolve(flags=flags, arguments={**given, "strategy": "multi_worker"})


def _planning(chosen: StrategyChoice, order: PlanOrder, arguments: Mapping[str, Any]) -> Worker:
    """One process that trains nothing: it says how others would."""
    if order.strategy and order.strategy != chosen.name:
        chosen = in_place_of(chosen, order.strategy)
    workers = order.workers or getattr(chosen, "workers", None) or 1
    alone = {"train.strategy": "single", "launch.workers": 1, "launch.ui": "none"}
    resolved = load.resolve(flags=alone, arguments={"slices": arguments.get("slices")})
    worker = Worker(Script(Solo(resolved)), resolved, Single())
    worker.planned = Planned(chosen, workers, resolved.spec.train.slices, order.path)
    return worker


def _not_there(strategy: StrategyChoice, seat: Seat) -> Iterator[str]:
    """Devices of this worker that the machine does not have: it computes on the CPU instead."""
    if strategy.devices and not seat.is_server:
        asked = process_settings.asked_device(strategy.devices, seat.local_rank)
        if not process_settings.is_there(asked):
            yield f"rank {seat.rank} is to compute on {asked}, which this machine does not have: it takes the CPU."


def _not_alone(environ: Mapping[str, str]) -> Iterator[str]:
    """`srun -n2 python train.py` may be meant so: a sweep, say, with another seed in every task."""
    if (task := engine_task(environ)) is not None:
        yield (
            f"{task.engine} started this script in {task.size} tasks ({task.variable}), and each trains by itself; "
            "for one training over all of them: mh run, see docs/launching.md"
        )


def _differences(resolved: Resolved, seat: Seat) -> Iterator[str]:
    """What the script asks for and its launcher, which came first, has done otherwise."""
    launch = resolved.spec.launch
    if launch.elastic is not None and not seat.most_workers:
        least, most = launch.elastic
        yield f"The script asks for elastic=({least}, {most}), the launcher does not: mh run --elastic {least}:{most}"
    for name, flag, started in (
        ("workers", "-n", seat.local_world_size),
        ("servers", "--servers", seat.num_servers),
    ):
        wanted = getattr(launch, name)
        if resolved.origins[f"launch.{name}"] == "constructor" and wanted != started:
            yield f"The script asks for {wanted} {name}, the launcher started {started}: mh run {flag} {wanted}"


def _tuned(strategy: StrategyChoice, arguments: Mapping[str, Any]) -> dict[str, Any]:
    from manyhands.trials.trial_runner import tune_this_script

    if _task_of(strategy) is not None:
        raise UsageError("tune=True measures one host, and cluster= describes several.", fix=["mh tune on one of them"])
    return tune_this_script(arguments)


def _own_script(session: Callable[[], Session | Solo]) -> Script:
    """This process's; the first training makes it, and all others find it."""
    global _script
    if _script is None:
        _script = Script(session())
        atexit.register(_script.close)
    return _script


def _solo(resolved: Resolved) -> Script:
    """A training that asks for a run directory of its own is a run of its own; else it is one more of this run."""
    global _script
    if _script is not None and not _script.session.takes(resolved):
        _script = None
    return _own_script(lambda: Solo(resolved))


def _task_of(strategy: StrategyChoice) -> ClusterTask | None:
    cluster = getattr(strategy, "cluster", None)
    if cluster is None or isinstance(cluster, ClusterTask):
        return cluster
    if isinstance(cluster, Server):
        return cluster.task
    raise SpecError(
        f"cluster= is a {type(cluster).__name__}, which does not say which task this process is.",
        fix=['mh.MultiWorker(cluster=mh.Server(cluster, "worker", 0))', "TF_CONFIG, and no cluster="],
    )
