"""What tensors of a model are called outside of its process: without what `torch.compile` puts into their names.

`torch.compile(model)` wraps the model, or a layer of it, in a module that has the original one as `_orig_mod`. That is
how a process computes, not what it computes, so no file has it, and none needs it to be loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["own_names", "plain_name"]

_WRAPPED = "_orig_mod"


def plain_name(name: str) -> str:
    """As the model calls it without compilation."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED) if _WRAPPED in name else name


def own_names(names: Iterable[str]) -> dict[str, str]:
    """By its plain name, what each is called in this process."""
    return {plain_name(name): name for name in names}
