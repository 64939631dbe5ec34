"""Per-layer dtypes, chosen by patterns of layer names.

A chosen layer keeps its weights in its dtype, casts its inputs to it for any precision of the run, and casts its
outputs back to the dtype of its inputs. Start reading at `set_dtypes_`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.checkpoint.tensor_names import own_names
from manyhands.errors import SpecError
from manyhands.spec.load import nearest
from manyhands.torch_private import pytree

__all__ = ["set_dtypes_"]

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def set_dtypes_(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    """Make the layers that match a pattern compute in its dtype, and return them. The last matching pattern wins."""
    own = own_names(name for name, _ in model.named_modules())  # for a compiled layer, the original inside it
    names = [name for name in own if name]
    chosen: dict[str, str] = {}
    for pattern, dtype in patterns.items():
        if dtype not in DTYPES:
            raise SpecError(f"dtypes has {dtype!r} for {pattern!r}.", fix=[f'"{known}"' for known in DTYPES])
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            near = nearest(pattern, names) or names[:3]
            raise SpecError(f"dtypes: no layer is called {pattern!r}.", fix=[f'"{name}"' for name in near])
        chosen |= dict.fromkeys(found, dtype)
    for name in _outermost(chosen):
        _Typed(DTYPES[chosen[name]]).watch(model.get_submodule(own[name]))
    return chosen


def _outermost(chosen: Mapping[str, str]) -> list[str]:
    """Without layers inside a layer of the same dtype, which casts for them."""

    def is_inside(name: str) -> bool:
        above = [other for other in chosen if name.startswith(f"{other}.")]
        return bool(above) and chosen[max(above, key=len)] == chosen[name]

    return [name for name in chosen if not is_inside(name)]


class _Typed:
    """Casts around one layer's forward pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._open: list[tuple[torch.autocast, torch.dtype]] = []

    def watch(self, module: nn.Module) -> None:
        module.to(self._dtype)
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        floating = [one for one in pytree.tree_leaves((args, kwargs)) if _is_floating(one)]
        kind = floating[0].device.type if floating else "cpu"
        autocast = torch.autocast(kind, enabled=False)
        autocast.__enter__()  # type: ignore[no-untyped-call]
        self._open.append((autocast, floating[0].dtype if floating else self._dtype))
        return _cast(args, self._dtype), _cast(kwargs, self._dtype)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        autocast, before = self._open.pop()
        autocast.__exit__(None, None, None)
        return _cast(output, before)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda one: one.to(dtype) if _is_floating(one) else one, tree)
