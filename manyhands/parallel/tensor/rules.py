"""Rules that choose each layer's kind of split from the modules. Pure: nothing is changed or communicated.

The rules assume, as is true of most models, that layers run in the order in which they are defined. If the model's
code does something else between two layers the result is still the same, because a `ShardedTensor` is gathered when
the whole is needed, but costs more. A layer without a rule stays whole. Start reading at `propose`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from manyhands.parallel.tensor.huggingface_attention import Attention, attention_of
from manyhands.parallel.tensor.layer_shards import CONVS, NORMS, TRANSPOSED, is_matrix, is_opaque, sizes_of

__all__ = ["KINDS", "Group", "LayerChoice", "by_heads", "fits_kind", "propose"]

KINDS = {
    "columns": "each worker computes some of the outputs (of a convolution: channels)",
    "rows": "each worker takes some of the inputs; the results are summed",
    "vocabulary": "each worker has some of the rows of an embedding, or of the classes of an output layer",
    "heads": "each worker computes some of the heads of an attention",
    "channels": "each worker has some of the channels",
    "grid": "each worker has a block of the matrix",
    "whole": "every worker has all of it",
}

# Smaller embeddings and output layers are not split: their communication costs more time than the memory is worth.
LARGE_BYTES = 2**16
# The time saved by splitting a single matrix grows with inputs x outputs, its communication with inputs + outputs.
LARGE_SIDE = 512

_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid,
    nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Identity, nn.Dropout,
)  # fmt: skip
_BY_CHANNEL = (
    nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d,
    nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.Flatten,
)  # fmt: skip


class LayerChoice(NamedTuple):
    kind: str
    why: str
    inside: str = ""
    """The attention split by heads that a projection belongs to: there, tensors are plain local tensors."""
    packed: int = 1
    """How many matrices one weight contains: 3 for queries, keys and values."""


def propose(model: nn.Module, degree: int, given: Mapping[str, LayerChoice]) -> dict[str, LayerChoice]:
    """Choose kinds for layers that are not `given`; a rule that would change a given one is not applied."""
    found = dict(given)
    names = dict(model.named_modules())
    rules = (_attentions(names), _bert_pairs(names), _chains(names, degree), _vocabularies(model, names, degree))
    for rule in rules:
        for together in rule:
            if not any(name in found for name in together):
                found.update(together)
    for name, module in names.items():
        if name not in found and _is_large_alone(module, degree):
            found[name] = LayerChoice(
                "columns", f"a large single matrix, at least {LARGE_SIDE} on both sides; gathered after"
            )
    return found


def _is_large_alone(module: nn.Module, degree: int) -> bool:
    return is_matrix(module) and min(sizes_of(module)) >= LARGE_SIDE and sizes_of(module)[1] % degree == 0


Group = dict[str, LayerChoice]
"""Layers that are split together or not at all."""


def _attentions(names: Mapping[str, nn.Module]) -> Iterator[Group]:
    for name in names:
        if group := by_heads(name, names):
            yield group


def by_heads(name: str, names: Mapping[str, nn.Module]) -> Group:
    """An attention with its projections; empty if it is not a known attention."""
    module = names[name]
    if type(module) is nn.MultiheadAttention and module.bias_k is None and not module.add_zero_attn:
        out = _join(name, "out_proj")
        attention, inside = (
            LayerChoice("heads", f"{module.num_heads} heads"),
            LayerChoice("rows", f"heads of {name}", inside=name),
        )
        return {name: attention, out: inside}
    found = attention_of(module)
    return _of_library(name, found, names) if found is not None else {}


def _of_library(name: str, found: Attention, names: Mapping[str, nn.Module]) -> Group:
    group = {name: LayerChoice("heads", f"{found.num_heads} heads")}
    for projection in found.into:
        group[_join(name, projection)] = LayerChoice("heads", f"heads of {name}", inside=name, packed=found.packed)
    for norm in found.norms:
        group[_join(name, norm)] = LayerChoice("heads", "of each head; gradients are summed", inside=name)
    if found.table is not None:
        group[_join(name, found.table)] = LayerChoice("heads", f"a value for each of the heads of {name}", inside=name)
    if found.out is not None:
        group[_join(name, found.out)] = LayerChoice("rows", f"heads of {name}", inside=name)
        return group
    # BERT and related models have the output projection in a sibling module.
    after = _join(name.rpartition(".")[0], "output.dense")
    if after in names and is_matrix(names[after]):
        group[after] = LayerChoice("rows", f"heads of {name}")
    return group


def _bert_pairs(names: Mapping[str, nn.Module]) -> Iterator[Group]:
    """`intermediate.dense` and `output.dense`, as in BERT and related models."""
    for name, module in names.items():
        first, second = (names.get(_join(name, part)) for part in ("intermediate.dense", "output.dense"))
        if first is None or second is None or not is_matrix(first) or not is_matrix(second):
            continue
        if sizes_of(first)[1] == sizes_of(second)[0] and type(module).__module__.startswith("transformers."):
            yield _pair([_join(name, "intermediate.dense")], [], _join(name, "output.dense"))


def _chains(names: Mapping[str, nn.Module], degree: int) -> Iterator[Group]:
    """Pairs of layers among the children of a module: one split by outputs, the next one by inputs."""
    nested: set[str] = set()
    for name, module in names.items():
        # Projections of an attention do not feed one another, in any order of their definition.
        if name in nested or isinstance(module, nn.ModuleList) or "Attention" in type(module).__name__:
            continue
        certain = type(module) is nn.Sequential
        links = list(_links(name, module)) if certain else [(_join(name, n), m) for n, m in module.named_children()]
        if certain:
            nested |= {n for n, m in module.named_modules(prefix=name) if type(m) is nn.Sequential}
        yield from _pairs(links, degree, certain)


def _links(name: str, chain: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in chain.named_children():
        full = _join(name, child_name)
        if type(child) is nn.Sequential:
            yield from _links(full, child)
        else:
            yield full, child


def _pairs(links: Sequence[tuple[str, nn.Module]], degree: int, certain: bool) -> Iterator[Group]:
    """Find a layer and the next one that takes its outputs; any other module in between resets the search."""
    weighted = [name for name, module in links if _is_weighted(module)]
    opened: list[tuple[str, nn.Module]] = []
    between: list[str] = []
    for name, module in links:
        if _is_weighted(module):
            if opened and _takes(module, opened[-1][1]) and (certain or len(weighted) == 2 or _widens(opened[-1][1])):
                kind = "channels" if isinstance(opened[-1][1], CONVS) else "columns"
                yield _pair([n for n, _ in opened], between, name, kind)
                opened, between = [], []
            elif opened and not between and type(module) is type(opened[-1][1]) and _same_sizes(module, opened[-1][1]):
                opened.append((name, module))  # a gate parallel to it
            else:
                opened, between = [(name, module)], []
        elif opened and (_by_channel(module, opened[-1][1], degree) or is_opaque(module)):
            between.append(name)
        elif not (type(module) in _ELEMENTWISE or type(module) in _BY_CHANNEL or _is_activation(module)):
            opened, between = [], []


def _pair(first: Sequence[str], between: Sequence[str], second: str, kind: str = "columns") -> Group:
    return {
        **{name: LayerChoice(kind, f"then {second} by rows") for name in first},
        **{name: LayerChoice("channels", f"between {first[-1]} and {second}") for name in between},
        second: LayerChoice("rows", f"after {', '.join(first)} by {kind}"),
    }


def _is_weighted(module: nn.Module) -> bool:
    return is_matrix(module) or (isinstance(module, CONVS) and type(module) in CONVS and module.groups == 1)


def _takes(module: nn.Module, before: nn.Module) -> bool:
    """Whether its inputs are the outputs of `before`; a convolution's may be flattened to several per channel."""
    inputs, outputs = sizes_of(module)[0], sizes_of(before)[1]
    flattened = isinstance(before, CONVS) and is_matrix(module) and inputs % outputs == 0
    return flattened or (inputs == outputs and isinstance(before, CONVS) == isinstance(module, CONVS))


def _widens(module: nn.Module) -> bool:
    """Projections of unknown attentions are square, and do not feed one another."""
    inputs, outputs = sizes_of(module)
    return isinstance(module, CONVS) or inputs != outputs


def _same_sizes(module: nn.Module, other: nn.Module) -> bool:
    return sizes_of(module) == sizes_of(other)


def _by_channel(module: nn.Module, before: nn.Module, degree: int) -> bool:
    """Whether it has parameters per channel, and treats each channel independently."""
    outputs = sizes_of(before)[1]
    if type(module) is nn.GroupNorm:
        return module.num_channels == outputs and module.num_groups % degree == 0
    if isinstance(module, CONVS) and type(module) in CONVS and type(module) not in TRANSPOSED:
        return module.groups > 1 and module.groups % degree == 0 and sizes_of(module) == (outputs, outputs)
    return type(module) in NORMS and bool(module.num_features == outputs)


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ == "transformers.activations"


def _vocabularies(model: nn.Module, names: Mapping[str, nn.Module], degree: int) -> Iterator[Group]:
    """Embeddings and output layers, split by vocabulary; tied ones together."""
    outputs = {name for name in names if names[name] is _output_layer(model)}
    for name, module in names.items():
        if not _is_table(module) or module.num_embeddings < degree:  # type: ignore[operator]
            continue
        tied = [n for n, m in names.items() if is_matrix(m) and m.weight is module.weight]
        if tied or _is_large(module):
            why = f"tied to {', '.join(tied)}" if tied else "a large table"
            yield {
                name: LayerChoice("vocabulary", why),
                **{n: LayerChoice("vocabulary", f"tied to {name}") for n in tied},
            }
    for name in outputs:
        if _is_large(names[name]) and sizes_of(names[name])[1] >= degree:
            yield {name: LayerChoice("vocabulary", "the output layer; cross entropy is computed in parts")}


def _output_layer(model: nn.Module) -> nn.Module | None:
    ask = getattr(model, "get_output_embeddings", None)
    last = ask() if callable(ask) else model
    while type(last) is nn.Sequential and len(last):
        last = last[-1]
    if last is model and (children := list(model.children())):
        # For a custom module, the last child, if it has more outputs than inputs, as a layer of logits has.
        last = children[-1] if is_matrix(children[-1]) and _is_wider(children[-1]) else None
    return last if isinstance(last, nn.Module) and is_matrix(last) else None


def _is_wider(module: nn.Module) -> bool:
    inputs, outputs = sizes_of(module)
    return outputs > inputs


def _is_table(module: nn.Module) -> bool:
    plain = type(module) is nn.Embedding and module._parameters.get("weight") is not None
    return plain and module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def _is_large(module: nn.Module) -> bool:
    weight = module._parameters["weight"]
    return weight is not None and weight.nbytes >= LARGE_BYTES


def fits_kind(module: nn.Module, kind: str) -> bool:
    """Whether a layer can be split in this way at all."""
    if kind in ("columns", "rows", "grid"):
        return is_matrix(module) or (_is_weighted(module) and kind != "grid")
    if kind == "vocabulary":
        return is_matrix(module) or _is_table(module)
    if kind == "heads":
        return bool(by_heads("", {"": module}))
    if kind == "channels":
        return (
            type(module) in NORMS or _is_weighted(module) or (type(module) in CONVS and type(module) not in TRANSPOSED)
        )
    return True


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
