"""Models wrapped by `torch.compile`, under a strategy that partitions them.

A pipeline stage runs the model's blocks one by one, and tensor-parallel layers communicate while they compute: neither
can use a graph of the whole model. torch would break such a graph at every collective, compile the pieces for a minute
and warn about each. So the model runs uncompiled; blocks that are compiled one by one stay compiled.
"""

from __future__ import annotations

from torch import nn

__all__ = ["as_written", "uncompile_"]

_WRAPPED = "_orig_mod"


def as_written(model: nn.Module) -> nn.Module:
    """The original module of one that is compiled as a whole; any other module as it is."""
    found = getattr(model, _WRAPPED, model)
    return found if isinstance(found, nn.Module) else model


def uncompile_(model: nn.Module) -> list[str]:
    """Make every layer run uncompiled. Returns the names of the layers that were compiled."""
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
