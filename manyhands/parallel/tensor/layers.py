"""Tensor-parallel layers. A user's layer is converted in place: same object, same parameters.

`divide_` sets a module's class to a subclass of that class and of one of the kinds below, so that names, hooks, tied
weights and `isinstance` stay as they were. Its parameters then are this rank's shards; code outside of the layer that
reads its `weight` gets a `ShardedTensor`, which behaves like the whole tensor. Start reading at `ColumnParallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from manyhands.comm.axis import Axis
from manyhands.parallel.tensor.autograd_collectives import (
    Ranges,
    Split,
    cut,
    enter,
    gather,
    leave_,
    leave_in_parts,
    slices_in_order,
)
from manyhands.parallel.tensor.layer_shards import TRANSPOSED, Cut, out_and_in
from manyhands.parallel.tensor.sharded_tensor import ShardedTensor, part_of, parted, whole_of
from manyhands.torch_private import pytree

__all__ = [
    "ByElement",
    "ChannelConv",
    "ChannelNorm",
    "ColumnParallel",
    "ConvColumnParallel",
    "ConvRowParallel",
    "GridMatrix",
    "HeadNorm",
    "HeadTable",
    "LayerPlacement",
    "ParallelLayer",
    "RowParallel",
    "Vocabulary",
    "asked",
    "at_home",
    "class_of",
    "divide_",
    "return_wholes_",
]


class LayerPlacement:
    """A sharded layer's name, its ranks, and how each of its tensors is sharded."""

    def __init__(
        self,
        name: str,
        axis: Axis,
        cuts: Mapping[str, tuple[Cut, ...]],
        *,
        bare: bool = False,
        sequence: int | None = None,
    ) -> None:
        self.name, self.axis, self.cuts, self.bare, self.sequence = name, axis, cuts, bare, sequence
        """`bare`: inside an attention sharded by heads, where tensors are plain local tensors. `sequence`: the dim
        along which sums stay sharded."""
        self.at_home = False
        """Whether the layer's own forward reads its weight now."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerPlacement:
        return self  # a group of ranks cannot be copied

    def ranges(self, dim: int = 0) -> Ranges:
        """The ranges of the layer's weight along a dim."""
        return next(ranges for cut_dim, ranges in self.cuts["weight"] if cut_dim == dim)

    def split(self, dim: int, ranges: Ranges) -> Split:
        return Split(self.axis, dim, ranges, self.name)

    def summed(self, y: Tensor) -> Tensor:
        """The sum over the ranks; sharded along the sequence, if that is on and `y` has a sequence dim."""
        if self.sequence is None or y.dim() < 3 or y.size(self.sequence) % self.axis.size:
            return leave_(y, self.axis, self.name)
        dim = self.sequence % y.dim()
        split = self.split(dim, slices_in_order(y.size(dim), self.axis.size))._replace(sequence=True)
        return parted(leave_in_parts(y, split), split)

    def outside(self, tensor: str, value: Tensor) -> Tensor:
        """The value of the layer's `weight` (or another tensor) for code outside of the layer."""
        cuts = self.cuts.get(tensor, ())
        if not cuts or self.at_home:
            return value
        (dim, ranges), *more = cuts
        if not more:
            return parted(value, self.split(dim, ranges))
        return _whole_of_block(value, self, cuts)


def _whole_of_block(value: Tensor, place: LayerPlacement, cuts: tuple[Cut, ...]) -> Tensor:
    """The whole of a matrix that is sharded along both dims: the sum of the ranks' blocks, each padded with zeros."""
    padding: list[int] = []
    for dim in range(value.dim()):
        split = place.split(dim, next(ranges for d, ranges in cuts if d == dim))
        ((start, stop),) = split.mine
        padding = [start, split.size - stop, *padding]
    return leave_(functional.pad(value, padding), place.axis, place.name)


def asked(name: str) -> Any:
    """A property that returns a parameter to code outside of the layer."""

    def get(self: nn.Module) -> Tensor | None:
        if name not in self._parameters:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        value = self._parameters[name]
        return value if value is None else self.place.outside(name, value)  # type: ignore[union-attr,operator]

    return property(get)


class ParallelLayer:
    """A kind of split, mixed into a layer's class."""

    place: LayerPlacement
    weight = asked("weight")
    bias = asked("bias")

    def own(self, name: str) -> Tensor | None:
        """The local parameter: this rank's shard, or the whole if it is not sharded."""
        value: Tensor | None = self._parameters.get(name)  # type: ignore[attr-defined]
        return value


@cache
def class_of(kind: type[Any], own: type[nn.Module]) -> type[nn.Module]:
    """A class that inherits from that kind and from the module's own class."""
    return type(own.__name__, (kind, own), {"__doc__": kind.__doc__})


def divide_(module: nn.Module, kind: type[Any], place: LayerPlacement) -> None:
    """Make the module a layer of that kind; its parameters are shards already."""
    module.place = place  # type: ignore[assignment]
    module.__class__ = class_of(kind, type(module))  # type: ignore[arg-type]


@contextmanager
def at_home(model: nn.Module) -> Iterator[None]:
    """Inside, any code that reads a layer's tensors gets the local ones, as the layer's own forward does."""
    placements = [module.place for module in model.modules() if isinstance(module, ParallelLayer)]
    for place in placements:
        place.at_home = True
    try:
        yield
    finally:
        for place in placements:
            place.at_home = False


def return_wholes_(module: nn.Module) -> None:
    """For a module with hooks on its output: it returns whole tensors. Its layers still exchange sharded ones."""
    module.register_forward_hook(lambda module, args, output: pytree.tree_map_only(Tensor, _whole_copy, output))


def _whole_copy(tensor: Tensor) -> Tensor:
    """Never a view: writing to a view would lose its hooks."""
    whole: Tensor = whole_of(tensor)
    return whole.clone() if whole._is_view() else whole


class _Matrix(ParallelLayer):
    """For `nn.Linear`, and Hugging Face's Conv1D, whose weight is the transpose of a Linear's."""

    def matrix(self) -> Tensor:
        weight = self.own("weight")
        assert weight is not None
        return weight if isinstance(self, nn.Linear) else weight.t()


class ColumnParallel(_Matrix):
    """Each rank computes some of the outputs from all inputs. No collective in forward, one all-reduce in backward."""

    def forward(self, x: Tensor) -> Tensor:
        place = self.place
        x = enter(whole_of(x), place.axis, place.name)
        y = functional.linear(x, self.matrix(), self._own_bias())
        return y if place.bare else parted(y, place.split(y.dim() - 1, self._outputs()))

    def _outputs(self) -> Ranges:
        return self.place.ranges(0 if isinstance(self, nn.Linear) else 1)

    def _own_bias(self) -> Tensor | None:
        bias = self.own("bias")
        if bias is None or "bias" in self.place.cuts:
            return bias
        return cut(bias, self.place.split(0, self._outputs()))  # a whole bias, because other layers use it, too


class RowParallel(_Matrix):
    """Each rank takes some of the inputs and computes a summand of all outputs. One all-reduce in forward."""

    def forward(self, x: Tensor) -> Tensor:
        place = self.place
        if not place.bare:
            inputs = place.ranges(1 if isinstance(self, nn.Linear) else 0)
            x = part_of(x, place.split(x.dim() - 1, inputs))
        return _with_bias(place.summed(functional.linear(x, self.matrix())), self.own("bias"))


def _with_bias(y: Tensor, bias: Tensor | None, num_dims_after: int = 0) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype).view(-1, *[1] * num_dims_after)


class GridMatrix(_Matrix):
    """Each rank has a block of the matrix: some outputs from some inputs. Input and output are whole tensors."""

    def forward(self, x: Tensor) -> Tensor:
        place = self.place
        out, into = (0, 1) if isinstance(self, nn.Linear) else (1, 0)
        x = part_of(x, place.split(x.dim() - 1, place.ranges(into)))
        y = functional.linear(x, self.matrix())
        return _with_bias(gather(y, place.split(y.dim() - 1, place.ranges(out))), self.own("bias"))


class Vocabulary(ParallelLayer):
    """An embedding sharded by rows; each rank adds zeros for the other ranks' rows, so the sum is exact."""

    def forward(self, ids: Tensor) -> Tensor:
        place, weight = self.place, self.own("weight")
        assert weight is not None and isinstance(self, nn.Embedding)
        ((start, stop),) = place.split(0, place.ranges()).mine
        not_mine = (ids < start) | (ids >= stop)
        _check_ids(ids, self.num_embeddings)
        padding = self.padding_idx
        mine = padding - start if padding is not None and start <= padding < stop else None
        rows = functional.embedding((ids - start).masked_fill(not_mine, 0), weight, mine)
        return place.summed(rows.masked_fill(not_mine[..., None], 0.0))


def _check_ids(ids: Tensor, num_embeddings: int) -> None:
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= num_embeddings):
        raise IndexError(f"index out of range: ids from {int(ids.min())} to {int(ids.max())} of {num_embeddings} rows")


class _Conv(ParallelLayer):
    """Transposed convolutions also take an optional output size."""

    def _channel_dim(self, x: Tensor) -> int:
        return x.dim() - len(self.kernel_size) - 1  # type: ignore[attr-defined]

    def _convolve(self, x: Tensor, bias: Tensor | None, output_size: list[int] | None = None) -> Tensor:
        if isinstance(self, TRANSPOSED):
            return _transposed(self, x, self.own("weight"), bias, output_size)
        return self._conv_forward(x, self.own("weight"), bias)  # type: ignore[attr-defined,no-any-return]

    def _channels(self, which: int) -> Ranges:
        """The ranges of output (0) or input (1) channels."""
        return self.place.ranges(out_and_in(self)[which])  # type: ignore[arg-type]


def _transposed(
    layer: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_size: list[int] | None,
) -> Tensor:
    dims = len(layer.kernel_size)
    padding = layer._output_padding(
        x,
        output_size,
        layer.stride,  # type: ignore[arg-type]
        layer.padding,  # type: ignore[arg-type]
        layer.kernel_size,  # type: ignore[arg-type]
        dims,
        layer.dilation,  # type: ignore[arg-type]
    )
    convolve = getattr(functional, f"conv_transpose{dims}d")
    result: Tensor = convolve(x, weight, bias, layer.stride, layer.padding, padding, layer.groups, layer.dilation)
    return result


class ConvColumnParallel(_Conv):
    """Each rank computes some of the output channels."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        place = self.place
        y = self._convolve(enter(whole_of(x), place.axis, place.name), self.own("bias"), output_size)
        return parted(y, place.split(self._channel_dim(y), self._channels(0)))


class ConvRowParallel(_Conv):
    """Each rank takes some of the input channels, and computes a summand of all output channels."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        place = self.place
        part = part_of(x, place.split(self._channel_dim(x), self._channels(1)))
        y = leave_(self._convolve(part, None, output_size), place.axis, place.name)
        return _with_bias(y, self.own("bias"), len(self.kernel_size))  # type: ignore[attr-defined]


class ChannelConv(_Conv):
    """A grouped convolution: each rank has some of the groups, with their inputs and outputs."""

    def forward(self, x: Tensor) -> Tensor:
        place, dim = self.place, self._channel_dim(x)
        y = self._convolve(part_of(x, place.split(dim, self.inputs)), self.own("bias"))
        return parted(y, place.split(dim, place.ranges()))

    inputs: Ranges
    """The ranges of the input's channels."""


class HeadNorm(ParallelLayer):
    """A norm of single heads: whole on every rank, which uses it for its heads, so gradients are all-reduced."""

    @property
    def weight(self) -> Tensor | None:
        return self._summed("weight")

    @property
    def bias(self) -> Tensor | None:
        if "bias" not in self._parameters:  # type: ignore[attr-defined]
            raise AttributeError(f"{type(self).__name__} has no bias")
        return self._summed("bias")

    def _summed(self, name: str) -> Tensor | None:
        value = self.own(name)
        return None if value is None else enter(value, self.place.axis, self.place.name)


class HeadTable(ParallelLayer):
    """An embedding with a column for each head; each rank has the columns of its heads."""

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.own("weight")
        assert weight is not None and isinstance(self, nn.Embedding)
        return functional.embedding(ids, weight, self.padding_idx)


class ByElement(ParallelLayer):
    """An elementwise function, applied to the local part."""

    def forward(self, x: Tensor) -> Tensor:
        run: Callable[[Tensor], Tensor] = super().forward  # type: ignore[misc]
        return parted(run(x.part), x.division) if isinstance(x, ShardedTensor) else run(x)


class ChannelNorm(ParallelLayer):
    """BatchNorm, InstanceNorm or GroupNorm of some of the channels, which are independent of the other channels."""

    channels: Ranges

    def forward(self, x: Tensor) -> Tensor:
        split = self.place.split(1, self.channels)
        part = part_of(x, split)
        self.place.at_home = True
        try:
            y: Tensor = super().forward(part)  # type: ignore[misc]
        finally:
            self.place.at_home = False
        return parted(y, split)
