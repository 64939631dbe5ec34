"""What a forward pass changes: batch statistics and other buffers, with results that do not depend on the rank.

Every slice starts with the step's buffers. Batch statistics are replayed in slice order, as if one process had computed
one slice after the other; any other changed buffer gets slice 0's value. Parameters without gradient that a forward
pass changes (as Keras' moving averages are) count as buffers.

Per step: `begin`; per slice `enter` before its forward, `leave` after it (which returns the slice's contribution as
one flat tensor, for the exchange) and `put_back` after its backward; then `commit` with the contributions of all ranks.
Start reading at `StepBuffers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from manyhands.errors import TrainingFailed
from manyhands.torch_private import BATCH_NORMS

__all__ = ["ForeignState", "NormLayer", "StepBuffers", "changing_state"]

# A frozen parameter this large is not a statistic: it is watched, but no copy is kept to restore it from.
MAX_SHADOW_NUMEL = 2**20


@dataclass(frozen=True)
class NormLayer:
    """Moving averages of one layer: after c calls with statistics s, `a = keep**c * a + ...`; None: cumulative mean."""

    averages: tuple[Tensor, ...]
    keep: float | None
    calls: Tensor | None
    """The layer's call counter; without one, every write to the first average counts as one call."""


@dataclass(frozen=True)
class ForeignState:
    """State that a library other than torch keeps in a model; the integration of that library fills it in."""

    norms: tuple[NormLayer, ...] = ()
    seeds: tuple[Tensor, ...] = ()
    """States of the model's random generators. They are not buffers: `in_slice` sets and restores them."""
    divided: tuple[Tensor, ...] = ()
    """Frozen parameters that are sharded between steps: no forward pass changes them."""
    in_slice: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around the forward pass of a slice, inside its randomness."""
    out_of_slice: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered inside of that for a forward pass that belongs to no slice: it runs in the mode that the modules are in,
    and generators are restored afterwards."""


def norm_layers(model: nn.Module) -> list[NormLayer]:
    layers = []
    for module in model.modules():
        if isinstance(module, BATCH_NORMS) and module.track_running_stats:
            mean, var, calls = module.running_mean, module.running_var, module.num_batches_tracked
            if mean is not None and var is not None:
                keep = None if module.momentum is None else 1.0 - module.momentum
                layers.append(NormLayer((mean, var), keep, calls))
    return layers


def changing_state(model: nn.Module, trained: Collection[Tensor]) -> list[Tensor]:
    """Every tensor that a forward pass may change: buffers, and parameters that are not trained and not large."""
    known = {id(param) for param in trained}
    frozen = [one for one in model.parameters() if id(one) not in known and one.numel() <= MAX_SHADOW_NUMEL]
    return [*model.buffers(), *frozen]


class StepBuffers:
    """Keeps the step's buffers and combines the slices' changes.

    After `commit`, buffers are bitwise equal on every rank and do not depend on which rank ran which slice. With one
    rank and one slice in the step nothing is copied or replayed: the forward pass has already left the right values.
    """

    def __init__(self, model: nn.Module, foreign: ForeignState | None = None) -> None:
        foreign = foreign or ForeignState()
        self._layers = [*norm_layers(model), *foreign.norms]
        statistics = {id(t) for layer in self._layers for t in (*layer.averages, layer.calls) if t is not None}
        self._others = _OtherBuffers(model, statistics | {id(one) for one in (*foreign.seeds, *foreign.divided)})
        self._averages = [t for layer in self._layers for t in layer.averages]
        self._owner = torch.tensor(
            [i for i, layer in enumerate(self._layers) for t in layer.averages for _ in range(t.numel())],
            dtype=torch.int64,
        )
        self._keep = torch.tensor([1.0 if x.keep is None else x.keep for x in self._layers], dtype=torch.float64)
        self._cumulative = torch.tensor([layer.keep is None for layer in self._layers], dtype=torch.bool)
        self._nothing = torch.empty(0, dtype=torch.float64)
        self._is_in_step = False

    @property
    def statistics(self) -> tuple[Tensor, ...]:
        """Moving averages: layers write them in forward and do not read them in backward."""
        return tuple(self._averages)

    def begin(self, num_slices: int, num_ranks: int = 1) -> None:
        self._is_single, self._is_in_step = num_slices == num_ranks == 1, True
        if not self._is_single:
            self._versions = [t._version for t in self._averages]
            self._start, self._start_calls = self._read()
            self._others.begin()

    def refresh(self) -> None:
        """Take over the buffers' values, which were changed from outside."""
        self._others.refresh()

    @property
    def numel(self) -> int:
        """Length of one slice's contribution to this step."""
        return 0 if self._is_single else self.most_numel

    @property
    def most_numel(self) -> int:
        """The same for a step with several slices or ranks."""
        return len(self._owner) + len(self._layers)

    def enter(self, v: int) -> None:
        if self._is_single:
            return
        self._versions = [t._version for t in self._averages]
        self._others.enter()

    def leave(self, v: int) -> Tensor:
        """The statistics after slice `v`: averages and calls, as fp64."""
        if self._is_single:
            return self._nothing
        self._others.leave(v)
        averages, calls = self._read()
        return torch.cat([averages, calls - self._start_calls])

    def apart(self, contribution: Tensor) -> Tensor:
        """The contribution relative to this step's buffers, to replay it on others: what its calls added."""
        if self._is_single or not self._layers:
            return contribution
        after, made = contribution[: len(self._owner)], contribution[len(self._owner) :]
        return torch.cat([self._added(after, made), made])

    def united(self, earlier: Tensor, later: Tensor) -> Tensor:
        """One contribution from two of the same slice, through different layers."""
        if self._is_single:
            return self._nothing
        size = len(self._owner)
        touched = later[size:] > 0
        averages = torch.where(touched[self._owner], later[:size], earlier[:size])
        return torch.cat([averages, earlier[size:] + later[size:]])

    def joined(self, contributions: Sequence[Tensor]) -> Tensor:
        """One relative contribution from those of several slices, as if one slice had made all the calls."""
        total, numel = contributions[0], len(self._owner)
        for later in contributions[1:]:
            calls = later[numel:]
            keep = torch.where(self._cumulative, torch.ones_like(calls), self._keep**calls)
            total = torch.cat([keep[self._owner] * total[:numel] + later[:numel], total[numel:] + calls])
        return total

    def put_back(self) -> None:
        """Restore the step's values. Called after backward, which may still need the values that forward left."""
        if not self._is_single:
            self._write(self._start, self._start_calls)
            self._others.put_back()

    def drop(self) -> None:
        """The same at any point of a step: in the middle of a slice, or between two. Outside of a step, do nothing."""
        if self._is_in_step and not self._is_single:
            self._write(self._start, self._start_calls)
            self._others.drop()

    def commit(self, contributions: Sequence[Tensor], *, apart: bool = False) -> None:
        """End the step: replay every slice's contribution in slice order; `apart` if they are relative ones."""
        self._is_in_step = False
        if self._is_single or not self._layers:
            return
        averages, calls = self._start, self._start_calls
        for contribution in contributions:
            averages, calls = (self._add if apart else self._replay)(averages, calls, contribution)
        self._write(averages, calls)

    def first_changes(self) -> bytes:
        """Buffers other than statistics that slice 0 changed, for the ranks that did not run it; empty if none."""
        return b"" if self._is_single else self._others.pack()

    def apply_first_changes(self, data: bytes) -> None:
        if data:
            self._others.unpack(data)

    def _replay(self, averages: Tensor, calls: Tensor, contribution: Tensor) -> tuple[Tensor, Tensor]:
        after, made = contribution[: len(self._owner)], contribution[len(self._owner) :]
        untouched = bool((calls == self._start_calls).all())
        if untouched:  # the first slice: its result is exactly what one process would have
            return torch.where((made > 0)[self._owner], after, averages), calls + made
        return self._add(averages, calls, torch.cat([self._added(after, made), made]))

    def _added(self, after: Tensor, made: Tensor) -> Tensor:
        """What a slice's calls, which started with the step's averages, added to them."""
        keep, scale = self._factors(self._start_calls, made)
        return (after - keep[self._owner] * self._start) / scale[self._owner]

    def _add(self, averages: Tensor, calls: Tensor, contribution: Tensor) -> tuple[Tensor, Tensor]:
        added, made = contribution[: len(self._owner)], contribution[len(self._owner) :]
        keep, scale = self._factors(calls, made)
        replayed = keep[self._owner] * averages + scale[self._owner] * added
        return torch.where((made > 0)[self._owner], replayed, averages), calls + made

    def _factors(self, before: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
        """`a_after = keep * a_before + scale * (sum of what the calls added)`, per layer."""
        total = (before + made).clamp(min=1)
        keep = torch.where(self._cumulative, before / total, self._keep**made)
        scale = torch.where(self._cumulative, 1.0 / total, torch.ones_like(keep))
        return keep, scale

    def _read(self) -> tuple[Tensor, Tensor]:
        if not self._layers:
            return self._nothing, self._nothing
        averages = torch.cat([t.detach().reshape(-1).double().cpu() for t in self._averages])
        return averages, torch.tensor(self._calls(), dtype=torch.float64)

    def _calls(self) -> list[float]:
        counts, position = [], 0
        for layer in self._layers:
            if layer.calls is not None:
                counts.append(float(layer.calls))
            else:
                counts.append(float(layer.averages[0]._version - self._versions[position]))
            position += len(layer.averages)
        return counts

    def _write(self, averages: Tensor, calls: Tensor) -> None:
        start = 0
        with torch.no_grad():
            for tensor in self._averages:
                tensor.copy_(averages[start : start + tensor.numel()].view_as(tensor))
                start += tensor.numel()
            for layer, count in zip(self._layers, calls.tolist(), strict=True):
                if layer.calls is not None:
                    layer.calls.fill_(int(count))
        self._versions = [t._version for t in self._averages]


class _OtherBuffers:
    """Every buffer and frozen parameter that is not a batch statistic, with a copy of its value at the step's start."""

    def __init__(self, model: nn.Module, statistics: set[int]) -> None:
        self._entries: list[tuple[nn.Module, str, str]] = []
        seen: set[int] = set(statistics)
        for prefix, module in model.named_modules():
            for name, tensor in [*module._buffers.items(), *module._parameters.items()]:
                if tensor is None or id(tensor) in seen or tensor.requires_grad:
                    continue
                seen.add(id(tensor))
                self._entries.append((module, name, f"{prefix}.{name}" if prefix else name))
        self.refresh()
        self._from_first: dict[str, Tensor] = {}

    def refresh(self) -> None:
        self._shadows = [self._shadow(self._get(i)) for i in range(len(self._entries))]

    def begin(self) -> None:
        self._from_first = {}

    def enter(self) -> None:
        self._before = [self._get(i) for i in range(len(self._entries))]
        self._versions = [tensor._version for tensor in self._before]

    def leave(self, v: int) -> None:
        self._changed = [
            i
            for i, (before, version) in enumerate(zip(self._before, self._versions, strict=True))
            if self._get(i) is not before or before._version != version
        ]
        for i in self._changed:
            if self._shadows[i] is None:
                raise TrainingFailed(
                    f"{self._entries[i][2]} has no gradient, {self._get(i).numel()} elements, and changed in forward.",
                    fix=["keep such state in a buffer: register_buffer(...)", "slices=1, which needs no copy of it"],
                )
        if v == 0:
            self._from_first |= {str(i): self._get(i).detach().clone().contiguous() for i in self._changed}

    def put_back(self) -> None:
        for i in self._changed:
            shadow = self._shadows[i]
            assert shadow is not None
            self._put(i, shadow)

    def drop(self) -> None:
        for i, shadow in enumerate(self._shadows):
            if shadow is not None:
                self._put(i, shadow)

    def pack(self) -> bytes:
        return save(self._from_first) if self._from_first else b""

    def unpack(self, data: bytes) -> None:
        for key, value in load(data).items():
            i = int(key)
            self._put(i, value)
            self._shadows[i] = self._get(i).detach().clone()

    def _get(self, i: int) -> Tensor:
        module, name, _ = self._entries[i]
        tensor = module._buffers[name] if name in module._buffers else module._parameters[name]
        assert tensor is not None
        return tensor

    def _put(self, i: int, value: Tensor) -> None:
        tensor = self._get(i)
        with torch.no_grad():
            if tensor.shape == value.shape and tensor.dtype == value.dtype:
                tensor.copy_(value)
            else:
                module, name, _ = self._entries[i]
                module._buffers[name] = value.clone()

    def _shadow(self, tensor: Tensor) -> Tensor | None:
        small = not isinstance(tensor, nn.Parameter) or tensor.numel() <= MAX_SHADOW_NUMEL
        return tensor.detach().clone() if small else None
