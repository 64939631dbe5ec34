"""A campaign of simulated runs: `python -m tests.simulation --seeds 50000`, or one of them: `--seed 17`.

With --served, of runs with parameter servers.
"""

from __future__ import annotations

import argparse
import sys
import time

from . import served_checker, served_world
from .checker import violations
from .history import Fault, Generation
from .world import run


def replay_served(seed: int) -> int:
    history = served_world.run(seed)
    print(history.interval, f"ahead={history.ahead} servers={history.num_servers} rows={history.num_rows}")
    for event in history.events:
        print(f"{event.at:8.3f}  {event}")
    problems = served_checker.violations(history)
    print("\n".join(problems) or "no violation")
    return bool(problems)


def campaign_served(first: int, count: int) -> int:
    began, faults, dropped, failed = time.monotonic(), 0, 0, 0
    for seed in range(first, first + count):
        history = served_world.run(seed)
        dropped += history.dropped
        faults += len(history.of(Fault))
        if problems := served_checker.violations(history):
            failed += 1
            print(f"seed {seed}: {problems[0]}  (python -m tests.simulation --served --seed {seed})", flush=True)
    took = time.monotonic() - began
    print(f"{count} runs with servers, {faults} faults, {dropped} rows lost to others in {took:.0f} s; {failed} failed")
    return bool(failed)


def replay(seed: int) -> int:
    history = run(seed)
    for event in history.events:
        print(f"{event.at:8.3f}  {event}")
    print(f"ended at {history.ended_at} with {history.exit_code}: {history.reason}")
    problems = violations(history)
    print("\n".join(problems) or "no violation")
    return bool(problems)


def campaign(first: int, count: int) -> int:
    began, faults, generations, failed = time.monotonic(), 0, 0, []
    for seed in range(first, first + count):
        history = run(seed)
        faults += len(history.of(Fault))
        generations += len(history.of(Generation))
        if problems := violations(history):
            failed.append(seed)
            print(f"seed {seed}: {problems[0]}  (python -m tests.simulation --seed {seed})", flush=True)
    took = time.monotonic() - began
    print(f"{count} runs, {faults} faults, {generations} generations in {took:.0f} s; {len(failed)} failed")
    return bool(failed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="one run, printed event by event")
    parser.add_argument("--served", action="store_true", help="runs with parameter servers")
    options = parser.parse_args()
    if options.seed is not None:
        return (replay_served if options.served else replay)(options.seed)
    return (campaign_served if options.served else campaign)(options.first, options.seeds)


if __name__ == "__main__":
    sys.exit(main())
