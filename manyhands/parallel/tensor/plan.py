"""The tensor-parallel plan of a model: for every layer its kind of split, its bytes, and the reason.

`plan_tensor` is pure, and refuses what cannot work before any process starts. Start reading there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

import msgspec
from torch import Tensor, nn

from manyhands.errors import SpecError
from manyhands.parallel.tensor.huggingface_attention import attention_of
from manyhands.parallel.tensor.layer_shards import (
    CONVS,
    NORMS,
    Cut,
    cuts_of,
    factors,
    is_matrix,
    is_opaque,
    share_of,
    sizes_of,
)
from manyhands.parallel.tensor.rules import KINDS, LayerChoice, by_heads, fits_kind, propose

__all__ = ["LayerSplit", "TensorPlan", "leaves_parts", "plan_tensor"]


class LayerSplit(msgspec.Struct, frozen=True):
    """How one layer is split: a module that directly has parameters or buffers, or an attention."""

    name: str
    layer: str
    """Its class."""
    kind: str
    why: str
    num_bytes: int
    """The size of its parameters and buffers; shared ones count in the first layer that has them."""
    bytes_per_rank: int
    """The size on the rank that has most of it."""
    inside: str = ""
    packed: int = 1
    stays_whole: tuple[str, ...] = ()
    """Parameters of a sharded layer that are not sharded, because other layers use them, too."""

    def cuts(self, module: nn.Module, degree: int) -> dict[str, tuple[Cut, ...]]:
        found = cuts_of(module, self.kind, degree, self.packed)
        return {name: cuts for name, cuts in found.items() if name not in self.stays_whole}


class TensorPlan(msgspec.Struct, frozen=True):
    degree: int
    layers: tuple[LayerSplit, ...]
    sequence: bool = False
    """Whether sums between sharded layers stay sharded along the sequence."""

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def bytes_per_rank(self) -> int:
        return sum(layer.bytes_per_rank for layer in self.layers)

    def kind_of(self, name: str) -> str:
        return next((layer.kind for layer in self.layers if layer.name == name), "whole")

    def rows(self) -> list[tuple[str, ...]]:
        """Rows of a table: layer, class, kind, bytes, bytes per worker, why."""
        return [
            (layer.name, layer.layer, layer.kind, str(layer.num_bytes), str(layer.bytes_per_rank), layer.why)
            for layer in self.layers
        ]

    def __str__(self) -> str:
        head = ("layer", "class", "split", "bytes", "per worker", "why")
        last = ("all", "", "", str(self.num_bytes), str(self.bytes_per_rank), "")
        table = [head, *self.rows(), last]
        widths = [max(len(row[column]) for row in table) for column in range(len(head))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
        return "\n".join(line.rstrip() for line in lines)


def plan_tensor(
    model: nn.Module, degree: int, patterns: Mapping[str, str] | None = None, *, sequence: bool = False
) -> TensorPlan:
    """How to shard the model's layers over this many ranks.

    `patterns` map names of layers (`*.mlp.up`) to kinds, and override the rules; of several that match, the first
    counts.
    """
    if degree < 1:
        raise SpecError(f"A model cannot be divided among {degree} workers.", fix=["mh.TensorParallel(2)"])
    names = dict(model.named_modules())
    chosen = propose(model, degree, _given(names, patterns or {}))
    kept_whole = _resolve_ties(names, chosen)
    _check_degree(names, chosen, degree)
    if sequence:
        _explain_sequences(names, chosen)
    return TensorPlan(degree, tuple(_layers(names, chosen, kept_whole, degree)), sequence)


def _explain_sequences(names: Mapping[str, nn.Module], chosen: dict[str, LayerChoice]) -> None:
    """Say in the plan which layers' sums stay sharded along the sequence, and which norms take them so."""
    for name, choice in chosen.items():
        if leaves_parts(names[name], choice.kind):
            chosen[name] = choice._replace(why=f"{choice.why}; its sum is sharded by sequence")
    for name, module in names.items():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            chosen.setdefault(name, LayerChoice("whole", "computed in parts by sequence, if its input is sharded so"))


def leaves_parts(module: nn.Module, kind: str) -> bool:
    """Whether it returns a sum that can stay sharded along the sequence."""
    return (kind == "rows" and is_matrix(module)) or (kind == "vocabulary" and isinstance(module, nn.Embedding))


def _given(names: Mapping[str, nn.Module], patterns: Mapping[str, str]) -> dict[str, LayerChoice]:
    given: dict[str, LayerChoice] = {}
    for pattern, kind in patterns.items():
        if kind not in KINDS:
            near = get_close_matches(kind, KINDS, 3) or list(KINDS)
            raise SpecError(f"{pattern!r} asks for {kind!r}, which is not a kind of split.", fix=[*map(repr, near)])
        matching = [name for name in names if name and _matches(name, pattern)]
        if not matching:
            layer_names = [name for name in names if name]
            near = get_close_matches(pattern.lstrip("*."), layer_names, 3, 0.3) or layer_names[:3]
            raise SpecError(f"The pattern {pattern!r} matches no layer.", where="rules", fix=[*map(repr, near)])
        fitting = [name for name in matching if fits_kind(names[name], kind)]
        if not fitting:
            kinds = [repr(other) for other in KINDS if fits_kind(names[matching[0]], other)]
            kind_of = type(names[matching[0]]).__name__
            raise SpecError(f"{matching[0]} is a {kind_of}, which cannot be divided by {kind}.", fix=kinds)
        for name in fitting:
            for member, choice in _asked_for(name, names, kind, pattern).items():
                given.setdefault(member, choice)
    return given


def _asked_for(name: str, names: Mapping[str, nn.Module], kind: str, pattern: str) -> dict[str, LayerChoice]:
    if kind == "heads":
        return by_heads(name, names)
    below = [other for other in names if other.startswith(f"{name}.")] if kind == "whole" else []
    return dict.fromkeys([name, *below], LayerChoice(kind, f"asked for: {pattern}"))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or (pattern.startswith("*.") and fnmatchcase(name, pattern[2:]))


def _resolve_ties(names: Mapping[str, nn.Module], chosen: dict[str, LayerChoice]) -> dict[str, tuple[str, ...]]:
    """Give layers that share a parameter compatible kinds; returns the parameters that stay whole for that."""
    kept_whole: dict[str, tuple[str, ...]] = {}
    for owners in _shared(names).values():
        layers = [name for name, _ in owners]
        kinds = [chosen[name].kind for name in layers if name in chosen]
        if all(kind == "whole" for kind in kinds):
            continue
        if "vocabulary" in kinds and all(fits_kind(names[name], "vocabulary") for name in layers):
            for name in layers:
                others = ", ".join(other for other in layers if other != name)
                chosen[name] = LayerChoice("vocabulary", f"tied to {others}")
        elif all(tensor == "bias" and _can_cut_bias(names[name], chosen.get(name)) for name, tensor in owners):
            kept_whole.update({name: (tensor,) for name, tensor in owners if name in chosen})
        else:
            for name in layers:
                others = ", ".join(other for other in layers if other != name)
                chosen[name] = LayerChoice("whole", f"shares a parameter with {others}")
    return kept_whole


def _shared(names: Mapping[str, nn.Module]) -> dict[int, list[tuple[str, str]]]:
    """Parameters that several modules have: each owner's name with its name for the parameter."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, module in names.items():
        for tensor, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, tensor))
    return {key: found for key, found in owners.items() if len(found) > 1}


def _can_cut_bias(module: nn.Module, choice: LayerChoice | None) -> bool:
    """A layer split by columns can cut its part out of a whole bias; a layer that is not split uses all of it."""
    return choice is None or choice.kind in ("whole", "rows") or (is_matrix(module) and not choice.inside)


def _check_degree(names: Mapping[str, nn.Module], chosen: Mapping[str, LayerChoice], degree: int) -> None:
    needs = [need for name, choice in chosen.items() for need in _needs(name, names[name], choice, degree)]
    for name, what, size, parts in needs:
        if size % parts == 0 or (what == "rows of the vocabulary" and size >= parts):
            continue
        sizes = [size for _, what, size, _ in needs if what != "rows of the vocabulary"]
        works = [n for n in range(1, 2 * degree) if all(size % n == 0 for size in sizes)]
        nearest = min(works, key=lambda n: (abs(n - degree), n))
        raise SpecError(
            f"The {size} {what} of {name} cannot be divided evenly among {parts} workers.",
            fix=[f"mh.TensorParallel({nearest})" if nearest > 1 else "one worker", f'rules={{"{name}": "whole"}}'],
        )


def _needs(name: str, module: nn.Module, choice: LayerChoice, degree: int) -> Iterator[tuple[str, str, int, int]]:
    """What must be divisible: the layer, the quantity, its size, and the number of parts."""
    if choice.kind == "heads" and isinstance(module, nn.MultiheadAttention):
        yield name, "heads", module.num_heads, degree
    elif choice.kind == "heads" and (found := attention_of(module)) is not None:
        yield name, "heads", found.num_heads, degree
        yield name, "heads for keys and values", found.num_key_heads, degree
    elif choice.inside or choice.kind == "whole" or is_opaque(module):
        return
    elif choice.kind == "vocabulary":
        size = module.num_embeddings if isinstance(module, nn.Embedding) else sizes_of(module)[1]
        yield name, "rows of the vocabulary", size, degree
    elif isinstance(module, nn.GroupNorm) or (isinstance(module, CONVS) and module.groups > 1):
        yield name, "groups", module.num_groups if isinstance(module, nn.GroupNorm) else module.groups, degree
    elif isinstance(module, NORMS):
        yield name, "channels", int(module.num_features), degree  # type: ignore[arg-type]
    else:
        yield from _needs_of_weight(name, module, choice.kind, degree)


def _needs_of_weight(name: str, module: nn.Module, kind: str, degree: int) -> Iterator[tuple[str, str, int, int]]:
    inputs, outputs = sizes_of(module)
    unit = "channels" if isinstance(module, CONVS) else "features"
    rows, columns = factors(degree) if kind == "grid" else (degree, degree)
    if kind != "rows":
        yield name, f"output {unit}", outputs, rows
    if kind in ("rows", "grid"):
        yield name, f"input {unit}", inputs, columns


def _layers(
    names: Mapping[str, nn.Module],
    chosen: Mapping[str, LayerChoice],
    kept_whole: Mapping[str, tuple[str, ...]],
    degree: int,
) -> Iterator[LayerSplit]:
    counted: set[int] = set()
    for name, module in names.items():
        choice = chosen.get(name, LayerChoice("whole", "no rule"))
        tensors = {key: t for key, t in [*module._parameters.items(), *module._buffers.items()] if t is not None}
        if not tensors and choice.kind == "whole":
            continue
        layer = LayerSplit(
            name,
            type(module).__name__,
            choice.kind,
            choice.why,
            0,
            0,
            choice.inside,
            choice.packed,
            kept_whole.get(name, ()),
        )
        cuts = layer.cuts(module, degree)
        new = {key: tensor for key, tensor in tensors.items() if id(tensor) not in counted}
        counted |= {id(tensor) for tensor in new.values()}
        most = max(sum(_bytes(t, cuts.get(key, ()), rank) for key, t in new.items()) for rank in range(degree))
        total = sum(tensor.nbytes for tensor in new.values())
        yield msgspec.structs.replace(layer, num_bytes=total, bytes_per_rank=most)


def _bytes(tensor: Tensor, cuts: tuple[Cut, ...], rank: int) -> int:
    size = tensor.element_size()
    for length in share_of(tuple(tensor.shape), cuts, rank).local_shape:
        size *= length
    return size
