"""Attention of which each rank computes some of the heads.

`HeadsAttention` is `nn.MultiheadAttention`; `HeadsRegion` runs another library's attention with this rank's heads: its
projections give and take plain parts, its own code between them sees fewer heads, and dropout of attention weights is
cut out of the mask of all heads. Start reading at `HeadsAttention.forward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from manyhands.parallel.tensor_layers import Divided, Place, _asked
from manyhands.parallel.tensor_masks import dropout_part, kept_part
from manyhands.parallel.tensor_ops import Ranges, Split, enter, slices_in_order
from manyhands.parallel.tensor_parts import Parted, parted, whole_of

__all__ = ["HeadsAttention", "HeadsRegion"]


class HeadsAttention(Divided):
    """`nn.MultiheadAttention` by heads. Forward sums once, in the output projection."""

    in_proj_weight = _asked("in_proj_weight")
    in_proj_bias = _asked("in_proj_bias")
    q_proj_weight = _asked("q_proj_weight")
    k_proj_weight = _asked("k_proj_weight")
    v_proj_weight = _asked("v_proj_weight")

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
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as torch's own
        batched, rows_first = query.dim() == 3, self.batch_first or query.dim() == 2
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        q, k, v = (self._heads(x if rows_first else x.transpose(0, 1), i) for i, x in enumerate((query, key, value)))
        mask = self._mask(attn_mask, key_padding_mask, q)
        attended, weights = self._attend(q, k, v, mask, need_weights)
        # In memory the sequence comes first, as torch has it: dropout after it draws its mask in the order of memory.
        y = self.out_proj(attended.permute(2, 0, 1, 3).flatten(2))
        y = y.transpose(0, 1) if rows_first else y
        seen = self._shown(weights, average_attn_weights) if need_weights else None
        return (y, seen) if batched else (y[0], None if seen is None else seen[0])

    def _heads(self, x: Tensor, which: int) -> Tensor:
        """Rows x this rank's heads x length x head's size, of queries (0), keys (1) or values (2)."""
        assert isinstance(self, nn.MultiheadAttention)
        weights = [self.own(name) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]
        packed, bias = self.own("in_proj_weight"), self.own("in_proj_bias")
        weight = packed.chunk(3)[which] if packed is not None else weights[which]
        assert weight is not None
        x = enter(x, self.place.axis, self.place.name)
        projected = functional.linear(x, weight, None if bias is None else bias.chunk(3)[which])
        return projected.view(*projected.shape[:2], -1, self.head_dim).transpose(1, 2)

    def _mask(self, mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """What is added to the scores: the same for all heads, or this rank's heads' own."""
        rows, total = None, self._weights_split().size
        if mask is not None:
            rows = _as_bias(mask, q.dtype)
            if rows.dim() == 3:
                rows = self._weights_split().part_of(rows.view(q.size(0), total, *rows.shape[1:]))
        if padding is not None:
            hidden = _as_bias(padding, q.dtype)[:, None, None, :]
            rows = hidden if rows is None else rows + hidden
        return rows

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(self, nn.MultiheadAttention)
        p = self.dropout if self.training else 0.0
        if not need_weights:
            return _attention(self._weights_split(), q, k, v, mask, dropout_p=p), None
        scores = (q * math.sqrt(1.0 / q.size(-1))) @ k.transpose(-2, -1)
        weights = functional.softmax(scores if mask is None else scores + mask, -1)
        if p > 0.0:
            weights = dropout_part(weights, p, self._weights_split())
        return weights @ v, weights

    def _shown(self, weights: Tensor | None, average: bool) -> Tensor:
        assert weights is not None
        every = parted(weights, self._weights_split())
        return cast(Tensor, whole_of(every)).mean(1) if average else every

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
    """As torch's scaled dot product attention, of this rank's heads."""
    if dropout_p == 0.0:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    like = query.new_empty(*query.shape[:-1], key.size(-2), device="meta")
    kept = kept_part(torch.empty(like.shape, dtype=torch.bool, device=query.device), dropout_p, split)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _as_bias(~attn_mask, query.dtype)
    attended, _ = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, kept, scale=scale, enable_gqa=enable_gqa
    )
    return cast(Tensor, attended)


class HeadsRegion:
    """Another library's attention, which now sees this rank's heads only."""

    place: Place
    num_all_heads: int
    outputs: Ranges | None
    """Of the attended values, where the output projection is another module's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run: Callable[..., Any] = super().forward  # type: ignore[misc]
        args, kwargs = tuple(map(whole_of, args)), {key: whole_of(value) for key, value in kwargs.items()}
        if not self.training:  # type: ignore[attr-defined]
            return self._handed_on(run(*args, **kwargs))
        with _DropoutByHeads(self._weights_split()):
            result = run(*args, **kwargs)
        return self._handed_on(result)

    def _handed_on(self, result: Any) -> Any:
        """Plain parts stay inside: attended values and attention weights go on as what they are."""
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
    return x.dim() == 4 and x.size(1) == split.part_size(split.axis.rank) and not isinstance(x, Parted)


class _DropoutByHeads(TorchFunctionMode):
    """Dropout of attention weights is that of this rank's heads."""

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
