"""Models that `torch.compile` has wrapped, where a strategy divides them.

A stage of a pipeline runs the model's blocks one by one, and divided layers exchange tensors while they compute:
neither can use a graph of the whole. torch would break such a graph at every exchange, compile the pieces between for a
minute and warn of each. So the model runs as it was written; blocks that are compiled each by itself stay so.
"""

from __future__ import annotations

from torch import nn

__all__ = ["as_written", "uncompile_"]

_WRAPPED = "_orig_mod"


def as_written(model: nn.Module) -> nn.Module:
    """The module inside, of one that is compiled as a whole; any other itself."""
    found = getattr(model, _WRAPPED, model)
    return found if isinstance(found, nn.Module) else model


def uncompile_(model: nn.Module) -> list[str]:
    """Have every layer run as it was written. Returns the names of those that were compiled."""
    found = []
    for name, parent in list(model.named_modules()):
        if getattr(parent, "_compiled_call_impl", None) is not None:  # by its method `compile`
            parent._compiled_call_impl = None
            found.append(name)
        for key, child in list(parent.named_children()):
            if as_written(child) is not child:
                parent.register_module(key, as_written(child))
                found.append(f"{name}.{key}" if name else key)
    return found
