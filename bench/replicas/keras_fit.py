"""Keras's fit in a scope against Keras alone: `python -m bench.replicas.keras_fit [BLOCKS] [BLOCK_S]`.

SGD with momentum on the 10 M MLP, the same global batch on all sides: two workers of one thread, one worker, Keras with
one thread twice (the second is the A/A control), and Keras with all cores. Prints medians and quartiles of ratios
within rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median, quantiles

from bench.driver.baton import Process, Side, interleave
from bench.driver.sides import MH, plain_environment

ROWS = 256


def ours(workers: int) -> Side:
    def processes(folder: str) -> list[Process]:
        run = ("run", "-n", str(workers), "--threads", "1", "--ui", "none", "--run-dir", f"{folder}/run")
        command = [*MH, *run, "-m", "bench.replicas.keras_side", "scope", str(ROWS), "1"]
        return [Process(command, plain_environment(allocator=False))]

    return Side(f"scope, {workers} of 1 thread", workers, processes)


def keras(name: str, threads: int) -> Side:
    command = (sys.executable, "-m", "bench.replicas.keras_side", "keras", str(ROWS), str(threads))
    environment = plain_environment()
    environment.pop("OMP_NUM_THREADS" if threads == 0 else "", None)
    return Side(name, 1, lambda _: [Process(command, environment | {"RANK": "0"})])


def main() -> None:
    num_blocks, block_s = (int(sys.argv[1]) if len(sys.argv) > 1 else 8), float(sys.argv[2] if len(sys.argv) > 2 else 3)
    sides = [ours(2), ours(1), keras("keras, 1 thread", 1), keras("keras, 1 thread again", 1), keras("keras, all", 0)]
    seconds, facts = interleave(sides, num_blocks, block_s)
    print(facts)
    for name, values in seconds.items():
        print(f"{name:24} {1e3 * median(values):8.1f} ms per step")
    for first, second in (
        ("scope, 2 of 1 thread", "keras, 1 thread"),
        ("scope, 2 of 1 thread", "keras, all"),
        ("scope, 1 of 1 thread", "keras, 1 thread"),
        ("keras, 1 thread again", "keras, 1 thread"),
    ):
        print(f"speed of {first} / {second}: {_ratio(seconds[second], seconds[first])}")


def _ratio(peer: Sequence[float], mine: Sequence[float]) -> str:
    values = [a / b for a, b in zip(peer, mine, strict=True)]
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.2f} (quartiles {low:.2f} to {high:.2f}, {len(values)} rounds)"


if __name__ == "__main__":
    main()
