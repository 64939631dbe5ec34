"""Recognises Hugging Face's attentions by the names of their projections, and how their heads are laid out.

A module with parameters that are not listed here is not recognised, and stays whole. Start reading at `attention_of`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from manyhands.parallel.tensor.layer_shards import is_matrix, sizes_of

__all__ = ["Attention", "attention_of"]

_PROJECTIONS = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense")),
    (("q_lin", "k_lin", "v_lin"), ("out_lin",)),
    (("q", "k", "v"), ("o",)),
    (("query", "key", "value"), ()),
    (("c_attn",), ("c_proj",)),
    (("query_key_value",), ("dense",)),
)
# Weights that store all queries, then all keys, then all values. Others store those of each head together.
_PACKED = {"c_attn": 3}
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads")
_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
_TABLE = "relative_attention_bias"


class Attention(NamedTuple):
    """An attention of another library, by the names of its projections."""

    into: tuple[str, ...]
    out: str | None
    num_heads: int
    num_key_heads: int
    packed: int
    norms: tuple[str, ...] = ()
    """Norms of single heads: the same few parameters for all heads."""
    table: str | None = None
    """An embedding with a column for each head, such as T5's of the distance between two words."""


def attention_of(module: nn.Module) -> Attention | None:
    """The module's description, if it is an attention of Hugging Face's all of whose parameters are known by name."""
    if not type(module).__module__.startswith("transformers.") or "Local" in type(module).__name__:
        return None
    children = dict(module.named_children())
    for into, outs in _PROJECTIONS:
        out = next((name for name in outs if name in children), None)
        members = [*into, *([out] if out else [])]
        if (outs and not out) or not all(name in children and is_matrix(children[name]) for name in members):
            continue
        num_heads = _num_heads(module)
        found = _counted(module, children, into, out, num_heads) if num_heads else None
        if found is not None:
            return _with_the_rest(found, module, members)
    return None


def _counted(
    module: nn.Module, children: Mapping[str, nn.Module], into: tuple[str, ...], out: str | None, num_heads: int
) -> Attention | None:
    sizes = [sizes_of(children[name]) for name in into]
    if len(into) > 1:
        return Attention(into, out, num_heads, sizes[1][1] // (sizes[0][1] // num_heads), 1)
    if sizes[0][1] == 3 * sizes[0][0]:
        return Attention(into, out, num_heads, num_heads, _PACKED.get(into[0], 1))
    if getattr(module, "new_decoder_architecture", False):  # Falcon: each group's queries, then its key and value
        return Attention(into, out, num_heads, int(module.num_kv_heads), 1)  # type: ignore[arg-type]
    return None  # keys and values of another sequence, or one of each for all queries


def _with_the_rest(found: Attention, module: nn.Module, members: Sequence[str]) -> Attention | None:
    """Add norms of single heads and a table of heads; None if there are any other parameters."""
    head_size = sizes_of(module.get_submodule(found.out))[0] // found.num_heads if found.out else 0
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for name, param in module.named_parameters():
        shapes.setdefault(name.rpartition(".")[0], set()).add(tuple(param.shape))
    norms = tuple(name for name in shapes if name in _NORMS and shapes[name] == {(head_size,)})
    by_head = type(module._modules.get(_TABLE)) is nn.Embedding and all(
        shape[-1] == found.num_heads for shape in shapes[_TABLE]
    )
    table = _TABLE if by_head else None
    if shapes.keys() - {*members, *norms, table}:
        return None
    return found._replace(norms=norms, table=table)


def _num_heads(module: nn.Module) -> int:
    config: Any = getattr(module, "config", None)
    counts = [getattr(module, name, None) for name in _HEAD_COUNTS] + [getattr(config, "num_attention_heads", None)]
    return next((count for count in counts if isinstance(count, int)), 0)
