"""From backward to a row of memory that servers read: the gradient of one slice, or of a whole step's slices.

Large gradients are copied into the row as soon as they are there, while they are in a cache; small ones all at the end.
Several slices in one row are summed along the slice tree first. Some gradients of a single slice can be computed right
there (`straight`). Start reading at `RowFiller.begin`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from manyhands.parallel.gradients.network_sum import Gradients, add_lists, take
from manyhands.parallel.gradients.shared_memory_sum import AT_ONCE_BYTES
from manyhands.parallel.gradients.slice_tree import Stack
from manyhands.parameter_server.memory.copies import copy_large_
from manyhands.parameter_server.worker.direct_linear_gradients import Straight
from manyhands.torch_private import foreach_copy_

__all__ = ["RowFiller"]


class RowFiller:
    """Of the trained `params`. Per row: `begin`, then of each slice the forward, `in_forward`, and `backward`; at the
    end `finish`.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = list(params)
        self._straight, self._is_straight = Straight(self._params, AT_ONCE_BYTES), False
        self._views: Sequence[Tensor] = ()
        self._at_once = False
        self._put: set[int] = set()
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._when_there(i))  # type: ignore[no-untyped-call]
            for i, param in enumerate(self._params)
            if param.nbytes >= AT_ONCE_BYTES
        ]

    def begin(self, views: Sequence[Tensor], num_slices: int, *, straight: bool = False) -> None:
        """What follows goes into `views`, one for each parameter; `straight` there, where sums may be rounded apart."""
        self._views, self._put, self._at_once = views, set(), num_slices == 1
        self._is_straight = straight and self._at_once
        self._straight.begin(views, self._put)
        self._stack: Stack[Gradients] = Stack(num_slices, add=add_lists)
        for param in self._params:
            param.grad = None

    def _when_there(self, index: int) -> Callable[[Tensor], None]:
        def arrived(param: Tensor) -> None:
            if self._at_once and param.grad is not None and not param.grad.is_sparse:
                fresh = self._views[index]
                # A reentrant backward brings a gradient in instalments.
                fresh.add_(param.grad) if index in self._put else copy_large_(fresh, param.grad)
                self._put.add(index)
                param.grad = None

        return arrived

    def in_forward(self) -> AbstractContextManager[object]:
        return self._straight if self._is_straight else nullcontext()

    def backward(self, loss: Tensor, v: int) -> None:
        """Of slice `v`."""
        if self._is_straight and loss.grad_fn is not None:
            self._straight.backward(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        if not self._at_once:
            self._stack.push(v, [take(param) for param in self._params])

    def finish(self) -> list[int]:
        """Parameters that got no gradient; their place in the row is zero."""
        if self._at_once:
            grads: Gradients = [take(param) for param in self._params]
        else:
            (grads,) = self._stack.values()
        self._at_once = False
        rest = [i for i in range(len(self._params)) if i not in self._put]
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
