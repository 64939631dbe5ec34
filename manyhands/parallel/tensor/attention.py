"""Attention sharded by heads: each rank computes some of them.

`HeadsAttention` is for `nn.MultiheadAttention`; `HeadsRegion` runs another library's attention with this rank's heads:
its projections return and take plain local tensors, its code between them sees fewer heads, and dropout of attention
weights uses this rank's part of the mask of all heads. Start reading at `HeadsAttention.forward`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from itertools import islice, zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from manyhands.parallel.tensor.autograd_collectives import Ranges, Split, cut, enter, slices_in_order
from manyhands.parallel.tensor.dropout import dropout_part
from manyhands.parallel.tensor.layers import LayerPlacement, ParallelLayer, asked
from manyhands.parallel.tensor.sharded_tensor import ShardedTensor, part_of, parted, whole_of
from manyhands.torch_private import safe_softmax

__all__ = ["HeadsAttention", "HeadsRegion"]


class HeadsAttention(ParallelLayer):
    """`nn.MultiheadAttention` sharded by heads. Forward has one all-reduce, in the output projection."""

    in_proj_weight = asked("in_proj_weight")
    in_proj_bias = asked("in_proj_bias")
    q_proj_weight = asked("q_proj_weight")
    k_proj_weight = asked("k_proj_weight")
    v_proj_weight = asked("v_proj_weight")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(self, nn.MultiheadAttention)
        query, key, value = whole_of(query), whole_of(key), whole_of(value)
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as torch does
        batched, rows_first = query.dim() == 3, self.batch_first or query.dim() == 2
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        q, k, v = self._projected(query, key, value)
        # As in torch: with is_causal=True the mask itself is not used.
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q)
        attended, weights = self._attend(q, k, v, mask, need_weights, causal)
        # In memory the sequence is the first dim, as in torch: a later dropout draws its mask in memory order.
        y = self.out_proj(attended.permute(2, 0, 1, 3).flatten(2))
        y = y.transpose(0, 1) if rows_first else y
        shown = self._weights_to_return(weights, average_attn_weights) if need_weights else None
        return (y, shown) if batched else (y[0], None if shown is None else shown[0])

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values: rows x this rank's heads x length x head's size."""
        packed, bias = self.own("in_proj_weight"), self.own("in_proj_bias")
        if packed is not None and query is key and key is value:
            return [self._heads(part) for part in self._project(query, packed, bias).chunk(3, -1)]
        separate = [self.own(name) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]
        weights = packed.chunk(3) if packed is not None else separate
        biases = bias.chunk(3) if bias is not None else (None,) * 3
        return [
            self._heads(self._project(x, weight, own))
            for x, weight, own in zip((query, key, value), weights, biases, strict=True)
        ]

    def _project(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        return functional.linear(enter(x, self.place.axis, self.place.name), weight, bias)

    def _heads(self, x: Tensor) -> Tensor:
        assert isinstance(self, nn.MultiheadAttention)
        x = x[None] if x.dim() == 2 else x if self.batch_first else x.transpose(0, 1)
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def _mask(self, mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """The bias that is added to the scores: the same for all heads, or those of this rank's heads."""
        bias, total = None, self._weights_split().size
        if mask is not None:
            bias = _as_bias(mask, q.dtype)
            if bias.dim() == 3:
                bias = self._weights_split().part_of(bias.view(q.size(0), total, *bias.shape[1:]))
        if padding is not None:
            padding_bias = _as_bias(padding, q.dtype)[:, None, None, :]
            bias = padding_bias if bias is None else bias + padding_bias
        return bias

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(self, nn.MultiheadAttention)
        p = self.dropout if self.training else 0.0
        if not need_weights:
            return _attention(self._weights_split(), q, k, v, mask, p, causal), None
        weights = _attention_weights(self._weights_split(), q, k, mask, p)
        return weights @ v, weights

    def _weights_to_return(self, weights: Tensor | None, average: bool) -> Tensor:
        assert weights is not None
        sharded = parted(weights, self._weights_split())
        return cast(Tensor, whole_of(sharded)).mean(1) if average else sharded

    def _weights_split(self) -> Split:
        """Attention weights: rows x heads x length x length."""
        assert isinstance(self, nn.MultiheadAttention)
        return self.place.split(1, slices_in_order(self.num_heads, self.place.axis.size))


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)


def _attention(
    split: Split,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Like torch's scaled dot product attention, for this rank's heads."""
    if dropout_p == 0.0:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        times = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    if is_causal:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _as_bias(~attn_mask, query.dtype)
    return _attention_weights(split, query, key, attn_mask, dropout_p, scale) @ value


def _attention_weights(
    split: Split, query: Tensor, key: Tensor, mask: Tensor | None, p: float, scale: float | None = None
) -> Tensor:
    """Rows x this rank's heads x length x length; a fully masked query gets zeros, as in torch."""
    scores = (query * (query.size(-1) ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    weights = safe_softmax(scores if mask is None else scores + mask, -1)
    return dropout_part(weights, p, split).to(query.dtype) if p > 0.0 else weights


_OF_HEADS = ("alibi", "attention_mask", "mask", "position_bias")


class HeadsRegion:
    """Another library's attention, which computes only this rank's heads."""

    place: LayerPlacement
    num_all_heads: int
    outputs: Ranges | None
    """The ranges of the attended values, if another module has the output projection."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run: Callable[..., Any] = super().forward  # type: ignore[misc]
        names = inspect.signature(run).parameters
        args = tuple(self._local_argument(name, value) for name, value in zip_longest(islice(names, len(args)), args))
        kwargs = {name: self._local_argument(name, value) for name, value in kwargs.items()}
        if not self.training:  # type: ignore[attr-defined]
            return self._wrap_outputs(run(*args, **kwargs))
        with _DropoutByHeads(self._weights_split()):
            result = run(*args, **kwargs)
        return self._wrap_outputs(result)

    def _local_argument(self, name: str | None, value: Any) -> Any:
        """Arguments are whole tensors, except for masks and biases of scores that have a head dim."""
        split = self._weights_split()
        if name not in _OF_HEADS or not isinstance(value, Tensor):
            return whole_of(value)
        if value.dim() == 4 and value.size(1) == split.size:
            return part_of(value, split)
        if name == "alibi" and value.dim() == 3:  # rows and heads in one dim
            return cut(whole_of(value).view(-1, split.size, *value.shape[1:]), split).flatten(0, 1)
        return whole_of(value)

    def _wrap_outputs(self, result: Any) -> Any:
        """Local tensors stay inside: return attended values and attention weights as sharded tensors."""
        first, *rest = result if isinstance(result, tuple) else (result,)
        if self.outputs is not None:
            first = parted(first, self.place.split(first.dim() - 1, self.outputs))
        split = self._weights_split()
        rest = [parted(x, split) if isinstance(x, Tensor) and _is_of_heads(x, split) else x for x in rest]
        return (first, *rest) if isinstance(result, tuple) else first

    def _weights_split(self) -> Split:
        return self.place.split(1, slices_in_order(self.num_all_heads, self.place.axis.size))


def _is_of_heads(x: Tensor, split: Split) -> bool:
    """Whether these are attention weights of this rank's heads: rows x heads x length x length."""
    return x.dim() == 4 and x.size(1) == split.part_size(split.axis.rank) and not isinstance(x, ShardedTensor)


class _DropoutByHeads(TorchFunctionMode):
    """Applies this rank's part of the dropout of attention weights."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _attention(self._split, *args, **kwargs)
        if func is functional.dropout and _is_of_heads(args[0] if args else kwargs["input"], self._split):
            return self._drop(*args, **kwargs)
        return func(*args, **kwargs)

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return dropout_part(input, p, self._split) if training else input
