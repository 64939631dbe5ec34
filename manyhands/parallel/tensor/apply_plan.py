"""Shard a model in place by its plan: modules and parameters stay the same objects.

Start reading at `split_model_`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.parallel.model.tensor_shard import TensorShard
from manyhands.parallel.tensor.attention import HeadsAttention, HeadsRegion
from manyhands.parallel.tensor.autograd_collectives import slices_in_order
from manyhands.parallel.tensor.huggingface_attention import attention_of
from manyhands.parallel.tensor.layer_shards import CONVS, NORMS, is_matrix, is_opaque, share_of, sizes_of
from manyhands.parallel.tensor.layers import (
    ByElement,
    ChannelConv,
    ChannelNorm,
    ColumnParallel,
    ConvColumnParallel,
    ConvRowParallel,
    GridMatrix,
    HeadNorm,
    HeadTable,
    LayerPlacement,
    ParallelLayer,
    RowParallel,
    Vocabulary,
    divide_,
)
from manyhands.parallel.tensor.plan import LayerSplit, TensorPlan, leaves_parts
from manyhands.parallel.tensor.whole_parameters import hold_

__all__ = ["split_model_"]

_MATRICES: dict[str, type[ParallelLayer]] = {
    "columns": ColumnParallel,
    "heads": ColumnParallel,
    "vocabulary": ColumnParallel,
    "rows": RowParallel,
    "grid": GridMatrix,
}
# Attributes of another library's attention that count heads or sizes, which its code uses.
_COUNTS = (
    "num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_heads", "all_head_size", "split_size",
)  # fmt: skip


def split_model_(model: nn.Module, plan: TensorPlan, axis: Axis) -> dict[str, TensorShard]:
    """Keep this rank's shard of every layer and drop the rest. Every rank has the same whole model before.

    Returns this rank's shard of each parameter and buffer that is sharded, by its name in `state_dict`; under each of
    its names, if it has several.
    """
    assert axis.size == plan.degree, f"a plan for {plan.degree} ranks, on an axis of {axis.size}"
    if axis.size == 1:
        return {}
    modules, shares = dict(model.named_modules()), dict[int, TensorShard]()
    layers = [(layer, modules[layer.name]) for layer in plan.layers if layer.kind != "whole"]
    placements = [
        LayerPlacement(
            layer.name,
            axis,
            layer.cuts(module, axis.size),
            bare=bool(layer.inside),
            sequence=_sequence_dim(layer, modules) if plan.sequence else None,
        )
        for layer, module in layers
    ]
    for (layer, module), placement in zip(layers, placements, strict=True):  # after all cuts have been computed
        _divide_layer_(module, layer, placement, shares)
    hold_(model)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: shares[id(tensor)] for name, tensor in named if id(tensor) in shares}


def _sequence_dim(layer: LayerSplit, modules: Mapping[str, nn.Module]) -> int | None:
    """The sequence dim of a layer's output."""
    if not leaves_parts(modules[layer.name], layer.kind):
        return None
    # MultiheadAttention's output projection gets the sequence first; elsewhere it is next to the features.
    return 0 if layer.inside and isinstance(modules[layer.inside], nn.MultiheadAttention) else -2


def _divide_layer_(
    module: nn.Module, layer: LayerSplit, placement: LayerPlacement, shares: dict[int, TensorShard]
) -> None:
    if layer.kind == "heads" and not layer.inside and not isinstance(module, nn.MultiheadAttention):
        _divide_region_(module, placement)
        return
    kind = _kind_of(module, layer.kind)
    _forget_sizes_(module, kind, placement.axis.size)
    for name, cuts in placement.cuts.items():
        tensor: Tensor = {**module._buffers, **module._parameters}[name]  # type: ignore[assignment]
        if id(tensor) not in shares:  # a tied tensor is sharded once
            shares[id(tensor)] = share_of(tuple(tensor.shape), cuts, placement.axis.rank)
            _keep_(tensor, shares[id(tensor)])
    divide_(module, kind, placement)


def _keep_(tensor: Tensor, share: TensorShard) -> None:
    tensor.data = share.cut(tensor.data)
    tensor.grad = None


def _kind_of(module: nn.Module, kind: str) -> type[ParallelLayer]:
    if isinstance(module, nn.MultiheadAttention):
        return HeadsAttention
    if isinstance(module, nn.Embedding):
        return Vocabulary if kind == "vocabulary" else HeadTable
    if is_opaque(module):
        return ByElement
    if isinstance(module, NORMS):
        return ChannelNorm
    if isinstance(module, CONVS):
        return ConvRowParallel if kind == "rows" else ChannelConv if module.groups > 1 else ConvColumnParallel
    return _MATRICES[kind] if is_matrix(module) else HeadNorm


def _forget_sizes_(module: nn.Module, kind: type[ParallelLayer], degree: int) -> None:
    """Set sizes that a layer's code reads to those of its shard."""
    if kind is ChannelConv and isinstance(module, CONVS):
        module.inputs = slices_in_order(module.in_channels, degree)  # type: ignore[assignment]
        module.groups //= degree
    elif isinstance(module, nn.GroupNorm):
        module.channels = slices_in_order(module.num_channels, degree)  # type: ignore[assignment]
        module.num_groups, module.num_channels = module.num_groups // degree, module.num_channels // degree
    elif isinstance(module, NORMS):
        features = int(module.num_features)  # type: ignore[arg-type]
        module.channels, module.num_features = slices_in_order(features, degree), features // degree  # type: ignore[assignment]


def _divide_region_(module: nn.Module, placement: LayerPlacement) -> None:
    found = attention_of(module)
    assert found is not None
    module.num_all_heads = found.num_heads  # type: ignore[assignment]
    _, width = sizes_of(module.get_submodule(found.into[0]))
    module.outputs = slices_in_order(width, placement.axis.size) if found.out is None else None  # type: ignore[assignment]
    for name in _COUNTS:
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, getattr(module, name) // placement.axis.size)
    divide_(module, HeadsRegion, placement)
