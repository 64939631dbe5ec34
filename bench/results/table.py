"""The targets for speed and memory, row by row: against which peer, and how much. Verdicts are computed here.

A row names a measurement (`bench` and `workload`), two of its sides and a target. Rows that name the same measurement
are measured together. No torch, no processes: only values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

__all__ = ["BENCHES", "OURS", "ROWS", "Row", "Target", "chosen", "verdict"]

OURS = "manyhands"

BENCHES = {
    "overhead": "One process: trainer against a loop by hand",
    "collectives": "Two ranks: sums in shared memory against Gloo",
    "ddp": "Two workers: mirrored against DistributedDataParallel on Gloo, in the same processes",
    "peers": "Two workers: mirrored against others in separate processes",
    "hosts": "Two hosts on a link of 1 Gbit/s, against DistributedDataParallel on Gloo",
    "accuracy": "Two hosts: what lossy sums cost in accuracy on handwritten digits",
    "averaging": "Two hosts on a link of 100 Mbit/s: DiLoCo, H=32, against DistributedDataParallel on Gloo",
    "memory": "Host memory: mirrored against DistributedDataParallel",
    "served": "Parameter servers: two workers, a step is one batch of each",
    "sharded": "Two workers: parameters divided, against fully_shard by hand on Gloo",
    "tensor": "Two workers: layers divided, against DTensor by hand on Gloo",
    "pipeline": "Two workers: a pipeline, against torch.distributed.pipelining by hand on Gloo",
    "keras": "Keras's fit in a scope, against Keras alone",
    "pictures": "Two loader processes that decode and augment JPEG files, against torch's DataLoader",
    "recovery": "Four workers of one host that die, hang and join, and what being ready for it costs",
}


class Target(NamedTuple):
    """`speed` is peer / ours, `time`, `memory` and `loss` are ours / peer, `points` what ours loses in percent.

    `median`, `p95` and `share` are of our side alone; a peer's numbers are only reported.
    """

    of: Literal["speed", "time", "memory", "loss", "points", "median", "p95", "share"]
    limit: float
    noise_counts: bool = False
    """The A/A ratio's distance from 1 is added to the limit: for targets that are as close to 1 as the noise."""

    @property
    def at_least(self) -> bool:
        return self.of in ("speed", "share")

    @property
    def is_ratio(self) -> bool:
        """Whether the target is relative to a peer."""
        return self.of not in ("median", "p95", "share")


class Row(NamedTuple):
    name: str
    bench: str
    workload: str
    what: str
    peer: str
    target: Target
    ours: str = OURS
    unit: Literal["s", "ms", "us", "MB", "%", "nats"] = "ms"

    @property
    def twin(self) -> str | None:
        """The peer once more, for the A/A control."""
        return f"{self.peer} again" if self.target.of in ("speed", "time") else None


def _faster(times: float, *, noise_counts: bool = False) -> Target:
    return Target("speed", times, noise_counts)


_MLP = "step, MLP of 10 M"
_TINY = "all-reduce 1 KB"
_LARGE = "4 workers, 100 M, AdamW"
_TEXT, _LOSS = "step, language model of 10 M", Target("loss", 1.02)
_BLOCKS = "step, 12 layers of 1024 x 1024"
_LEVEL = _faster(1.0, noise_counts=True)
_KERAS = "step of Keras's fit, MLP of 10 M"
_KILL = "kill -9 to next step"
_STALL = "stall at a join"
_ASYNC = "step, MLP of 10 M, async"
_SPARSE = "step, 26 of 10 M ids per row, rows of 16, async"
_SERVER_KILL = "kill -9 of a server to the next applied push"

ROWS = (
    Row("overhead-cnn", "overhead", "cnn", "step, CNN", "by hand", Target("time", 1.02, noise_counts=True)),
    Row("overhead-mlp", "overhead", "mlp", "step, MLP of 0.7 M", "by hand", Target("time", 1.02, noise_counts=True)),
    Row("shared-gloo", "collectives", "shared", "all-reduce 100 MB in shared memory", "Gloo", _faster(4)),
    Row("shared-copy", "collectives", "shared", "all-reduce 100 MB in shared memory", "one copy", Target("time", 1.6)),
    Row("ordinary-gloo", "collectives", "ordinary", "all-reduce 100 MB of ordinary tensors", "Gloo", _faster(1.6)),
    Row("latency-gloo", "collectives", "latency", _TINY, "Gloo", _faster(20), unit="us"),
    Row("ddp-mlp-10m", "ddp", "mlp-10m", _MLP, "DDP", _faster(1.3)),
    Row("ddp-2000-tensors", "ddp", "2000-tensors", "step, 2,000 small tensors", "DDP", _faster(1.5)),
    Row("ddp-cnn", "ddp", "cnn", "step, CNN", "DDP", _faster(1, noise_counts=True)),
    Row("ddp-transformer", "ddp", "transformer", "step, transformer of 10 M", "DDP", _faster(1.2)),
    Row("ddp-small-tensors", "ddp", "small-tensors", "step, 202 small tensors", "DDP", _faster(1, noise_counts=True)),
    Row("ddp-as-shipped", "peers", "ddp", _MLP, "DDP as shipped", _faster(1.45)),
    Row("two-loops", "peers", "loops", _MLP, "two loops by hand", _faster(0.95)),
    Row("tensorflow", "peers", "tensorflow", _MLP, "TensorFlow", _faster(1)),
    Row("accelerate", "peers", "accelerate", _MLP, "Accelerate", _faster(1)),
    Row("lightning", "peers", "lightning", _MLP, "Lightning", _faster(1)),
    Row("hosts-bf16", "hosts", "mlp-10m", f"{_MLP}, bf16", "DDP", _faster(1.6), ours="bf16"),
    Row("hosts-int8", "hosts", "mlp-10m", f"{_MLP}, int8", "DDP", _faster(2.2), ours="int8"),
    Row("hosts-two-each", "hosts", "two-each", f"{_MLP}, two workers on each host", "DDP", _faster(1.2), ours="exact"),
    Row("hosts-two-bf16", "hosts", "two-each", f"{_MLP}, the same, bf16", "DDP", _faster(1.6), ours="bf16"),
    Row("hosts-two-int8", "hosts", "two-each", f"{_MLP}, the same, int8", "DDP", _faster(2.2), ours="int8"),
    Row("accuracy-bf16", "accuracy", "digits", "accuracy, bf16", "exact", Target("points", 0.5), "bf16", "%"),
    Row("accuracy-int8", "accuracy", "digits", "accuracy, int8", "exact", Target("points", 0.5), "int8", "%"),
    Row("diloco-link", "averaging", "link", _TEXT, "DDP", _faster(8), ours="DiLoCo"),
    Row("diloco-bf16", "averaging", "link", f"{_TEXT}, bf16", "DDP", _faster(8), ours="DiLoCo, bf16"),
    Row("diloco-loss", "averaging", "loss", "held-out loss after as many steps", "DDP", _LOSS, "DiLoCo", "nats"),
    Row("served-loops", "served", "loops", _ASYNC, "two loops by hand", _faster(0.75)),
    Row("served-tensorflow", "served", "tensorflow", _ASYNC, "TensorFlow", _faster(1.7)),
    Row("served-ray", "served", "ray", _ASYNC, "Ray as documented", _faster(1.7)),
    Row("served-ray-lean", "served", "ray-lean", _ASYNC, "Ray without copies", _faster(1)),
    Row("served-tensorflow-16", "served", "tensorflow-16", _ASYNC, "TensorFlow", _faster(3)),
    Row("served-ray-16", "served", "ray-16", _ASYNC, "Ray as documented", _faster(3)),
    Row("served-ray-lean-16", "served", "ray-lean-16", _ASYNC, "Ray without copies", _faster(1)),
    Row("served-one-slow", "served", "one-slow", "step, one of 2 workers 5x slower, async", "sync", _faster(1.8)),
    Row("served-often-slow", "served", "often-slow", "step, 4 workers 5x slow in 20 %, ssp", "sync", _faster(1.35)),
    Row("push-pull", "served", "push-pull", "push and pull 100 MB", "two copies", Target("time", 4)),
    Row("sparse-tensorflow", "served", "sparse-tensorflow", _SPARSE, "TensorFlow", _faster(3)),
    Row("sparse-torch", "served", "sparse-torch", _SPARSE, "nn.Embedding", _faster(1)),
    Row("served-kill", "served", "kills", _SERVER_KILL, "-", Target("median", 3), unit="s"),
    Row("served-kill-p95", "served", "kills", f"{_SERVER_KILL}, 95 of 100", "-", Target("p95", 3), unit="s"),
    Row("recovery-kill", "recovery", "kills", f"{_KILL}, median", "torchrun", Target("median", 0.3), unit="s"),
    Row("recovery-kill-p95", "recovery", "kills", f"{_KILL}, 95 of 100", "torchrun", Target("p95", 1.0), unit="s"),
    Row("recovery-join", "recovery", "kills", "stall when a worker joins", "-", Target("median", 0.1), _STALL, "s"),
    Row("recovery-stop", "recovery", "stop", "SIGSTOP to next step", "-", Target("p95", 5.0), unit="s"),
    Row("recovery-hang", "recovery", "hang", "deadlock to next step", "-", Target("p95", 5.0), unit="s"),
    Row("goodput", "recovery", "goodput", "steps, a kill every 15 s", "-", Target("share", 0.85), "goodput", "%"),
    Row("uptime", "recovery", "goodput", "time not in recovery, the same", "-", Target("share", 0.95), "uptime", "%"),
    Row("elastic-cost", "recovery", "elastic", "step, elastic", "static", Target("time", 1.02, noise_counts=True)),
    Row("elastic-quick", "recovery", "elastic-quick", "quick step, elastic", "static", Target("time", 1.02, True)),
    Row("exact-cost", "recovery", "exact", "step, exact", "default", Target("time", 1.1)),
    Row("sharded-mlp", "sharded", "mlp-10m", f"{_MLP}, sharded", "fully_shard", Target("time", 1.02, True)),
    Row("sharded-text", "sharded", "transformer", f"{_TEXT}, sharded", "fully_shard", Target("time", 1.02, True)),
    Row("tensor-mlp", "tensor", "mlp-10m", f"{_MLP}, tensor", "DTensor", Target("time", 1.02, True)),
    Row("tensor-text", "tensor", "transformer", f"{_TEXT}, tensor", "DTensor", Target("time", 1.02, True)),
    Row("pipeline-gpipe", "pipeline", "gpipe", f"{_BLOCKS}, gpipe", "pipelining", Target("time", 1.02, True)),
    Row("pipeline-1f1b", "pipeline", "1f1b", f"{_BLOCKS}, 1f1b", "pipelining", Target("time", 1.02, True)),
    Row(
        "pipeline-loop", "pipeline", "interleaved", f"{_BLOCKS}, interleaved", "pipelining", Target("time", 1.02, True)
    ),
    Row("keras-two", "keras", "mlp-10m", f"{_KERAS}, 2 workers", "Keras, 1 thread", _faster(1.6), "2 workers"),
    Row("keras-cores", "keras", "mlp-10m", f"{_KERAS}, 2 workers", "Keras, all cores", _faster(0.9), "2 workers"),
    Row("keras-one", "keras", "mlp-10m", f"{_KERAS}, 1 worker", "Keras, 1 thread", _LEVEL, "1 worker"),
    Row("pictures", "pictures", "jpeg", "a picture, decoded and augmented", "DataLoader", _LEVEL),
    Row("memory", "memory", "keep", _LARGE, "DDP", Target("memory", 0.5), unit="MB"),
    Row("memory-system", "memory", "system", f"{_LARGE}, system allocator", "DDP", Target("memory", 0.5), unit="MB"),
)


def chosen(names: list[str]) -> list[Row]:
    """The rows with these names of rows or benchmarks; without names, all."""
    known = {row.name for row in ROWS} | BENCHES.keys()
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"there is no {', '.join(unknown)}; there are {', '.join([*BENCHES, *(r.name for r in ROWS)])}"
        )
    return [row for row in ROWS if not names or row.name in names or row.bench in names]


def verdict(target: Target, value: Mapping[str, float], control: Mapping[str, float] | None) -> dict[str, Any]:
    """Whether the value reaches the target, by how much it misses, and whether the interval makes that certain.

    `missed_by` is a fraction of the limit; for `points`, it is in points.
    """
    slack = abs(control["middle"] - 1.0) if target.noise_counts and control else 0.0
    limit = target.limit - slack if target.at_least else target.limit + slack
    met = _reaches(target, value["middle"], limit)
    short = limit - value["middle"] if target.at_least else value["middle"] - limit
    return {
        "of": target.of,
        "target": target.limit,
        "limit": limit,
        "met": met,
        "clear": len({_reaches(target, value[end], limit) for end in ("low", "middle", "high")}) == 1,
        "missed_by": None if met else short if target.of == "points" else short / limit,
    }


def _reaches(target: Target, value: float, limit: float) -> bool:
    return value >= limit if target.at_least else value <= limit
