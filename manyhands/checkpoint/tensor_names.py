"""Names of a model's tensors outside of its process: without what `torch.compile` adds to them.

`torch.compile(model)` wraps the model, or a layer of it, in a module that has the original one as `_orig_mod`. This
does not change what is computed, so no file contains it, and no file needs it to be loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["own_names", "plain_name"]

_WRAPPED = "_orig_mod"


def plain_name(name: str) -> str:
    """The name in the model without compilation."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED) if _WRAPPED in name else name


def own_names(names: Iterable[str]) -> dict[str, str]:
    """The names in this process, by plain name."""
    return {plain_name(name): name for name in names}
