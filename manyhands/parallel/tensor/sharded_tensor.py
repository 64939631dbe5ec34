"""A tensor that is sharded over ranks, and all-gathered when an operation needs the whole.

Sharded layers pass `ShardedTensor`s to each other. To all other code one is a tensor with the shape of the whole:
operations that are elementwise, or on other dims than the sharded one, run on the local part; `cross_entropy` is
computed in parts; any other operation gets the whole tensor, gathered at that moment. So results are right for any
code between the layers, and the rules matter only for speed. A gather is a collective: code that reads a value on one
rank only waits for the other ranks. Start reading at `ShardedTensor.__torch_function__`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from manyhands.errors import TrainingFailed
from manyhands.parallel.tensor.autograd_collectives import Split, cut, enter, gather
from manyhands.parallel.tensor.cross_entropy import entropy_in_parts
from manyhands.parallel.tensor.dropout import dropout_part, feature_dropout_part
from manyhands.torch_private import pytree

__all__ = ["ShardedTensor", "part_of", "parted", "whole_of"]

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class ShardedTensor(Tensor):
    """Has the shape of the whole tensor, and this rank's `part` of its values."""

    part: Tensor
    division: Split
    is_view: bool
    """Whether it is a view of another one, which shares writes to the part."""

    @staticmethod
    def __new__(cls, part: Tensor, split: Split) -> ShardedTensor:
        sizes = list(part.shape)
        sizes[split.dim] = split.size
        made: ShardedTensor = Tensor._make_wrapper_subclass(cls, sizes, dtype=part.dtype, device=part.device)
        made.division, made.is_view = split, False
        return made

    def whole(self) -> Tensor:
        """The gathered tensor; cached until the part is written to."""
        key = (self.part._version, torch.is_grad_enabled())
        kept: tuple[Any, Tensor] | None = self.__dict__.get("_gathered")
        if kept is None or kept[0] != key:
            kept = self._gathered = key, gather(self.part, self.division)
        return kept[1]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        sizes = tuple(self.shape)
        return (
            f"ShardedTensor(shape={sizes}, sharded along dim {self.division.dim} over {self.division.axis.size} ranks)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.whole().detach().clone()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func) if args and not _is_in_own_function(args) else None
        found = handler(func, args, kwargs) if handler is not None else NotImplemented
        return _on_wholes(func, args, kwargs) if found is NotImplemented else found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Below autograd, for code that treats it as a plain tensor: C++, and `autograd.Function`s."""
        if func._schema.is_mutable and args and isinstance(args[0], ShardedTensor):
            _refuse_to_write(args[0], str(func))
        return func(*pytree.tree_map(whole_of, args), **pytree.tree_map(whole_of, kwargs or {}))


class _Wrap(torch.autograd.Function):
    """For code that treats a `ShardedTensor` as a plain autograd tensor: backward cuts the whole's gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, split: Split) -> ShardedTensor:
        ctx.split = split
        return ShardedTensor(part, split)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.split.part_of(gradient), None


def parted(part: Tensor, split: Split) -> Tensor:
    """The sharded tensor of which this rank has `part`; the plain tensor if there is one rank."""
    if split.axis.size == 1:
        return part
    made: ShardedTensor = _Wrap.apply(part, split)  # type: ignore[no-untyped-call]
    made.part = part
    return made


def whole_of(value: Any) -> Any:
    return value.whole() if isinstance(value, ShardedTensor) else value


def part_of(tensor: Tensor, split: Split) -> Tensor:
    """This rank's part of the tensor under this split; cut out of the whole if it is not sharded like this already."""
    if (
        isinstance(tensor, ShardedTensor)
        and tensor.division.dim == split.dim
        and tensor.division.ranges == split.ranges
    ):
        return tensor.part
    return cut(whole_of(tensor), split)


def _is_in_own_function(args: tuple[Any, ...]) -> bool:
    """Whether this may be the forward of an `autograd.Function`, whose result must be a plain tensor."""
    return not torch.is_grad_enabled() and any(
        isinstance(arg, ShardedTensor) and arg.part.requires_grad for arg in args
    )


def _on_wholes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0] if args else None
    if not (isinstance(target, ShardedTensor) and _writes(func)):
        return func(*pytree.tree_map(whole_of, args), **pytree.tree_map(whole_of, kwargs))
    if target.is_view:
        _refuse_to_write(target, func.__name__)
    whole = target.whole().clone()
    func(whole, *pytree.tree_map(whole_of, args[1:]), **pytree.tree_map(whole_of, kwargs))
    target.part = cut(whole, target.division)
    target.__dict__.pop("_gathered", None)
    return target


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__")


def _refuse_to_write(target: ShardedTensor, what: str) -> None:
    raise TrainingFailed(
        f"{what} writes into a view of what {target.division.name} returned, which is sharded over the workers.",
        fix=[f'rules={{"{target.division.name}": "whole"}}', "write into a copy: .clone()"],
    )


# Operations that do not need the whole tensor. A handler returns NotImplemented if it does after all.


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On parts of the same split; whole tensors must broadcast along the sharded dim (or are cut, for sequences)."""
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    first = next(value for value in found if isinstance(value, ShardedTensor))
    if not all(_is_compatible(value, first) or _has_all_rows(value, first) for value in found):
        return NotImplemented
    if _writes(func) and not isinstance(args[0], ShardedTensor):
        return NotImplemented

    def local(value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            return value.part
        if not isinstance(value, Tensor):
            return value
        if _has_all_rows(value, first):
            return cut(value, first.division._replace(dim=_matching_dim(value, first)))
        return enter(value, first.division.axis, first.division.name)

    result = func(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    if args and isinstance(args[0], ShardedTensor) and result is args[0].part:
        return args[0]
    return parted(result, first.division)


def _is_compatible(other: Tensor, first: ShardedTensor) -> bool:
    if isinstance(other, ShardedTensor):
        return other.dim() == first.dim() and other.division[1:3] == first.division[1:3]
    dim = _matching_dim(other, first)
    return other.dim() <= first.dim() and (dim < 0 or other.size(dim) == 1)


def _matching_dim(other: Tensor, first: ShardedTensor) -> int:
    """The dim of `other` that broadcasts with the sharded one."""
    return first.division.dim - first.dim() + other.dim()


def _has_all_rows(other: Tensor, first: ShardedTensor) -> bool:
    """Whether it is a whole tensor of which each rank needs only its part of the sequence."""
    if isinstance(other, ShardedTensor) or not first.division.sequence or other.dim() > first.dim():
        return False
    dim = _matching_dim(other, first)
    return dim >= 0 and other.size(dim) == first.division.size > 1


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Norms over other dims than the sharded one: every rank uses the weights for its part."""
    x, shape = args[:2]
    if not isinstance(x, ShardedTensor) or x.division.dim >= x.dim() - len(shape):
        return NotImplemented

    def local(value: Any) -> Any:
        return enter(value, x.division.axis, x.division.name) if isinstance(value, Tensor) else value

    given = {key: local(value) for key, value in kwargs.items()}
    return parted(func(x.part, shape, *map(local, args[2:]), **given), x.division)


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along the last dim with keepdim, as users' own norms do it."""
    x = args[0]
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    last = isinstance(x, ShardedTensor) and dims in (-1, (-1,), [-1]) and x.division.dim < x.dim() - 1
    if not last or not kwargs.get("keepdim", len(args) > 2 and args[2]):
        return NotImplemented
    return parted(func(x.part, *args[1:], **kwargs), x.division)


def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3 or not isinstance(args[0], ShardedTensor):
        return NotImplemented
    x, first, second = args
    one, other = first % x.dim(), second % x.dim()
    dim = {one: other, other: one}.get(x.division.dim, x.division.dim)
    return _view(x.part.transpose(one, other), x.division._replace(dim=dim))


def _by_channel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pooling and similar operations, which treat channels independently."""
    x = args[0]
    if not isinstance(x, ShardedTensor) or x.division.dim != 1 or x.dim() != _num_spatial(func) + 2:
        return NotImplemented
    result = func(x.part, *args[1:], **kwargs)
    return parted(result, x.division) if isinstance(result, Tensor) else NotImplemented


def _num_spatial(func: Any) -> int:
    return int(func.__name__.rstrip("_d")[-1]) if func.__name__[-1] == "d" else -1


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, p, training = _dropout_arguments(*args, **kwargs)
    return parted(dropout_part(x.part, p, x.division), x.division) if training else x


def _feature_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, p, training = _dropout_arguments(*args, **kwargs)
    if x.division.dim != 1 or x.dim() != _num_spatial(func) + 2:
        return NotImplemented
    return parted(feature_dropout_part(x.part, p, x.division), x.division) if training else x


def _dropout_arguments(
    input: ShardedTensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> tuple[ShardedTensor, float, bool]:
    return input, p, training if train is None else train


def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """If the sharded dim stays, or becomes the last one together with all dims after it."""
    x, *sizes = args
    if not isinstance(x, ShardedTensor) or kwargs or not sizes or isinstance(sizes[0], torch.dtype):
        return NotImplemented
    shape = list(sizes[0]) if isinstance(sizes[0], list | tuple) else sizes
    shape = list(torch.empty(x.shape, device="meta").reshape(shape).shape)
    return _reshaped(x, shape)


def _flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    shape = torch.empty(x.shape, device="meta").flatten(*args[1:], **kwargs).shape
    return _reshaped(x, list(shape))


def _reshaped(x: ShardedTensor, shape: list[int]) -> Any:
    split, old = x.division, list(x.shape)
    after = old[split.dim + 1 :]
    dim = len(shape) - 1 - len(after)
    if dim >= 0 and shape[dim:] == old[split.dim :]:
        local, ranges = [*shape[:dim], x.part.size(split.dim), *after], split.ranges
    elif shape and shape[-1] == torch.Size(old[split.dim :]).numel():
        dim, each = len(shape) - 1, torch.Size(after).numel()
        local = [*shape[:-1], x.part.size(split.dim) * each]
        ranges = tuple(tuple((a * each, b * each) for a, b in mine) for mine in split.ranges)
    else:
        return NotImplemented
    return _view(x.part.reshape(local), split._replace(dim=dim, ranges=ranges))


def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indexing by numbers and slices of dims before the sharded one, or by one mask over them."""
    x, index = args
    if not isinstance(x, ShardedTensor):
        return NotImplemented
    if isinstance(index, Tensor):
        if index.dtype != torch.bool or isinstance(index, ShardedTensor) or index.dim() > x.division.dim:
            return NotImplemented
        return parted(x.part[index], x.division._replace(dim=x.division.dim - index.dim() + 1))
    items = list(index) if isinstance(index, tuple) else [index]
    if any(item is not Ellipsis and not isinstance(item, int | slice) for item in items):
        return NotImplemented
    if any(item is Ellipsis for item in items):
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (x.dim() - len(items) + 1)
    if len(items) > x.division.dim and items[x.division.dim] != slice(None):
        return NotImplemented
    gone = sum(isinstance(item, int) for item in items[: x.division.dim])
    return _view(x.part[tuple(items)], x.division._replace(dim=x.division.dim - gone))


def _view(part: Tensor, split: Split) -> Tensor:
    made = parted(part, split)
    made.is_view = True  # type: ignore[attr-defined]
    return made


def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits = args[0] if args else kwargs.get("input")
    if not isinstance(logits, ShardedTensor) or logits.division.dim != 1:
        return NotImplemented
    return entropy_in_parts(
        logits.part, logits.division, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"}
    )


def _functions(*names: str) -> list[Any]:
    """Every torch function of these names."""
    owners = (torch, functional, Tensor, torch._C._nn)
    return [getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)]


_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "requires_grad",
    "is_leaf",
    "is_cuda",
    "grad_fn",
    "itemsize",
    "is_nested",
)
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *_functions("size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "__len__"),
}
_ELEMENTWISE = (
    "relu", "relu_", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "leaky_relu_",
    "hardtanh", "hardswish", "hardsigmoid", "softplus", "softsign", "tanh", "tanh_", "sigmoid", "sigmoid_",
    "logsigmoid", "exp", "neg", "abs", "square", "sqrt", "rsqrt", "pow", "__pow__", "clamp", "clamp_", "erf", "add",
    "sub", "mul", "div", "true_divide", "add_", "sub_", "mul_", "div_", "__add__", "__radd__", "__sub__", "__mul__",
    "__rmul__", "__truediv__", "__rsub__", "__rtruediv__", "reciprocal",
    "maximum", "minimum", "float", "half", "bfloat16", "double", "to", "clone",
    "contiguous", "detach",
)  # fmt: skip
_POOLS = (
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "adaptive_max_pool3d",
)  # fmt: skip

_HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(_functions(*_ELEMENTWISE), _elementwise),
    **dict.fromkeys(_functions(*_POOLS), _by_channel),
    **dict.fromkeys(_functions("dropout"), _dropout),
    **dict.fromkeys(_functions("dropout1d", "dropout2d", "dropout3d"), _feature_dropout),
    **dict.fromkeys(_functions("view", "reshape"), _reshape),
    **dict.fromkeys(_functions("flatten"), _flatten),
    **dict.fromkeys(_functions("transpose"), _transpose),
    **dict.fromkeys(_functions("mean"), _mean),
    **dict.fromkeys([functional.layer_norm, functional.rms_norm], _norm),
    **dict.fromkeys([Tensor.__getitem__], _index),
    **dict.fromkeys([functional.cross_entropy], _cross_entropy),
}
