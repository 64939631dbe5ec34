"""Keeps torch from loading its compiler before anything is compiled, which saves over a second of start-up per worker.

torch 2.13's optimizers import all of `torch._dynamo` when they are created and when they step, only to exclude
themselves from compilation. As long as `torch._dynamo` is not imported nothing can be compiled, so the plain method
does the same; once it is imported, torch's wrappers are used. If torch changes here, nothing is patched and workers
start as slowly as they otherwise would. Start reading at `load_compiler_late`.
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
# The attribute in which torch caches, on a method excluded from compilation, what to call from the second call on.
CACHE = "__dynamo_disable"
# The name of torch's wrapper of a `step`, which excludes it from compilation.
WRAPPED_STEP = "_use_grad"


def load_compiler_late() -> None:
    """Patch this process. Imports nothing; may be called again."""
    after_import("torch.optim", _patch)


def _patch(optim: ModuleType) -> None:
    if "torch._dynamo" in sys.modules:
        return
    methods = [getattr(optim.Optimizer, name).__wrapped__ for name in NOT_COMPILED]
    if any(hasattr(method, CACHE) for method in methods):
        return
    for method in methods:
        setattr(method, CACHE, method)
    for kind in vars(optim).values():
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer):
            step: Any = vars(kind).get("step")  # defined in this class, not inherited
            if step is not None and step.__code__.co_name == WRAPPED_STEP:
                setattr(kind, "step", _without_compiler(step, step.__wrapped__))  # noqa: B010 - mypy knows no `step`

    def restore(_dynamo: ModuleType) -> None:
        for method in methods:
            delattr(method, CACHE)

    after_import("torch._dynamo", restore)


def _without_compiler(wrapped: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's step: `plain` under the grad mode that it sets, or torch's `wrapped` once there is a compiler."""
    from torch import set_grad_enabled

    @functools.wraps(wrapped)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return wrapped(self, *args, **kwargs)
        with set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    return step
