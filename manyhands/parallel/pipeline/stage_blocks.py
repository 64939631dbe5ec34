"""Which modules of a model are its blocks when it is cut into stages: they stay whole.

Sequentials are cut between their modules. In any other model, blocks are the layers in a list, the modules next to such
a list, and every other child of the model: a module that only contains a list of layers, such as
`nn.TransformerEncoder` or Hugging Face's encoders, is split into its children. Start reading at `names_of_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from torch import nn

__all__ = ["ancestors", "is_chain", "largest_to_open", "names_in_chain", "names_of_blocks"]

LISTS = (nn.ModuleList, nn.ModuleDict)


def is_chain(module: nn.Module) -> bool:
    """Whether a call of it only calls its children one after the other."""
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def names_in_chain(chain: nn.Module) -> list[str]:
    """The modules that a call of the chain calls, in this order."""
    return list(_names(chain, "", lambda name, child, parent: is_chain(child)))


def names_of_blocks(model: nn.Module, opened: Collection[str] = ()) -> list[str]:
    """The blocks of a model that is no chain, in the order of their declaration. `opened` modules are split."""

    def is_split(name: str, child: nn.Module, parent: nn.Module) -> bool:
        if name in opened or isinstance(child, LISTS):
            return True
        if isinstance(parent, LISTS):  # layers stay whole even if they contain a list, such as one of experts
            return False
        return is_chain(child) or any(isinstance(one, LISTS) for one in child.modules())

    return list(_names(model, "", is_split))


def _names(module: nn.Module, prefix: str, is_split: Callable[[str, nn.Module, nn.Module], bool]) -> Iterator[str]:
    for name, child in module._modules.items():  # named_children leaves out a module that occurs a second time
        if child is None:
            continue
        full = f"{prefix}{name}"
        if is_split(full, child, module):
            yield from _names(child, f"{full}.", is_split)
        else:
            yield full


def ancestors(names: Sequence[str]) -> set[str]:
    """The modules that contain these, to be split."""
    return {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}


def largest_to_open(model: nn.Module, blocks: Sequence[str]) -> str | None:
    """The block with the most parameters among those with children; None if none has children."""
    sizes = {
        name: sum(param.numel() for param in model.get_submodule(name).parameters())
        for name in blocks
        if any(True for _ in model.get_submodule(name).children())
    }
    return max(sizes, key=lambda name: sizes[name], default=None)
