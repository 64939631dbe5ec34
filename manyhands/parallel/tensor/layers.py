"""Layers of which each rank has a part. A user's layer becomes one where it stands: same object, same parameters.

`divide_` gives a module a class that is its own and one of the kinds below, so that names, hooks, tied weights and
`isinstance` stay as they were. Its parameters then hold this rank's part; whoever asks the layer for its `weight` from
outside gets a `Parted`, which is the whole to all purposes. Start reading at `Columns`.
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
from manyhands.parallel.tensor.sharded_tensor import Parted, part_of, parted, whole_of
from manyhands.torch_private import pytree

__all__ = [
    "ByElement",
    "ChannelConv",
    "ChannelNorm",
    "Columns",
    "ConvColumns",
    "ConvRows",
    "Divided",
    "GridMatrix",
    "HeadNorm",
    "HeadTable",
    "Place",
    "Rows",
    "Vocabulary",
    "asked",
    "at_home",
    "class_of",
    "divide_",
    "return_wholes_",
]


class Place:
    """What a divided layer knows of itself: its name, its ranks, how each of its tensors is cut."""

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
        """`bare`: inside an attention by heads, where tensors are plain parts. `sequence`: the dim along which sums
        are left in parts."""
        self.at_home = False
        """Whether the layer's own forward asks for its weight."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        return self  # a group of ranks cannot be copied

    def ranges(self, dim: int = 0) -> Ranges:
        """Of the layer's weight along a dim."""
        return next(ranges for cut_dim, ranges in self.cuts["weight"] if cut_dim == dim)

    def split(self, dim: int, ranges: Ranges) -> Split:
        return Split(self.axis, dim, ranges, self.name)

    def summed(self, y: Tensor) -> Tensor:
        """The sum over the ranks; a part of it for each, if sums are left so and what is summed has such a dim."""
        if self.sequence is None or y.dim() < 3 or y.size(self.sequence) % self.axis.size:
            return leave_(y, self.axis, self.name)
        dim = self.sequence % y.dim()
        split = self.split(dim, slices_in_order(y.size(dim), self.axis.size))._replace(sequence=True)
        return parted(leave_in_parts(y, split), split)

    def outside(self, tensor: str, value: Tensor) -> Tensor:
        """What a stranger gets who asks for the layer's `weight`."""
        cuts = self.cuts.get(tensor, ())
        if not cuts or self.at_home:
            return value
        (dim, ranges), *more = cuts
        if not more:
            return parted(value, self.split(dim, ranges))
        return _whole_of_block(value, self, cuts)


def _whole_of_block(value: Tensor, place: Place, cuts: tuple[Cut, ...]) -> Tensor:
    """Of a matrix that is cut along both dims: each rank's block in its place among zeros, summed."""
    padding: list[int] = []
    for dim in range(value.dim()):
        split = place.split(dim, next(ranges for d, ranges in cuts if d == dim))
        ((start, stop),) = split.mine
        padding = [start, split.size - stop, *padding]
    return leave_(functional.pad(value, padding), place.axis, place.name)


def asked(name: str) -> Any:
    """A parameter as whoever asks the layer for it gets it."""

    def get(self: nn.Module) -> Tensor | None:
        if name not in self._parameters:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        value = self._parameters[name]
        return value if value is None else self.place.outside(name, value)  # type: ignore[union-attr,operator]

    return property(get)


class Divided:
    """A kind of division, to be mixed into a layer's own class."""

    place: Place
    weight = asked("weight")
    bias = asked("bias")

    def own(self, name: str) -> Tensor | None:
        """A parameter as it lies here: this rank's part, or the whole if it is not divided."""
        value: Tensor | None = self._parameters.get(name)  # type: ignore[attr-defined]
        return value


@cache
def class_of(kind: type[Any], own: type[nn.Module]) -> type[nn.Module]:
    """Its own class, and that kind before it."""
    return type(own.__name__, (kind, own), {"__doc__": kind.__doc__})


def divide_(module: nn.Module, kind: type[Any], place: Place) -> None:
    """Make the module a layer of that kind; its parameters hold parts already."""
    module.place = place  # type: ignore[assignment]
    module.__class__ = class_of(kind, type(module))  # type: ignore[arg-type]


@contextmanager
def at_home(model: nn.Module) -> Iterator[None]:
    """Inside, whoever asks a layer for its tensors gets what lies here, as the layer's own forward does."""
    places = [module.place for module in model.modules() if isinstance(module, Divided)]
    for place in places:
        place.at_home = True
    try:
        yield
    finally:
        for place in places:
            place.at_home = False


def return_wholes_(module: nn.Module) -> None:
    """For a module whose output others hang hooks on: what its layers hand to each other stays in parts."""
    module.register_forward_hook(lambda module, args, output: pytree.tree_map_only(Tensor, _whole_apart, output))


def _whole_apart(tensor: Tensor) -> Tensor:
    """No view, either: to write to one is to lose its hooks."""
    whole: Tensor = whole_of(tensor)
    return whole.clone() if whole._is_view() else whole


class _Matrix(Divided):
    """Of `nn.Linear`, and of Hugging Face's Conv1D, whose weight is the transpose of a Linear's."""

    def matrix(self) -> Tensor:
        weight = self.own("weight")
        assert weight is not None
        return weight if isinstance(self, nn.Linear) else weight.t()


class Columns(_Matrix):
    """Each rank computes some of the outputs from all inputs. Nothing travels forward; backward sums once."""

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
        return cut(bias, self.place.split(0, self._outputs()))  # whole, because others use it, too


class Rows(_Matrix):
    """Each rank takes some of the inputs and computes a summand of all outputs. Forward sums once."""

    def forward(self, x: Tensor) -> Tensor:
        place = self.place
        if not place.bare:
            inputs = place.ranges(1 if isinstance(self, nn.Linear) else 0)
            x = part_of(x, place.split(x.dim() - 1, inputs))
        return _with_bias(place.summed(functional.linear(x, self.matrix())), self.own("bias"))


def _with_bias(y: Tensor, bias: Tensor | None, num_dims_after: int = 0) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype).view(-1, *[1] * num_dims_after)


class GridMatrix(_Matrix):
    """Each rank has a block of the matrix: some of the outputs from some of the inputs. Whole in, whole out."""

    def forward(self, x: Tensor) -> Tensor:
        place = self.place
        out, into = (0, 1) if isinstance(self, nn.Linear) else (1, 0)
        x = part_of(x, place.split(x.dim() - 1, place.ranges(into)))
        y = functional.linear(x, self.matrix())
        return _with_bias(gather(y, place.split(y.dim() - 1, place.ranges(out))), self.own("bias"))


class Vocabulary(Divided):
    """An embedding of which each rank has some rows; the others' are zeros in its sum, which is therefore exact."""

    def forward(self, ids: Tensor) -> Tensor:
        place, weight = self.place, self.own("weight")
        assert weight is not None and isinstance(self, nn.Embedding)
        ((start, stop),) = place.split(0, place.ranges()).mine
        elsewhere = (ids < start) | (ids >= stop)
        _check_ids(ids, self.num_embeddings)
        padding = self.padding_idx
        mine = padding - start if padding is not None and start <= padding < stop else None
        rows = functional.embedding((ids - start).masked_fill(elsewhere, 0), weight, mine)
        return place.summed(rows.masked_fill(elsewhere[..., None], 0.0))


def _check_ids(ids: Tensor, num_embeddings: int) -> None:
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= num_embeddings):
        raise IndexError(f"index out of range: ids from {int(ids.min())} to {int(ids.max())} of {num_embeddings} rows")


class _Conv(Divided):
    """Transposed ones take the size of their output, too, if somebody asks for one."""

    def _channel_dim(self, x: Tensor) -> int:
        return x.dim() - len(self.kernel_size) - 1  # type: ignore[attr-defined]

    def _convolve(self, x: Tensor, bias: Tensor | None, output_size: list[int] | None = None) -> Tensor:
        if isinstance(self, TRANSPOSED):
            return _transposed(self, x, self.own("weight"), bias, output_size)
        return self._conv_forward(x, self.own("weight"), bias)  # type: ignore[attr-defined,no-any-return]

    def _channels(self, which: int) -> Ranges:
        """Of outputs (0) or inputs (1)."""
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


class ConvColumns(_Conv):
    """Each rank computes some of the output channels."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        place = self.place
        y = self._convolve(enter(whole_of(x), place.axis, place.name), self.own("bias"), output_size)
        return parted(y, place.split(self._channel_dim(y), self._channels(0)))


class ConvRows(_Conv):
    """Each rank takes some of the input channels, and computes a summand of all output channels."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        place = self.place
        part = part_of(x, place.split(self._channel_dim(x), self._channels(1)))
        y = leave_(self._convolve(part, None, output_size), place.axis, place.name)
        return _with_bias(y, self.own("bias"), len(self.kernel_size))  # type: ignore[attr-defined]


class ChannelConv(_Conv):
    """A convolution in groups: each rank has some of the groups, with their inputs and outputs."""

    def forward(self, x: Tensor) -> Tensor:
        place, dim = self.place, self._channel_dim(x)
        y = self._convolve(part_of(x, place.split(dim, self.inputs)), self.own("bias"))
        return parted(y, place.split(dim, place.ranges()))

    inputs: Ranges
    """Of the input's channels."""


class HeadNorm(Divided):
    """A norm of single heads: whole, and used by each rank for its own heads, so its gradients are sums."""

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


class HeadTable(Divided):
    """An embedding with a column for each head, of which each rank looks up its own heads'."""

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.own("weight")
        assert weight is not None and isinstance(self, nn.Embedding)
        return functional.embedding(ids, weight, self.padding_idx)


class ByElement(Divided):
    """Something element by element, done to the part."""

    def forward(self, x: Tensor) -> Tensor:
        run: Callable[[Tensor], Tensor] = super().forward  # type: ignore[misc]
        return parted(run(x.part), x.division) if isinstance(x, Parted) else run(x)


class ChannelNorm(Divided):
    """BatchNorm, InstanceNorm or GroupNorm of some of the channels, each of which needs nothing of the others."""

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
