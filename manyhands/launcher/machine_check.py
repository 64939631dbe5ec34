"""Whether this machine can train: a list of small checks, each of which says what to do if it fails.

Every check tests one thing by using it, cleans up and returns a `CheckResult`; none raises, and each has a time limit.
The caller prints the results. Start reading at `examine`.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from manyhands.native import why_not
from manyhands.observe.event_text import size

__all__ = ["CheckResult", "all_reduce", "disk", "examine", "packages"]

Verdict = Literal["ok", "warn", "fail"]

PACKAGES = {"torch": "2.13", "numpy": "2", "pyzmq": "27", "msgspec": "0.20", "safetensors": "0.6", "psutil": "7"}
# Importing torch alone takes this long on a machine that is busy with something else.
PROBE_TIMEOUT_S = 60.0
# More ready processes than this per core, and more waiting than this, are not caused by the training's own threads.
MAX_LOAD = 1.5
MAX_STALLED_PERCENT = 20.0
GB = 10**9
# Docker gives a container 64 MB; one batch of 100 images of 224 x 224 pixels takes 60.
MIN_SHARED_BYTES = 256 * 10**6


class CheckResult(msgspec.Struct, frozen=True):
    check: str
    verdict: Verdict
    text: str
    fix: list[str] = []
    """What to do about it, one suggestion each; empty if the check passed."""
    facts: dict[str, Any] = {}
    """The numbers behind the text, for programs."""


def examine(run_dir: Path, environ: Mapping[str, str]) -> Iterator[CheckResult]:
    """Every check in turn, as they finish; the slowest, which starts processes, is last."""
    checks: list[tuple[str, Callable[[], CheckResult]]] = [
        ("python", python),
        ("packages", packages),
        ("cores", lambda: cores(environ)),
        ("load", load),
        ("memory", memory),
        ("loopback", loopback),
        ("shared memory", shared_memory),
        ("native", native),
        ("disk", lambda: disk(run_dir)),
        ("clock", clock),
        ("open files", open_files),
        ("encryption", encryption),
    ]
    for name, check in checks:
        try:
            yield check()
        except Exception as error:  # a check that cannot run is a failure, too
            text = f"could not be checked: {type(error).__name__}: {error}"
            yield CheckResult(name, "fail", text, fix=["report this with the output of mh doctor --json"])
    yield from all_reduce()


def python() -> CheckResult:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] != (3, 11):
        text = f"{version}, {sys.executable}; tested with 3.11 only"
        return CheckResult("python", "warn", text, fix=["Python 3.11, if something fails"], facts={"version": version})
    return CheckResult("python", "ok", f"{version}, {sys.executable}", facts={"version": version})


def packages(wanted: Mapping[str, str] = PACKAGES) -> CheckResult:
    found: dict[str, str] = {}
    missing, old = [], []
    for name, least in {"manyhands": "0", **wanted}.items():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if _numbers(found[name]) < _numbers(least):
            old.append(f"{name} {found[name]} (needs {least})")
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if missing or old:
        wrong = "; ".join([f"missing: {name}" for name in missing] + [f"too old: {each}" for each in old])
        return CheckResult("packages", "fail", f"{wrong}; found {text}", fix=["pip install -U manyhands"], facts=found)
    if "torch" in wanted and _numbers(found["torch"])[:2] != (2, 13):
        fix = ["pip install 'torch>=2.13,<2.14'"]
        return CheckResult("packages", "warn", f"tested with torch 2.13 only; found {text}", fix=fix, facts=found)
    return CheckResult("packages", "ok", text, facts=found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())


def cores(environ: Mapping[str, str]) -> CheckResult:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    facts: dict[str, Any] = {"usable": usable, "present": os.cpu_count(), "numa_nodes": nodes, "quota": _cpu_quota()}
    text = f"{usable} of {os.cpu_count()} usable, {nodes} NUMA node{'s' if nodes > 1 else ''}"
    if threads := environ.get("OMP_NUM_THREADS"):
        facts["omp_num_threads"] = threads
        text += f"; OMP_NUM_THREADS={threads} is set, and workers take it"
    if facts["quota"] is not None and facts["quota"] < usable:
        fix = [f"mh run --threads {max(1, int(facts['quota']))} with one worker: more threads than that wait in turns"]
        text += f"; but a limit of {facts['quota']:g} cores is set for this container"
        return CheckResult("cores", "warn", text, fix=fix, facts=facts)
    return CheckResult("cores", "ok", text, facts=facts)


def _cpu_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def load() -> CheckResult:
    """Whether other programs use the processors: then workers wait for each other, and measurements mean little."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return judge_load(os.getloadavg()[0], usable, _cpu_pressure())


def judge_load(average: float, usable: int, stalled_percent: float | None) -> CheckResult:
    """By the average number of running and ready processes in the last minute; if the kernel reports it, also by the
    share of the last 10 s in which a ready process had no processor, as the average takes a minute to fall."""
    text = f"{average:.1f} processes running or ready on {usable} core{'s' if usable > 1 else ''}"
    facts: dict[str, Any] = {"load_average": average, "usable": usable, "stalled_percent": stalled_percent}
    if stalled_percent is not None:
        text += f", some had to wait for one {stalled_percent:.0f}% of the last 10 s"
    waits = stalled_percent is None or stalled_percent > MAX_STALLED_PERCENT
    if average <= MAX_LOAD * usable or not waits:
        return CheckResult("load", "ok", text, facts=facts)
    fix = [
        "end other programs, or wait for them: workers of one run wait for the slowest",
        "mh run -n WORKERS --threads 1: threads of one worker wait for each other many times a step",
    ]
    return CheckResult("load", "warn", f"{text}: the machine is overloaded", fix=fix, facts=facts)


def _cpu_pressure() -> float | None:
    """Of the whole machine, from the kernel's pressure stall information; None if it has none."""
    try:
        return float(Path("/proc/pressure/cpu").read_text().split("avg10=")[1].split()[0])
    except (OSError, ValueError, IndexError):
        return None


def memory() -> CheckResult:
    import psutil

    state = psutil.virtual_memory()
    text = f"{size(state.available)} of {size(state.total)} available"
    facts = {"available_bytes": state.available, "total_bytes": state.total}
    if state.available < GB:
        return CheckResult(
            "memory", "warn", text, fix=["end other programs: a worker takes 0.3 GB and more"], facts=facts
        )
    return CheckResult("memory", "ok", text, facts=facts)


def loopback() -> CheckResult:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=2) as client:
            accepted, _ = server.accept()
            with accepted:
                accepted.settimeout(2)
                client.sendall(b"hello")
                if accepted.recv(5) != b"hello":
                    return CheckResult("loopback", "fail", "bytes did not arrive", fix=["ip link set lo up"])
    return CheckResult("loopback", "ok", "a port on 127.0.0.1 can be bound and reached")


def shared_memory() -> CheckResult:
    folder = Path("/dev/shm")
    state = os.statvfs(folder) if folder.is_dir() else None
    free, whole = (state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize) if state else (0, 0)
    memfd = _memfd_works()
    text = f"/dev/shm has {size(free)} free of {size(whole)}, memfd {'works' if memfd else 'does not work'}"
    facts = {"dev_shm_free_bytes": free, "dev_shm_bytes": whole, "memfd": memfd}
    if free < MIN_SHARED_BYTES or not memfd:
        fix = ["in a container: --shm-size=1g; data loader processes (num_workers) send their batches through it"]
        return CheckResult("shared memory", "warn", text, fix=fix, facts=facts)
    return CheckResult("shared memory", "ok", text, facts=facts)


def native() -> CheckResult:
    """The C extension: without it embeddings by id do not work, and everything else is slower."""
    if why := why_not():
        text = f"{why}: workers of one host use Gloo, optimizers run as in torch, mh.nn.Embedding cannot run"
        return CheckResult("native", "warn", text, fix=["a C compiler (apt install gcc), then pip install again"])
    return CheckResult("native", "ok", "the C extension is built: workers of one host share memory, updates are fused")


def _memfd_works() -> bool:
    if not hasattr(os, "memfd_create"):
        return False
    try:
        fd = os.memfd_create("manyhands-checkup")
    except OSError:
        return False
    try:
        os.posix_fallocate(fd, 0, 1 << 20)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def disk(run_dir: Path) -> CheckResult:
    """Free space, fsync, atomic rename and file locks where runs are written; leaves nothing behind."""
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.is_dir())
    elsewhere = ["mh run --run-dir DIR on another disk"]
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".checkup-") as folder:
            fsync_s, broken = _fsync_s(Path(folder)), _broken_promises(Path(folder))
    except OSError as error:
        return CheckResult("disk", "fail", f"cannot write under {existing}: {error.strerror}", fix=elsewhere)
    free = os.statvfs(existing).f_bavail * os.statvfs(existing).f_frsize
    text = f"{existing}: {size(free)} free, fsync {1000 * fsync_s:.1f} ms"
    facts = {"path": str(existing), "free_bytes": free, "fsync_s": fsync_s}
    if broken:
        return CheckResult(
            "disk", "fail", f"{text}; {broken}: checkpoints would not be safe", fix=elsewhere, facts=facts
        )
    if free < GB:
        return CheckResult("disk", "warn", text, fix=["free space: a checkpoint is three times the model"], facts=facts)
    if fsync_s > 0.5:
        return CheckResult("disk", "warn", text, fix=[*elsewhere, "or fewer checkpoints"], facts=facts)
    return CheckResult("disk", "ok", f"{text}, renames are atomic, locks work", facts=facts)


def _fsync_s(folder: Path) -> float:
    taken = []
    for number in range(3):
        with (folder / f"synced-{number}").open("wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - began)
    return sorted(taken)[1]


def _broken_promises(folder: Path) -> str:
    """Which guarantee for checkpoints this file system breaks; empty if none."""
    target, torn = folder / "target", threading.Event()
    target.write_bytes(b"a" * 4096)
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                seen = target.read_bytes()
            except OSError:
                seen = b""
            if len(seen) != 4096 or len(set(seen)) != 1:
                torn.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(100):
            fresh = folder / "fresh"
            fresh.write_bytes(b"ab"[number % 2 : number % 2 + 1] * 4096)
            fresh.replace(target)
    finally:
        done.set()
        reader.join()
    if torn.is_set():
        return "a reader saw half a rename"
    with (folder / "lock").open("w") as first, (folder / "lock").open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
    return "file locks do not exclude"


def clock() -> CheckResult:
    resolution_s, now = time.get_clock_info("monotonic").resolution, datetime.now(UTC)
    text = f"monotonic to {resolution_s:.0e} s, wall clock {now:%Y-%m-%d %H:%M} UTC"
    if not 2025 <= now.year < 2100:
        return CheckResult("clock", "warn", f"{text}: the year is wrong", fix=["timedatectl set-ntp true"])
    if resolution_s > 1e-3:
        return CheckResult("clock", "warn", text, fix=["timings below a millisecond mean nothing here"])
    return CheckResult("clock", "ok", text)


def open_files() -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = {"soft": soft, "hard": hard}
    if soft < 1024:
        verdict: Verdict = "warn" if soft >= 128 else "fail"
        return CheckResult("open files", verdict, f"at most {soft} per process", fix=["ulimit -n 4096"], facts=facts)
    return CheckResult("open files", "ok", f"up to {soft} per process", facts=facts)


def encryption() -> CheckResult:
    import zmq

    if not zmq.has("curve"):
        text = "libzmq was built without CURVE: runs on one host work, several hosts do not"
        return CheckResult("encryption", "warn", text, fix=["pip install --force-reinstall --only-binary :all: pyzmq"])
    zmq.curve_keypair()
    return CheckResult("encryption", "ok", f"libzmq {zmq.zmq_version()} with CURVE")


# Two such processes, started like workers, all-reduce over Gloo on loopback. A file is their store: no port is needed.
PROBE = """
import json, os, sys, time
rank, path = int(sys.argv[1]), sys.argv[2]
import torch, torch.distributed as dist
from manyhands.comm.axis import connect
axis = connect(dist.FileStore(path, 2), rank, 2, address="127.0.0.1", device=torch.device("cpu"), timeout_s=50.0)
began, total = time.perf_counter(), torch.full((250_000,), float(rank + 1))
axis.sum_start(total, "checkup").wait()
took = time.perf_counter() - began
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
from manyhands.strategies.registry import refused_without
from manyhands.torch_private import ALL, NAMES, missing
refused = lambda one: one.needed_by if one.needed_by == ALL else refused_without(one.needed_by)
lacking = [[one.name, one.used_for, one.instead, refused(one)] for one in missing()]
seen = {"right": bool((total == 3).all()), "seconds": took, "accelerators": gpus, "names": len(NAMES)}
print(json.dumps({**seen, "lacking": lacking}))
axis.barrier("end of checkup")
sys.stdout.flush()
os._exit(0)  # torch's threads can abort a process that ends with its group open
"""


def all_reduce(probe: str = PROBE, timeout_s: float = PROBE_TIMEOUT_S) -> list[CheckResult]:
    """An all-reduce over two processes, and the accelerators that torch sees in them."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="manyhands-checkup-") as folder:
        command = [sys.executable, "-c", probe]
        pair = [
            subprocess.Popen(
                [*command, str(rank), f"{folder}/store"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        try:
            ends = [each.communicate(timeout=max(0.1, began + timeout_s - time.monotonic())) for each in pair]
        except subprocess.TimeoutExpired:
            return [_no_sum(f"two processes did not finish a sum within {timeout_s:g} s")]
        finally:
            for each in pair:
                each.kill()
                each.communicate()
    if any(each.returncode for each in pair):
        first = next(rank for rank, each in enumerate(pair) if each.returncode)
        last_line = (ends[first][1].strip().splitlines() or [f"exit code {pair[first].returncode}"])[-1]
        return [_no_sum(f"process {first} failed: {last_line}")]
    return _read_probe(json.loads(ends[0][0].splitlines()[-1]), time.monotonic() - began)


def _no_sum(text: str) -> CheckResult:
    fix = ["python -c 'import torch' to see whether torch loads", "a firewall may block loopback: ping 127.0.0.1"]
    return CheckResult("all-reduce", "fail", text, fix=fix)


def _read_probe(seen: dict[str, Any], took_s: float) -> list[CheckResult]:
    names = seen["accelerators"]
    accelerators = CheckResult(
        "accelerators", "ok", ", ".join(names) or "none; training on the CPU", facts={"names": names}
    )
    found = [accelerators, private_names(seen["names"], seen["lacking"])]
    if not seen["right"]:
        return [*found, _no_sum("two processes summed to a wrong result")]
    text = f"1 MB over 2 processes in {1000 * seen['seconds']:.1f} ms (torch starts in {took_s:.1f} s)"
    return [*found, CheckResult("all-reduce", "ok", text, facts={"seconds": seen["seconds"]})]


def private_names(num_names: int, lacking: list[tuple[str, str, str, list[str]]]) -> CheckResult:
    """Which of the private names of torch that are used this version has: `manyhands/torch_private.py`."""
    if not lacking:
        return CheckResult(
            "torch names", "ok", f"all {num_names} private names in use are there", facts={"lacking": []}
        )
    refused = sorted({"every strategy" if one == "*" else one for *_, needed_by in lacking for one in needed_by})
    text = f"{len(lacking)} of {num_names} private names in use are missing: " + "; ".join(
        f"{name}, for {used_for} ({instead or 'refused without'})" for name, used_for, instead, _ in lacking
    )
    verdict: Verdict = "fail" if "every strategy" in refused else "warn"
    fix = ["pip install 'torch>=2.13,<2.14'"]
    fix += [f"strategies that cannot run: {', '.join(refused)}"] if refused else []
    return CheckResult("torch names", verdict, text, fix=fix, facts={"lacking": [name for name, *_ in lacking]})
