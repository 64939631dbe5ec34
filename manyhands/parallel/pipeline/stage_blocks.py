"""Which modules of a model stay whole when it is cut into stages: its blocks.

Blocks are the layers in a list, the modules next to such a list, and every other child of the model. A module that
only contains a list of layers, such as `nn.TransformerEncoder` or Hugging Face's encoders, is split into its children.
Start reading at `units_of`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from manyhands.parallel.pipeline.partition import is_chain

__all__ = ["ancestors", "largest_to_open", "units_of"]

LISTS = (nn.ModuleList, nn.ModuleDict)


def units_of(model: nn.Module, opened: Collection[str] = ()) -> list[str]:
    """Names of modules that stay whole, in the order of their declaration. `opened` modules are split."""
    return list(_units("", model, opened, in_list=False))


def _units(name: str, module: nn.Module, opened: Collection[str], *, in_list: bool) -> Iterator[str]:
    if name and name not in opened and not _is_opened(module, in_list):
        yield name
        return
    for child_name, child in module._modules.items():
        if child is not None:
            full = f"{name}.{child_name}" if name else child_name
            yield from _units(full, child, opened, in_list=isinstance(module, LISTS))


def _is_opened(module: nn.Module, in_list: bool) -> bool:
    """A layer of a list stays whole, even if it contains a list, such as one of experts."""
    if isinstance(module, LISTS):
        return True
    return not in_list and (is_chain(module) or any(isinstance(one, LISTS) for one in module.modules()))


def ancestors(names: Sequence[str]) -> set[str]:
    """The modules that contain these, to be split."""
    return {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}


def largest_to_open(model: nn.Module, units: Sequence[str]) -> str | None:
    """The unit with the most parameters among those with children; None if none has children."""
    sizes = {
        name: sum(param.numel() for param in model.get_submodule(name).parameters())
        for name in units
        if any(True for _ in model.get_submodule(name).children())
    }
    return max(sizes, key=lambda name: sizes[name], default=None)
