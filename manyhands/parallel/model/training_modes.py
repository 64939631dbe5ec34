"""Which of a model's modules are in training mode: the user decides, and an evaluation does not change it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["begin_training_", "copy_modes_", "keeping_modes"]


def begin_training_(model: nn.Module) -> list[str]:
    """Set training mode, except for modules that the user has set to evaluation mode.

    A model that is entirely in evaluation mode, as a library or an evaluation returns it, is set to training mode
    entirely. Returns the names of modules that stay in evaluation mode and have parameters to train: this may be a
    mistake of the user.
    """
    if not any(module.training for module in model.modules()):
        model.train()
        return []
    return [name for name, module in _topmost_evaluated("", model) if _is_trained(module)]


def _topmost_evaluated(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if not any(one.training for one in module.modules()):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _topmost_evaluated(f"{name}.{child_name}" if name else child_name, child)


def _is_trained(module: nn.Module) -> bool:
    """A batch-norm layer is set to evaluation mode on purpose, whether its scale is trained or not."""
    kinds = [one for one in module.modules() if not isinstance(one, nn.modules.batchnorm._BatchNorm)]
    return any(param.requires_grad for one in kinds for param in one.parameters(recurse=False))


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def copy_modes_(target: nn.Module, source: nn.Module) -> None:
    """Copy the modes to a copy of the same model."""
    modes = {name: module.training for name, module in source.named_modules()}
    for name, module in target.named_modules():
        module.training = modes.get(name, source.training)
