"""Which modules of a model stay whole when it is cut into stages: its blocks.

Layers in a list, what stands beside such a list, and every other child of the model. Modules that merely hold a list of
layers are looked into, as `nn.TransformerEncoder` or Hugging Face's encoders. Start reading at `units_of`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from manyhands.parallel.pipeline.partition import is_chain

__all__ = ["ancestors", "largest_to_open", "units_of"]

LISTS = (nn.ModuleList, nn.ModuleDict)


def units_of(model: nn.Module, opened: Collection[str] = ()) -> list[str]:
    """Names of modules that stay whole, in the order in which they are declared. `opened` ones are looked into."""
    return list(_units("", model, opened, in_list=False))


def _units(name: str, module: nn.Module, opened: Collection[str], *, in_list: bool) -> Iterator[str]:
    if name and name not in opened and not _is_held_open(module, in_list):
        yield name
        return
    for child_name, child in module._modules.items():
        if child is not None:
            full = f"{name}.{child_name}" if name else child_name
            yield from _units(full, child, opened, in_list=isinstance(module, LISTS))


def _is_held_open(module: nn.Module, in_list: bool) -> bool:
    """A layer of a list stays whole, whatever is in it, such as a list of experts."""
    if isinstance(module, LISTS):
        return True
    return not in_list and (is_chain(module) or any(isinstance(one, LISTS) for one in module.modules()))


def ancestors(names: Sequence[str]) -> set[str]:
    """Modules that hold these, to be looked into."""
    return {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}


def largest_to_open(model: nn.Module, units: Sequence[str]) -> str | None:
    """The unit with children that has most parameters; None: none has any."""
    sizes = {
        name: sum(param.numel() for param in model.get_submodule(name).parameters())
        for name in units
        if any(True for _ in model.get_submodule(name).children())
    }
    return max(sizes, key=lambda name: sizes[name], default=None)
