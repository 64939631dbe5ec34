"""`python -m bench.recovery.soak [--kills 300]`: one exact run under hundreds of kills, against the undisturbed one.

Nothing may be lost or left behind: the last checkpoint is bitwise equal to that of a run of as many steps without a
kill; the ledger is clean; launcher and coordinator hold no more descriptors or memory than after the first kills; and
when the run is over, all of its processes have ended. Exits with 1 if any of this is false.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from bench.driver.child import ROOT, ScriptFailed
from bench.driver.sides import MH, plain_environment
from bench.recovery.recovery import RECOVER_S, WORKERS, Struck, striking
from bench.replicas.memory import bytes_of
from manyhands.chaos.chaos_run import compare_weights
from manyhands.control.messages.status_messages import MemberStatus
from manyhands.control.session.run_client import query, request_stop
from manyhands.observe.run_audit import audit_run

SCRIPT = "bench.recovery.recovery_script"
EXACT = ("--exact",)
PREEMPTED = 75
STOP_S, REFERENCE_S = 60.0, 3600.0
# The longest pause before a kill: some kills hit a run that has just lost another worker.
PAUSE_S = 1.0
WARM_UP_KILLS = 10
# What a kill may leave behind, on average.
BYTES_PER_KILL, DESCRIPTORS_PER_KILL = 50_000, 0.05
SPARE_BYTES, SPARE_DESCRIPTORS = 10_000_000, 8


class Held(NamedTuple):
    """What launcher and coordinator hold together."""

    descriptors: int
    num_bytes: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.recovery.soak", description="One run, hundreds of kills.")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="manyhands-soak-") as folder:
        found = soak(asked.kills, asked.seed, Path(folder) / "reference")
    print(json.dumps(found, indent=2))
    return 1 if found["problems"] else 0


def soak(num_kills: int, seed: int, reference: Path) -> dict[str, Any]:
    draw, recovered, early = random.Random(seed), [], None
    with striking(SCRIPT, flags=EXACT) as run:
        run.settled()
        launcher = run.process.pid
        for number in range(num_kills):
            recovered.append(_kill(run, draw))
            if number + 1 == min(WARM_UP_KILLS, num_kills):
                early = _held_when_settled(run, launcher)
            _say(f"kill {number + 1} of {num_kills}: {recovered[-1]:.2f} s")
        late = _held_when_settled(run, launcher)
        ours = [launcher, *(child.pid for child in psutil.Process(launcher).children(recursive=True))]
        problems = _stop(run)
        left = [pid for pid in ours if psutil.pid_exists(pid)]
        ledger = audit_run(run.run_dir)
        _say(f"undisturbed run of {ledger.last_step} steps ...")
        _run_undisturbed(reference, ledger.last_step)
        weights = compare_weights(run.run_dir / "checkpoints", reference / "run" / "checkpoints")
    assert early is not None
    problems += [*ledger.problems, *_leaks(early, late, num_kills - WARM_UP_KILLS)]
    problems += [f"process {pid} outlived its run" for pid in left]
    if not weights.equal:
        problems.append(
            f"weights of step {weights.step} differ from step {weights.reference_step}: {weights.different}"
        )
    return {
        "kills": num_kills,
        "seed": seed,
        "steps": ledger.last_step,
        "recovered_median_s": round(median(recovered), 3),
        "recovered_most_s": round(max(recovered), 3),
        "generations": ledger.generations,
        "unrecorded_steps": ledger.unrecorded,
        "steps_lost": ledger.steps_lost,
        "samples_lost": ledger.samples_lost,
        "samples_repeated": ledger.samples_repeated,
        "held_early": early._asdict(),
        "held_late": late._asdict(),
        "tensors_equal": weights.tensors if weights.equal else 0,
        "problems": problems,
    }


def _kill(run: Struck, draw: random.Random) -> float:
    """Kill a working worker, the chief included, but never the last one: no worker could continue the run."""
    time.sleep(draw.uniform(0.0, PAUSE_S))
    deadline = time.monotonic() + RECOVER_S
    while True:
        status = query(run.run_dir)
        members = [one for one in status.members if _is_at_work(one)]
        if len(members) > 1:
            return run.strike("kill", draw.choice(members), status)
        if time.monotonic() > deadline:
            raise ScriptFailed(f"no second worker within {RECOVER_S:g} s")
        time.sleep(0.05)


def _is_at_work(member: MemberStatus) -> bool:
    return member.status == "live" and member.rank >= 0 and member.step is not None


def _held_when_settled(run: Struck, launcher: int) -> Held:
    coordinator = run.settled().coordinator_pid
    processes = [psutil.Process(pid) for pid in (launcher, coordinator)]
    return Held(sum(one.num_fds() for one in processes), bytes_of([launcher, coordinator]))


def _leaks(early: Held, late: Held, kills: int) -> list[str]:
    found = []
    more = late.descriptors - early.descriptors
    if more > SPARE_DESCRIPTORS + DESCRIPTORS_PER_KILL * max(kills, 0):
        found.append(f"{more} more descriptors are open than after {WARM_UP_KILLS} kills")
    grown = late.num_bytes - early.num_bytes
    if grown > SPARE_BYTES + BYTES_PER_KILL * max(kills, 0):
        found.append(f"{grown / 1e6:.1f} MB more are held than after {WARM_UP_KILLS} kills")
    return found


def _stop(run: Struck) -> list[str]:
    """Request a checkpoint and the end of the run."""
    request_stop(run.run_dir)
    try:
        code = run.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        return [f"the run did not end within {STOP_S:g} s of being asked to"]
    return [] if code == PREEMPTED else [f"the run ended with {code}, not with {PREEMPTED}"]


def _run_undisturbed(folder: Path, steps: int) -> None:
    folder.mkdir()
    run = ("run", "-n", str(WORKERS), "--threads", "1", "--ui", "none", "--run-dir", str(folder / "run"), *EXACT)
    command = [*MH, *run, "-m", SCRIPT, str(folder), str(steps), "0"]  # waiting in a step changes no number
    environment = plain_environment(allocator=False)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=REFERENCE_S)
    if done.returncode:
        raise ScriptFailed(f"the undisturbed run ended with {done.returncode}\n{done.stderr[-2000:]}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
