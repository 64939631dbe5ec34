"""How each tensor of a layer is sharded, given the kind of split and the number of ranks. Pure.

Start reading at `cuts_of`.
"""

from __future__ import annotations

from math import isqrt

from torch import nn

from manyhands.parallel.model.tensor_shard import TensorShard
from manyhands.parallel.tensor.autograd_collectives import Ranges, slices_in_order

__all__ = [
    "CONVS",
    "NORMS",
    "TRANSPOSED",
    "Cut",
    "cuts_of",
    "factors",
    "is_matrix",
    "is_opaque",
    "out_and_in",
    "share_of",
    "sizes_of",
]

Cut = tuple[int, Ranges]
"""A dim, and every rank's ranges of it."""

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.GroupNorm,
)
_MATRICES = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)


# Hugging Face classes that work like Linear, and elementwise functions that a torch function override cannot see.
_LIKE_LINEAR = {"Conv1D": "transformers.pytorch_utils", "FalconLinear": "transformers.models.falcon.modeling_falcon"}
_OPAQUE = {"BloomGelu": "transformers.models.bloom.modeling_bloom"}


def is_transposed(module: nn.Module) -> bool:
    """Whether its weight is inputs x outputs: Hugging Face's Conv1D, which is a Linear, and transposed convolutions."""
    return type(module).__name__ == "Conv1D" or isinstance(module, TRANSPOSED)


def out_and_in(module: nn.Module) -> tuple[int, int]:
    """The output dim and the input dim of its weight."""
    return (1, 0) if is_transposed(module) else (0, 1)


def is_matrix(module: nn.Module) -> bool:
    """Whether it is a plain Linear or works like one: its parameters are `weight` and maybe `bias`."""
    plain = type(module) in _MATRICES or _is_listed(module, _LIKE_LINEAR)
    return plain and module._parameters.get("weight") is not None


def is_opaque(module: nn.Module) -> bool:
    """Whether it works element by element in a custom function, which would otherwise get the whole tensor."""
    return _is_listed(module, _OPAQUE)


def _is_listed(module: nn.Module, known: dict[str, str]) -> bool:
    return known.get(type(module).__name__) == type(module).__module__


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """The numbers of inputs and outputs of a matrix, or of channels of a convolution."""
    weight = module._parameters["weight"]
    assert weight is not None
    if isinstance(module, CONVS):
        return module.in_channels, module.out_channels
    outputs, inputs = reversed(weight.shape) if is_transposed(module) else weight.shape
    return inputs, outputs


def factors(degree: int) -> tuple[int, int]:
    """The grid of rows x columns for this many ranks that is closest to a square."""
    columns = next(n for n in range(isqrt(degree), 0, -1) if degree % n == 0)
    return degree // columns, columns


def cuts_of(module: nn.Module, kind: str, degree: int, packed: int = 1) -> dict[str, tuple[Cut, ...]]:
    """The dims and ranges of each sharded tensor of the layer. One weight may contain `packed` matrices."""
    if kind == "heads" and isinstance(module, nn.MultiheadAttention):
        return _of_attention(module, degree)
    if isinstance(module, NORMS):
        return _of_norm(module, degree) if kind == "channels" else {}
    if kind == "vocabulary" and isinstance(module, nn.Embedding):
        return {"weight": ((0, slices_in_order(module.num_embeddings, degree)),)}
    if kind == "heads" and isinstance(module, nn.Embedding):
        return {"weight": ((1, slices_in_order(module.embedding_dim, degree)),)}
    if isinstance(module, CONVS) or is_matrix(module):
        return _of_weight(module, kind, degree, packed)
    return {}


def _of_weight(module: nn.Module, kind: str, degree: int, packed: int) -> dict[str, tuple[Cut, ...]]:
    inputs, outputs = sizes_of(module)
    out_dim, in_dim = out_and_in(module)
    if kind in ("columns", "channels", "vocabulary", "heads"):
        ranges = _interleaved(outputs, degree, packed)
        bias: dict[str, tuple[Cut, ...]] = {"bias": ((0, ranges),)} if module.bias is not None else {}
        return {"weight": ((out_dim, ranges),), **bias}
    if kind == "rows":
        return {"weight": ((in_dim, slices_in_order(inputs, degree)),)}
    if kind == "grid":
        rows, columns = factors(degree)
        out = slices_in_order(outputs, rows)
        into = slices_in_order(inputs, columns)
        by_rank = [divmod(rank, columns) for rank in range(degree)]
        cuts = ((out_dim, tuple(out[i] for i, _ in by_rank)), (in_dim, tuple(into[j] for _, j in by_rank)))
        return {"weight": tuple(sorted(cuts))}
    return {}


def _interleaved(size: int, degree: int, packed: int) -> Ranges:
    """For every rank, its part of each of the packed matrices."""
    each = size // packed
    parts = slices_in_order(each, degree)
    return tuple(tuple((k * each + a, k * each + b) for k in range(packed) for a, b in mine) for mine in parts)


def _of_attention(module: nn.MultiheadAttention, degree: int) -> dict[str, tuple[Cut, ...]]:
    size = module.embed_dim
    packed = _interleaved(3 * size, degree, 3)
    separate = slices_in_order(size, degree)
    ranges = {
        "in_proj_weight": packed,
        "in_proj_bias": packed,
        **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), separate),
    }
    return {name: ((0, found),) for name, found in ranges.items() if module._parameters.get(name) is not None}


def _of_norm(module: nn.Module, degree: int) -> dict[str, tuple[Cut, ...]]:
    channels = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
    assert isinstance(channels, int)
    ranges = slices_in_order(channels, degree)
    tensors = {**module._parameters, **module._buffers}
    return {name: ((0, ranges),) for name, tensor in tensors.items() if tensor is not None and tensor.dim() == 1}


def share_of(shape: tuple[int, ...], cuts: tuple[Cut, ...], rank: int) -> TensorShard:
    return TensorShard(shape, tuple(sorted((dim, ranges[rank]) for dim, ranges in cuts)))
