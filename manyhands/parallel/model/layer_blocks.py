"""Which layers of a model are its blocks: the units that are gathered, or recomputed, as a whole.

Members of `nn.ModuleList`, `nn.Sequential` and `nn.ModuleDict` are blocks, such as the layers of transformers and the
stages of convolutional networks. A pipeline's blocks, which cover the whole model and do not overlap, are those of
`parallel.pipeline.stage_blocks`. It reads a model and changes nothing. Start reading at `blocks_of`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from manyhands.errors import SpecError

__all__ = ["blocks_of", "matching"]

# Smaller blocks are gathered with the layer around them: a separate collective would take longer than its transfer.
LEAST_NUMEL = 2**12
# A block with more than this fraction of all elements is searched for smaller blocks: it would be gathered whole.
LARGEST_PART = 0.25


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks by name, inner blocks before outer ones. A module that shares a parameter with another is no block."""
    total = _numel(model)
    uses = Counter(
        id(param) for module in model.modules() for param in module._parameters.values() if param is not None
    )
    found = dict(_candidates(model, "", LARGEST_PART * total))
    return {name: block for name, block in found.items() if _numel(block) >= LEAST_NUMEL and _has_no_ties(block, uses)}


def _candidates(module: nn.Module, prefix: str, largest: float) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if not is_list or _numel(child) > largest:
            yield from _candidates(child, f"{full}.", largest)
        if is_list and not isinstance(child, nn.ModuleList | nn.ModuleDict):  # those have no forward
            yield full, child


def _has_no_ties(block: nn.Module, uses: Counter[int]) -> bool:
    """Whether no module outside uses any of its parameters."""
    inside = Counter(
        id(param) for module in block.modules() for param in module._parameters.values() if param is not None
    )
    return all(uses[key] == count for key, count in inside.items())


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def matching(model: nn.Module, patterns: tuple[str, ...], where: str) -> dict[str, nn.Module]:
    """Modules whose names match patterns such as "encoder.layers.*"; of one within another, the outer."""
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        named = {name: module for name, module in model.named_modules() if name and fnmatchcase(name, pattern)}
        if not named:
            names = list(blocks_of(model)) or [name for name, _ in model.named_children()]
            raise SpecError(f"No layer is called {pattern!r}.", where=where, fix=[f'"{name}"' for name in names[:3]])
        found |= named
    return {name: module for name, module in found.items() if not any(_is_within(name, other) for other in found)}


def _is_within(name: str, other: str) -> bool:
    return name.startswith(f"{other}.")
