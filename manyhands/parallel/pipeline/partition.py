"""Where a model is cut into stages, and what a stage is: a range of blocks in the order in which the model calls them.

The modules of a `nn.Sequential` are its blocks; any other model's come from `exported_stages`. `balance` decides where
to cut from the cost of each block, `starts_at` from the user's names. Start reading at `BlockRange` and `balance`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn

from manyhands.errors import SpecError
from manyhands.parallel.pipeline.stage_blocks import is_chain, names_in_chain

__all__ = ["BlockRange", "Blocks", "Chain", "Inputs", "balance", "shared_between", "starts_at"]


class Inputs(NamedTuple):
    """The arguments of a call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class BlockRange(Protocol):
    """Consecutive blocks, on the modules and parameters of the user's model (no copies).

    Every part gets the model's inputs, which all ranks have, and, except for the first, what the part before it
    returned. The last part returns the model's output.
    """

    @property
    def names(self) -> list[str]:
        """The names of its blocks in the user's model."""

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the user's model. A tied weight may be in several parts."""

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules that it calls, by name."""

    def __call__(self, inputs: Inputs, carried: Any) -> Any: ...

    def to_send(self, output: Any) -> Any:
        """The model's output as plain lists and tensors, for ranks that did not compute it; from the last part."""

    def from_sent(self, inputs: Inputs, sent: Any) -> Any:
        """The model's output, rebuilt from `to_send`'s result. Any part can do it."""


class Blocks(Protocol):
    """A model that can be cut between any two of its blocks."""

    @property
    def names(self) -> list[str]: ...

    def parts(self, starts: Sequence[int]) -> Sequence[BlockRange]:
        """Cut before the blocks with these numbers, of which the first is 0."""


# ---- where to cut ----------------------------------------------------------------------------------------------


def balance(
    costs: Sequence[float], stages: int, memory: Sequence[float] | None = None, pins: Mapping[int, int] | None = None
) -> list[int]:
    """Where each stage begins, so that the most expensive stage costs least; among such cuts, the one whose largest
    stage is smallest.

    `pins` maps blocks to the stages that must have them. `SpecError` if there is no such cut.
    """
    pins = pins or {}
    count = len(costs)
    if stages > count:
        raise SpecError(
            f"{stages} stages need as many blocks; the model has {count}.",
            fix=[f"stages={count}", "smaller blocks: a longer nn.Sequential, or more modules in the model"],
        )
    sizes = [0.0] * count if memory is None else list(memory)
    cheapest = _smallest(costs, stages, sizes, math.inf, pins)
    if cheapest is None:
        pinned = ", ".join(f"block {block} on stage {stage}" for block, stage in sorted(pins.items()))
        raise SpecError(
            f"No cut into {stages} stages has {pinned}: a stage is one or more consecutive blocks.",
            fix=["other stages for these blocks, in the order of the blocks", "no place="],
        )
    smallest = _smallest(sizes, stages, costs, cheapest[0], pins)
    assert smallest is not None
    return smallest[1]


_Cut = tuple[float, list[int]]
"""The value of its largest stage, and where stages begin."""


def _smallest(
    values: Sequence[float], stages: int, others: Sequence[float], cap: float, pins: Mapping[int, int]
) -> _Cut | None:
    """The cut that minimises the largest stage's sum of `values`, with at most `cap` of `others` per stage, or None."""
    best: list[_Cut | None] = [(0.0, [])] + [None] * len(values)
    for stage in range(stages):
        excluded = {block for block, wanted in pins.items() if wanted != stage}
        best = [None, *(_add_stage(best, values, others, stop, cap, excluded) for stop in range(1, len(values) + 1))]
    return best[-1]


def _add_stage(
    before: Sequence[_Cut | None],
    values: Sequence[float],
    others: Sequence[float],
    stop: int,
    cap: float,
    excluded: Collection[int],
) -> _Cut | None:
    """The best cut of the first `stop` blocks with one stage more than in `before`, without blocks of other stages."""
    found: _Cut | None = None
    value = other = 0.0
    for start in range(stop - 1, -1, -1):
        value, other = value + values[start], other + others[start]
        if other > cap or start in excluded:
            break
        rest = before[start]
        if rest is not None and (found is None or max(rest[0], value) < found[0]):
            found = (max(rest[0], value), [*rest[1], start])
    return found


def starts_at(names: Sequence[str], at: Sequence[str], stages: int) -> list[int]:
    """Where stages begin if the second and later ones begin with these blocks, or with modules that contain them."""
    if len(at) != stages - 1:
        raise SpecError(
            f"{stages} stages begin at {stages - 1} blocks besides the first; {len(at)} are named: {', '.join(at)}.",
            fix=[f"stages={len(at) + 1}"],
        )
    starts = [0, *(_number(names, name) for name in at)]
    if sorted(set(starts)) != starts:
        raise SpecError(
            f"Stages begin at blocks {', '.join(at)}, which the model calls in another order, or as its first block.",
            fix=[f"blocks in the order of their calls: {', '.join(names[1:])}"],
        )
    return starts


def _number(names: Sequence[str], wanted: str) -> int:
    for number, name in enumerate(names):
        if name == wanted or name.startswith(f"{wanted}."):
            return number
    raise SpecError(f"No block of the model is {wanted!r}.", fix=[f"one of {', '.join(names)}"])


def shared_between(parts: Sequence[BlockRange]) -> dict[str, list[int]]:
    """Tied weights that several stages have, by the first of their names: their gradients must be summed."""
    stages_by_param: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for number, part in enumerate(parts):
        for name, param in part.params.items():
            names.setdefault(id(param), name)
            stages = stages_by_param.setdefault(id(param), [])
            if number not in stages:
                stages.append(number)
    return {names[key]: stages for key, stages in stages_by_param.items() if len(stages) > 1}


# ---- a Sequential ----------------------------------------------------------------------------------------------


class Chain:
    """The blocks of a `nn.Sequential`, which may contain others."""

    def __init__(self, model: nn.Module) -> None:
        assert is_chain(model)
        self._model, self.names = model, names_in_chain(model)

    def parts(self, starts: Sequence[int]) -> list[_Links]:
        stops = [*starts[1:], len(self.names)]
        return [_Links(self._model, self.names[a:b], a == 0) for a, b in zip(starts, stops, strict=True)]


class _Links:
    def __init__(self, model: nn.Module, names: list[str], first: bool) -> None:
        self._model, self.names, self._first = model, names, first

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {name: self._model.get_submodule(name) for name in self.names}

    @property
    def params(self) -> dict[str, nn.Parameter]:
        return params_below(self.modules)

    def __call__(self, inputs: Inputs, carried: Any) -> Any:
        value = _only_argument(inputs) if self._first else carried
        for module in self.modules.values():
            value = module(value)
        return value

    def to_send(self, output: Any) -> Any:
        return output

    def from_sent(self, inputs: Inputs, sent: Any) -> Any:
        return sent


def params_below(modules: dict[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Their parameters, by name."""
    return {
        f"{prefix}.{name}": param for prefix, module in modules.items() for name, param in module.named_parameters()
    }


def _only_argument(inputs: Inputs) -> Any:
    if len(inputs.args) != 1 or inputs.kwargs:
        raise TypeError(f"nn.Sequential takes one argument, not {len(inputs.args) + len(inputs.kwargs)}")
    return inputs.args[0]
