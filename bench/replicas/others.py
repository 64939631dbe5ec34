"""Two workers, compared with sides that need separate processes: DDP as shipped, loops by hand, other libraries."""

from __future__ import annotations

from bench.driver.baton import Side, interleave
from bench.driver.sides import library, library_python, torch_side, trainer
from bench.programs.workloads import WORKLOADS
from bench.results.compare import Measured, Size, divide

__all__ = ["measure", "why_not"]

WORKERS = 2
MODEL = "mlp-10m"
LIBRARIES = {"tensorflow": "TensorFlow", "accelerate": "Accelerate", "lightning": "Lightning"}


def why_not(peer: str) -> str | None:
    if peer in LIBRARIES and not (library_python(peer).parent.parent / "installed").exists():
        return f"no environment for {LIBRARIES[peer]}; `make bench` makes it"
    return None


def measure(peer: str, size: Size) -> Measured:
    name = {"ddp": "DDP as shipped", "loops": "two loops by hand", **LIBRARIES}[peer]
    sides = [trainer(MODEL, WORKERS), _side(peer, name), _side(peer, f"{name} again")]
    found = [interleave(sides, blocks, size.block_s) for blocks in divide(size)]
    settings = {"model": WORKLOADS[MODEL].model, "batch": WORKLOADS[MODEL].batch * WORKERS, "workers": WORKERS}
    last = found[-1][1]
    extra = {"threads": last["of_sides"][sides[0].name]["threads"], "of_sides": last["of_sides"]}
    return Measured(
        [seconds for seconds, _ in found], {**settings, **extra, "steps_per_block": last["steps_per_block"]}
    )


def _side(peer: str, name: str) -> Side:
    match peer:
        case "ddp":
            return torch_side(name, "ddp", MODEL, WORKERS, allocator=False)
        case "loops":
            return torch_side(name, "alone", MODEL, WORKERS)
    return library(name, peer, MODEL, WORKERS)
