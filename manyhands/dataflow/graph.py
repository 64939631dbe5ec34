"""The data-flow graph as a value: operations, the tensors between them, and the modules that they belong to. Pure.

The order of operations is the order in which they ran. Start reading at `DataflowGraph`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["INPUT", "OUTPUT", "DataflowGraph", "ModuleCall", "Operation", "TensorSpec", "amount", "cost_of", "shape_of"]

INPUT, OUTPUT = "input", "output"
"""Kinds of the operations that stand for what the model gets and returns."""


LEAST_SHOWN_S = 5e-6


class TensorSpec(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class ModuleCall(msgspec.Struct, frozen=True):
    name: str
    """Its name in the model."""
    kind: str
    """Its class."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Unique in the graph."""
    kind: str
    """Such as "linear"; the class, where a whole module is one operation."""
    scope: tuple[str, ...] = ()
    """Paths of the module calls that it ran in, the outermost first; a second call of a module has another path."""
    inputs: tuple[str, ...] = ()
    """Names of the operations whose outputs it gets."""
    outputs: tuple[TensorSpec, ...] = ()
    parameters: tuple[str, ...] = ()
    parameter_bytes: int = 0
    flops: int = 0
    """Of one forward pass."""
    seconds: float = 0.0
    """Measured, of one forward pass."""
    place: str = ""
    """Where the strategy computes it, one of `DataflowGraph.places`."""


class DataflowGraph(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """Its class."""
    captured_by: str
    """"torch.export", or "module hooks": then operations are calls of modules."""
    operations: list[Operation]
    """With the inputs before and the outputs after all others."""
    modules: dict[str, ModuleCall]
    """By the paths in scopes."""
    strategy: str = ""
    workers: int = 1
    places: list[str] = []
    """What colours mean, in their order."""
    notes: list[str] = []

    @property
    def flops(self) -> int:
        return sum(one.flops for one in self.operations)

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.operations)

    @property
    def parameter_bytes(self) -> int:
        """Each parameter once, however many operations use it."""
        seen: dict[tuple[str, ...], int] = {one.parameters: one.parameter_bytes for one in self.operations}
        return sum(seen.values())


def shape_of(spec: TensorSpec) -> str:
    """Such as "8x3x32x32 float32, 96.0 KiB"."""
    shape = "x".join(map(str, spec.shape)) or "scalar"
    return f"{shape} {spec.dtype}, {amount(spec.num_bytes, 'B', 1024)}"


def cost_of(flops: int, seconds: float, parameter_bytes: int = 0) -> str:
    """Such as "12.6 MFLOP · 0.41 ms · 36.0 KiB weights"; only what is not 0."""
    parts = [amount(flops, "FLOP", 1000)] if flops else []
    parts += [f"{1000 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.1f} s"] if seconds >= LEAST_SHOWN_S else []
    parts += [f"{amount(parameter_bytes, 'B', 1024)} weights"] if parameter_bytes else []
    return " · ".join(parts)


def amount(number: float, unit: str, factor: int) -> str:
    prefixes: Sequence[str] = ("", "Ki", "Mi", "Gi", "Ti") if factor == 1024 else ("", "k", "M", "G", "T", "P")
    for prefix in prefixes:
        if number < factor or prefix == prefixes[-1]:
            break
        number /= factor
    return f"{number:.0f} {prefix}{unit}" if not prefix else f"{number:.1f} {prefix}{unit}"
