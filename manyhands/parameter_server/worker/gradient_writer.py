"""From backward to a gradient buffer that servers read: the gradient of one slice, or of all slices of a step.

Large gradients are copied into the buffer as soon as backward has computed them, while they are in a cache; small ones
all at the end. Several slices in one buffer are summed along the slice tree first. Some gradients of a single slice
can be computed in the buffer itself (`straight`). Start reading at `GradientWriter.begin`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from manyhands.parallel.gradients.gradient_lists import Gradients, add_lists, take
from manyhands.parallel.gradients.shared_memory_sum import AT_ONCE_BYTES
from manyhands.parallel.gradients.slice_tree import Stack
from manyhands.parameter_server.memory.versioned_memory import copy_large_
from manyhands.parameter_server.worker.direct_linear_gradients import DirectLinearGradients
from manyhands.torch_private import foreach_copy_

__all__ = ["GradientWriter"]


class GradientWriter:
    """Writes gradients of the trained `params`. Per buffer: `begin`, then for each slice the forward, `in_forward`,
    and `backward`; at the end `finish`.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = list(params)
        self._direct, self._is_direct = DirectLinearGradients(self._params, AT_ONCE_BYTES), False
        self._views: Sequence[Tensor] = ()
        self._at_once = False
        self._written: set[int] = set()
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._copy_hook(i))  # type: ignore[no-untyped-call]
            for i, param in enumerate(self._params)
            if param.nbytes >= AT_ONCE_BYTES
        ]

    def begin(self, views: Sequence[Tensor], num_slices: int, *, straight: bool = False) -> None:
        """Gradients go to `views`, one per parameter; `straight`: computed in them, which may round differently."""
        self._views, self._written, self._at_once = views, set(), num_slices == 1
        self._is_direct = straight and self._at_once
        self._direct.begin(views, self._written)
        self._stack: Stack[Gradients] = Stack(num_slices, add=add_lists)
        for param in self._params:
            param.grad = None

    def _copy_hook(self, index: int) -> Callable[[Tensor], None]:
        def arrived(param: Tensor) -> None:
            if self._at_once and param.grad is not None and not param.grad.is_sparse:
                view = self._views[index]
                # A reentrant backward accumulates a gradient in several parts.
                view.add_(param.grad) if index in self._written else copy_large_(view, param.grad)
                self._written.add(index)
                param.grad = None

        return arrived

    def in_forward(self) -> AbstractContextManager[object]:
        return self._direct if self._is_direct else nullcontext()

    def backward(self, loss: Tensor, v: int) -> None:
        """Of slice `v`."""
        if self._is_direct and loss.grad_fn is not None:
            self._direct.backward(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        if not self._at_once:
            self._stack.push(v, [take(param) for param in self._params])

    def finish(self) -> list[int]:
        """Parameters that got no gradient; their part of the buffer is zero."""
        if self._at_once:
            grads: Gradients = [take(param) for param in self._params]
        else:
            (grads,) = self._stack.values()
        self._at_once = False
        rest = [i for i in range(len(self._params)) if i not in self._written]
        dense = [i for i in rest if grads[i] is not None]
        with torch.no_grad():
            if dense:  # torch refuses an empty list
                foreach_copy_([self._views[i] for i in dense], [grads[i] for i in dense])
            absent = [i for i in rest if grads[i] is None]
            for i in absent:
                self._views[i].zero_()
        return absent

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
