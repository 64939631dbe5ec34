"""From settings to a running agent: `mh run`, and a script that becomes its own launcher.

This file decides where the settings of one launch come from and fills in the agent's `LaunchRequest`;
`control.agent.agent` starts, watches and restarts workers. Start reading at `place` and `make_request`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from msgspec.structs import replace

from manyhands.control.agent.preflight import require_clear_text_consent
from manyhands.control.messages.launch_request import HostSeat, JoinTicket, LaunchRequest, PlacerTimes, WorkerCommand
from manyhands.control.processes.template_process import is_possible
from manyhands.errors import EnvironmentProblem, ManyhandsError, SpecError, UsageError
from manyhands.events import LaunchStarted
from manyhands.launcher.machine import num_cores, read_key, this_machine
from manyhands.launcher.placers.meeting import (
    GIVE_UP_AFTER_S,
    await_ticket,
    first_address,
    hint_for_first,
    meeting_file,
)
from manyhands.launcher.placers.seats import find_seat, only_task, placers_are_off
from manyhands.launcher.placers.shell import PlacingOptions, is_elsewhere, start_elsewhere
from manyhands.launcher.placers.slurm_times import SlurmTimes
from manyhands.launcher.placers.wrong_seats import check_one_host, check_seat, notes_on
from manyhands.observe.notebook import shows_in_cell
from manyhands.spec.addresses import Address
from manyhands.spec.cluster import ClusterTask
from manyhands.spec.load import (
    CONFIG_VARIABLE,
    EVALUATE_VARIABLE,
    KEY_FILE_VARIABLE,
    Resolved,
    cluster_task,
    environment,
    nearest,
    own_identity,
    resolve,
    torchrun_task,
)
from manyhands.spec.placement import (
    Placement,
    from_cluster,
    from_cluster_with_servers,
    from_seat,
    from_settings,
    from_torchrun,
)
from manyhands.spec.probe_requests import EvaluateOrder
from manyhands.spec.seat import Seat

if TYPE_CHECKING:
    from manyhands.control.messages.launch_request import Display

__all__ = [
    "become_launcher",
    "default_environment",
    "describe",
    "evaluate_here",
    "host_seat",
    "how_to_resume",
    "launch_command",
    "make_request",
    "needs_launcher",
    "open_display",
    "own_command",
    "place",
    "placer_times",
    "script_command",
    "wait_for_end",
    "worker_environment",
]

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32 - 1),
    # The bytes cut off to align a tensor go into a per-thread cache, where they keep the free blocks around them from
    # being merged. The next tensor of that size misses the free space by those few bytes, and takes new memory: up to
    # six times as much. Without the cache a gradient reuses the memory of the last one of its size.
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
}
"""With these settings glibc keeps freed memory for the next step, instead of returning it and faulting it in again."""

WAITING_THREADS = {"GOMP_SPINCOUNT": "3000"}
"""How often a thread of torch polls before it sleeps, when it waits for the other threads of an operation. The default
is 300,000 times: on a busy machine, that takes the processor from the very thread that it waits for. Measured in
docs/tuning.md."""
WAITING_CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""If the user has set one of these, it is not changed."""

START_TIMEOUT_S = 600.0
BEGIN_WITH_FEWER_S = 10.0
"""Tasks of a cluster are started by hand or by an engine, within a few seconds of each other."""
GONE_AFTER_S = 10.0


def needs_launcher(resolved: Resolved, *, task: ClusterTask | None = None) -> bool:
    """Whether this process, a script started directly, must start workers instead of training itself."""
    environ = environment()
    if own_identity(environ) is not None:
        return False
    if placed_by_script(resolved):
        return True
    launch = resolved.spec.launch
    if (launch.workers or 1) > 1 or resolved.spec.num_servers or launch.hosts_wanted > 1 or launch.elastic is not None:
        return True
    if resolved.spec.train.strategy == "single":
        return False  # As in TensorFlow, only strategies for several workers use the cluster.
    under_torchrun = torchrun_task(environ)
    several_of_torchruns = under_torchrun is not None and under_torchrun.world_size > 1
    return several_of_torchruns or task is not None or cluster_task(environ) is not None


def placed_by_script(resolved: Resolved) -> bool:
    """Whether the script itself says who places its agents. A site's default is for `mh run`, not for each script."""
    return resolved.origins["cluster.on"] == "constructor" and is_elsewhere(resolved, environment())


def place(
    resolved: Resolved,
    environ: Mapping[str, str],
    *,
    torchrun: Mapping[str, Any] | None = None,
    task: ClusterTask | None = None,
) -> Placement:
    """Which host of how many this is: by torchrun's flags if given, else by a cluster task, else by our settings, with
    the seat that a placer gave this process.

    Refuses a task of a job, such as of `srun -n2`, that cannot know the others: it would train alone.
    """
    seat = None if (torchrun or {}).get("standalone") else find_seat(environ)
    placement = _place(resolved, environ, torchrun, task, seat)
    if placement.master is None:
        check_seat(seat, environ)
    notes = notes_on(seat, environ, num_cores(), os.cpu_count() or 1)
    return replace(placement, notes=[*placement.notes, *notes])


def _place(
    resolved: Resolved,
    environ: Mapping[str, str],
    torchrun: Mapping[str, Any] | None,
    task: ClusterTask | None,
    seat: Seat | None,
) -> Placement:
    launch, machine = resolved.spec.launch, this_machine(environ)
    if torchrun:
        asked = torchrun.get("nproc_per_node")
        if asked is not None and launch.workers is not None and str(asked) != str(launch.workers):
            what = f"{launch.workers} workers, and --nproc-per-node {asked}."
            raise SpecError(what, where=resolved.origins["launch.workers"], fix=["one of the two"])
        placement = from_torchrun(torchrun, launch, machine)
        if seat is None or only_task(seat) or placement.num_hosts > 1:
            return placement
        check_seat(seat, environ)
        check_one_host(seat, torchrun.get("nnodes"))
        # --nproc-per-node alone says how many workers each host has, not how many hosts there are.
        return replace(from_seat(seat, replace(launch, workers=placement.workers), machine), notes=placement.notes)
    task = task or cluster_task(environ)
    if task is None and seat is not None and not only_task(seat):
        check_seat(seat, environ)
        return from_seat(seat, launch, machine)
    if task is None:
        return from_settings(launch, machine)
    of_cluster = from_cluster_with_servers if resolved.spec.num_servers else from_cluster
    return of_cluster(task, launch, machine)


def worker_environment(resolved: Resolved, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of workers: that of this process, and what the settings add."""
    inherited = {name: text for name, text in environ.items() if name != KEY_FILE_VARIABLE}
    added = {} if any(name in environ for name in WAITING_CHOICES) else dict(WAITING_THREADS)
    if resolved.spec.launch.allocator == "keep":
        added |= {name: value for name, value in ALLOCATOR.items() if name not in environ}
    if resolved.config_file:
        added[CONFIG_VARIABLE] = os.path.abspath(resolved.config_file)
    return inherited | added


def default_environment(threads: int) -> dict[str, str]:
    """What workers with default settings and so many threads are started with: for a template that runs share."""
    environ = environment()
    return {**worker_environment(resolve(flags={}, environ=environ), environ), "OMP_NUM_THREADS": str(threads)}


def forks_workers(resolved: Resolved, environ: Mapping[str, str]) -> bool:
    """An accelerator's libraries must not be forked once they run, and forking was not tried where there are any."""
    return resolved.spec.launch.start == "auto" and is_possible() and not this_machine(environ).accelerators


def make_request(
    resolved: Resolved,
    command: WorkerCommand,
    placement: Placement,
    environ: Mapping[str, str],
    *,
    run_dir: str | None = None,
    resume: str | None = None,
    torchrun: bool = False,
    join_file: str | None = None,
    lifeline: bool = False,
    result_file: str | None = None,
) -> LaunchRequest:
    run, launch, servers = resolved.spec.run, resolved.spec.launch, placement.server_tasks or resolved.spec.num_servers
    request = LaunchRequest(
        command=command,
        workers=placement.workers,
        forks=forks_workers(resolved, environ),
        threads=launch.threads or (1 if resolved.spec.train.exact else None),
        run_dir=run_dir,
        overwrite=run.overwrite,
        group_readable=run.group_readable,
        elastic=launch.elastic or placement.elastic or ((1, _all_workers(placement)) if servers else None),
        servers=servers,
        server_tasks=placement.server_tasks > 0,
        server=placement.server,
        server_address=placement.server_address,
        heartbeat_s=run.heartbeat_s,
        hang_s=run.hang_s,
        hosts_wanted=placement.num_hosts,
        begin_with_fewer_s=BEGIN_WITH_FEWER_S if placement.begins_with_fewer else None,
        listen=placement.listen,
        key=_key(placement, environ),
        insecure_data_plane=launch.insecure_data_plane,
        max_restarts=run.max_restarts,
        # A user who gives torchrun's flags and max_restarts expects torchrun's rule for them.
        always_restart=torchrun and resolved.given("run.max_restarts"),
        grace_s=run.grace_s,
        flags=resolved.flags(),
        host_rank=placement.host_rank if placement.master or placement.seat else None,
        master=placement.master if placement.num_hosts > 1 else None,
        join_file=join_file,
        lifeline=lifeline,
        same_program=torchrun and placement.num_hosts > 1,
        seat=host_seat(environ),
        times=placer_times(environ),
        environment=worker_environment(resolved, environ),
        resume=resume,
        result_file=result_file,
    )
    if placement.host_rank is None and placement.master and placement.trains:
        assert request.key is not None
        host, port = placement.master
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        request.join, request.command = JoinTicket(address, "", request.key.hex()), None
        request.host_rank = request.master = None
    return request


def _take_seat(request: LaunchRequest, seat: Seat, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Make the request that of the job's first host, which others join, or of one that joins it, which waits here."""
    require_clear_text_consent(seat.node or "other hosts", request)
    path = meeting_file(seat, environ)
    request.join_timeout_s = GIVE_UP_AFTER_S
    if seat.host_rank == 0:
        request.listen = request.listen or first_address(seat)
        request.join_file, request.removes_join_file = str(path), True
        request.join_hint = hint_for_first(path, seat)
    else:
        request.join = await_ticket(path, seat, say)
        request.own_command, request.command = request.command, None


def host_seat(environ: Mapping[str, str]) -> HostSeat | None:
    """What `mh status` shows about who lends this host."""
    seat = find_seat(environ)
    return HostSeat(placer=seat.placer, job=seat.job, node=seat.node) if seat is not None else None


def placer_times(environ: Mapping[str, str]) -> PlacerTimes | None:
    """Slurm's time limit and notice: also for a batch script, which is no step, and for mpirun inside of a job."""
    job = environ.get("SLURM_JOB_ID", "")
    return SlurmTimes(job) if job.isascii() and job.isdigit() and not placers_are_off(environ) else None


def _all_workers(placement: Placement) -> int:
    return placement.total_workers or placement.workers * placement.num_hosts


def _key(placement: Placement, environ: Mapping[str, str]) -> bytes | None:
    path = environ.get(KEY_FILE_VARIABLE)
    if not placement.trains or (placement.num_hosts == 1 and placement.listen is None):
        return None  # No host joins.
    if placement.seat is not None and not placement.coordinates:
        return None  # It is in the first host's join file.
    if path:
        return read_key(path)
    if placement.master is None or placement.num_hosts == 1:
        return None  # Hosts join by a file: the agent makes a key and writes it there.
    if placement.beyond_loopback:
        raise EnvironmentProblem(
            f"Hosts rendezvous at {placement.master[0]} port {placement.master[1]}, but this host has no key to prove "
            "that it belongs to the run.",
            where=f"{KEY_FILE_VARIABLE} is not set",
            fix=["mh keygen run.key", "copy run.key to every host", f"{KEY_FILE_VARIABLE}=run.key on every host"],
        )
    # Agents of one user on one machine share a separate key: other users can reach a loopback port, too.
    from manyhands.control.security.keys import local_key

    return local_key()


def describe(request: LaunchRequest, placement: Placement, environ: Mapping[str, str]) -> dict[str, Any]:
    """The output of a dry run: plain values, no key."""
    each_as_many = placement.host_rank is not None and placement.total_workers is None
    first = (placement.host_rank or 0) * placement.workers if each_as_many else None
    return {
        "hosts": placement.num_hosts,
        "host": placement.host_rank,
        "coordinator": placement.coordinates,
        "master": f"{placement.master[0]}:{placement.master[1]}" if placement.master else None,
        "listen": placement.listen,
        "workers": placement.workers,
        "servers": request.servers,
        "server": request.server,
        "elastic": request.elastic,
        "ranks": None if first is None else list(range(first, first + placement.workers)),
        "trains": placement.trains,
        "evaluates": placement.evaluates,
        "threads": request.threads or max(1, this_machine(environ).cores // max(1, placement.workers)),
        "run_dir": request.run_dir,
        "command": msgspec.to_builtins(request.command),
        "environment": {name: text for name, text in request.environment.items() if environ.get(name) != text},
        "flags": request.flags,
        "notes": placement.notes,
    }


def script_command(target: str, arguments: Sequence[str], *, is_module: bool = False) -> WorkerCommand:
    """The command of a script or module; `UsageError` if it does not exist."""
    if is_module:
        top = target.partition(".")[0]
        if top not in sys.modules and not _is_importable(top):
            raise UsageError(
                f"There is no module {target}.", where="-m", fix=["mh run script.py", "its directory on PYTHONPATH"]
            )
        return WorkerCommand("module", target, list(arguments))
    if not os.path.isfile(target):
        folder = os.path.dirname(target) or "."
        names = os.listdir(folder) if os.path.isdir(folder) else []
        fix = [os.path.join(os.path.dirname(target), name) for name in nearest(os.path.basename(target), names)]
        raise UsageError(f"There is no script {target}.", where="the command line", fix=fix or ["mh run script.py"])
    return WorkerCommand("script", target, list(arguments))


def _is_importable(module: str) -> bool:
    # The workers' path starts with the directory in which they are started; that of `mh` does not.
    return os.path.exists(f"{module}.py") or os.path.isdir(module) or importlib.util.find_spec(module) is not None


def open_display(resolved: Resolved, environ: Mapping[str, str], *, solo: bool = False) -> Display:
    from manyhands.observe.progress_display import make_display

    return make_display(
        resolved.spec.launch.ui,
        stdout=sys.stdout,
        stderr=sys.stdout if shows_in_cell(sys.stdout) else sys.stderr,  # else a notebook shows it as an error
        no_color=bool(environ.get("NO_COLOR")),
        force_color=bool(environ.get("FORCE_COLOR")),
        ci=bool(environ.get("CI")) or environ.get("TERM") == "dumb",
        solo=solo,
        verbose=resolved.spec.launch.verbose,
    )


def launch_command(request: LaunchRequest, placement: Placement, display: Display) -> int:
    """Run this host's part of a run to the end. Returns the exit code; closes the display."""
    try:
        for note in placement.notes:
            display.say(note)
        if not placement.trains:
            assert placement.master is not None
            display.say("This task does not train under this strategy; it waits for the end of the run.")
            return wait_for_end(placement.master)
        if request.command is not None:
            servers = 0 if request.server_tasks else request.servers
            display.event(LaunchStarted(workers=request.workers, servers=servers))
        if placement.seat is not None:
            _take_seat(request, placement.seat, environment(), display.say)
        from manyhands.control.agent.agent import run_agent

        with _announced(placement.announce):
            return run_agent(request, display)
    finally:
        display.close()


def evaluate_here(
    command: WorkerCommand, flags: Mapping[str, Any], environ: Mapping[str, str], *, as_json: bool
) -> NoReturn:
    """Replace this process by the script as an evaluator: its trainer evaluates the run's checkpoints."""
    call = ["-m", command.target] if command.kind == "module" else [command.target]
    order = msgspec.json.encode(EvaluateOrder(dict(flags), as_json)).decode()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *call, *command.args], {**environ, EVALUATE_VARIABLE: order})


@contextlib.contextmanager
def _announced(address: Address | None) -> Iterator[None]:
    """Accept connections at an address while the run lasts, so that tasks without work see its start and end."""
    if address is None:
        yield
        return
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        # The kernel completes connections; what is sent here is never read.
        listener = socket.create_server(address, family=family)
    except OSError as error:
        what = f"Cannot listen at {address[0]} port {address[1]}: {error.strerror}."
        raise EnvironmentProblem(what, where="the chief's address in the cluster", fix=["another port"]) from error
    with listener:
        yield


def wait_for_end(
    master: Address, *, start_timeout_s: float = START_TIMEOUT_S, gone_after_s: float = GONE_AFTER_S
) -> int:
    """Wait as a task that does not train: until the coordinator has started, and then until it is gone for good."""
    started, last_seen = False, time.monotonic()
    while True:
        if _answers(master):
            started, last_seen = True, time.monotonic()
        silent_s = time.monotonic() - last_seen
        if started and silent_s > gone_after_s:
            return 0
        if not started and silent_s > start_timeout_s:
            what = f"No coordinator started at {master[0]} port {master[1]} within {start_timeout_s:g} s."
            raise EnvironmentProblem(what, fix=["start the chief task"])
        time.sleep(0.5)


def _answers(address: Address) -> bool:
    try:
        with socket.create_connection(address, timeout=2.0):
            return True
    except OSError:
        return False


def become_launcher(resolved: Resolved, *, task: ClusterTask | None = None) -> NoReturn:
    """Turn this process, a script started directly, into the launcher of its workers; exits with the run's code.

    Raises `UsageError` if there is no script to start: in a notebook, at a prompt, under another launcher.
    """
    environ = environment()
    asked = "Servers were asked for" if resolved.spec.num_servers else "More than one worker was asked for"
    command = own_command(environ, asked)
    try:
        if placed_by_script(resolved):
            code = start_elsewhere(resolved, command, environ, PlacingOptions(), _resume_command(command, resolved))
            raise SystemExit(code)
        placement = place(resolved, environ, task=task)
        run_dir = resolved.spec.run.run_dir
        request = make_request(
            resolved, command, placement, environ, run_dir=run_dir, resume=_resume_command(command, resolved)
        )
        code = launch_command(request, placement, open_display(resolved, environ))
    except ManyhandsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    raise SystemExit(code)


def how_to_resume(resolved: Resolved, run_dir: str) -> str:
    """What to type to continue the script of this process in `run_dir`."""
    try:
        command = own_command(environment(), "A run was started")
    except UsageError:  # a notebook, a test: nothing to type
        return f"the same with run_dir={run_dir!r}"
    return _resume_command(command, resolved).replace("{run_dir}", shlex.quote(run_dir))


def _resume_command(command: WorkerCommand, resolved: Resolved) -> str:
    """What to type to resume: the same script, with the run directory unless the script sets it."""
    start = ["-m", command.target] if command.kind == "module" else [os.path.relpath(command.target)]
    typed = shlex.join(["python", *start, *command.args])
    return typed if resolved.origins["run.run_dir"] == "constructor" else "MANYHANDS_RUN_DIR={run_dir} " + typed


def own_command(environ: Mapping[str, str], asked: str) -> WorkerCommand:
    """The command that started this process, for workers to run again.

    Raises `UsageError` if there is none; the message begins with `asked`.
    """
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if torchrun_task(environ) is not None:
        raise UsageError("This script was started by torchrun.", fix=["mh run with the same flags"])
    # The variable alone is not enough: scripts that a test starts inherit it.
    if "PYTEST_CURRENT_TEST" in environ and "pytest" in sys.modules:
        raise UsageError(
            f"{asked} inside a test: the workers would run all of pytest again.",
            fix=["mh.launch(function_of_a_module, workers=2)", "run the script in a subprocess"],
        )
    if multiprocessing.parent_process() is not None:
        raise UsageError(
            "A child process of this script tried to start the run again.",
            fix=['if __name__ == "__main__": around the code that trains'],
        )
    if spec is not None and spec.name not in ("__main__", "builtins"):
        return WorkerCommand("module", spec.name.removesuffix(".__main__"), sys.argv[1:])
    if "ipykernel" in sys.modules or file is None or not Path(file).is_file():
        raise UsageError(
            f"{asked} in a notebook or at a prompt: there is no script for workers to run.",
            fix=[
                "write it to train.py and `mh run -n 2 train.py`",
                "a function in a file, begun with %%writefile my_training.py in its cell, and in the next cell: "
                "from my_training import train; mh.launch(train, workers=2)",
            ],
        )
    return WorkerCommand("script", os.path.abspath(file), sys.argv[1:])
