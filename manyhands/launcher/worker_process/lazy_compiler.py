"""Keep torch from loading its compiler before anything is compiled: over a second of start-up in every worker.

torch 2.13's optimizers import all of `torch._dynamo` when they are made and when they step, only to tell a compiler
that may be at work where not to look. As long as `torch._dynamo` is not imported none can be, so the plain method does
the same; from its import on, torch's own way is taken. Should torch change here, nothing happens and workers start as
slowly as they otherwise would. Start reading at `load_compiler_late`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from manyhands.launcher.worker_process.import_hooks import after_import

__all__ = ["load_compiler_late"]

NOT_COMPILED = ("add_param_group", "state_dict", "load_state_dict")
# Where torch keeps, on a method that is not to be compiled, what to call instead from the second call on.
CACHE = "__dynamo_disable"
# What torch calls the wrapper of a `step` that tells the compiler.
TELLING_STEP = "_use_grad"


def load_compiler_late() -> None:
    """For this process, from now on. Imports nothing; may be called again."""
    after_import("torch.optim", _spare)


def _spare(optim: ModuleType) -> None:
    if "torch._dynamo" in sys.modules:
        return
    methods = [getattr(optim.Optimizer, name).__wrapped__ for name in NOT_COMPILED]
    if any(hasattr(method, CACHE) for method in methods):
        return
    for method in methods:
        setattr(method, CACHE, method)
    for kind in vars(optim).values():
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer):
            step: Any = vars(kind).get("step")  # of this class, not of one that it inherits from
            if step is not None and step.__code__.co_name == TELLING_STEP:
                setattr(kind, "step", _without_compiler(step, step.__wrapped__))  # noqa: B010 - mypy knows no `step`

    def give_back(_dynamo: ModuleType) -> None:
        for method in methods:
            delattr(method, CACHE)

    after_import("torch._dynamo", give_back)


def _without_compiler(told: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's step: `plain` under the grad mode that it asks for, or `told`, which tells the compiler too."""
    from torch import set_grad_enabled

    @functools.wraps(told)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return told(self, *args, **kwargs)
        with set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    return step
