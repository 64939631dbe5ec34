"""`GradientTape` over torch.autograd, `function`, and the losses of a global batch.

Torch records operations whether there is a tape or not, so a tape is where gradients are asked for. Start reading at
`GradientTape`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from manyhands.distribute.replicas import get_replica_context, get_strategy
from manyhands.distribute.train.notices import refuse_unknown, say_once
from manyhands.errors import SpecError, UsageError
from manyhands.torch_private import pytree

__all__ = ["GradientTape", "compute_average_loss", "function", "scale_regularization_loss"]


class GradientTape:
    """`gradient(loss, variables)`: the gradients of this replica, by `torch.autograd.grad`.

    Args:
        persistent: Keep what backward needs, so that `gradient` may be called again.
        watch_accessed_variables: Only True: torch records all trainable weights.
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        refuse_unknown(
            "GradientTape", {} if watch_accessed_variables else {"watch_accessed_variables": False}, ["persistent"]
        )
        self._persistent, self._used = persistent, False
        self._recording = torch.enable_grad()

    def __enter__(self) -> Self:
        self._recording.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recording.__exit__(kind, error, trace)

    def watch(self, tensor: Any) -> None:
        """Record a tensor that is no weight; before it is used.

        Args:
            tensor: A tensor, or a structure of them.
        """
        for one in pytree.tree_leaves(tensor):
            _tensor(one).requires_grad_(True)

    def gradient(self, target: Any, sources: Any) -> Any:
        """The gradient of the sum of `target` for each of `sources`, in their structure; None for what it does not use.

        Args:
            target: A tensor, such as the loss, or a structure of them.
            sources: Tensors, weights or Keras variables: one, or a structure of them.
        """
        if self._used and not self._persistent:
            raise UsageError(
                "gradient was called twice on one tape.", where="GradientTape", fix=["GradientTape(persistent=True)"]
            )
        self._used = True
        total = sum(_tensor(one).sum() for one in pytree.tree_leaves(target))
        leaves, structure = pytree.tree_flatten(sources)
        tensors = [_tensor(one) for one in leaves]
        if not isinstance(total, Tensor) or not total.requires_grad:
            return pytree.tree_unflatten([None] * len(leaves), structure)
        trained = [one for one in tensors if one.requires_grad]
        found = iter(torch.autograd.grad(total, trained, retain_graph=self._persistent, allow_unused=True))
        return pytree.tree_unflatten([next(found) if one.requires_grad else None for one in tensors], structure)


def _tensor(value: Any) -> Tensor:
    """A tensor, or the tensor of a Keras variable."""
    inner = value if isinstance(value, Tensor) else getattr(value, "value", value)
    if not isinstance(inner, Tensor):
        raise SpecError(
            f"{value!r} is no tensor and no variable.", where="GradientTape", fix=["model.trainable_variables"]
        )
    return inner


def function(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`tf.function`: the function as it is, run eagerly, which is said once.

    Args:
        func: The function.
        options: `input_signature`, `autograph` and `reduce_retracing` are about graphs, which are not built. Others are
            refused by name, `jit_compile` among them.
    """
    harmless = ("input_signature", "autograph", "reduce_retracing", "experimental_relax_shapes")
    refuse_unknown(
        "function",
        {name: value for name, value in options.items() if name not in harmless and value not in (None, False)},
        ["torch.compile(function), for jit_compile"],
    )
    if func is None:
        return functools.partial(function, **options)
    say_once("function builds no graph: what it decorates runs eagerly, line by line.")
    return func


def compute_average_loss(
    per_example_loss: Tensor, sample_weight: Tensor | None = None, global_batch_size: int | None = None
) -> Tensor:
    """The sum of the examples' losses over the global batch size: gradients of replicas add up to those of the mean.

    Args:
        per_example_loss: A loss per example of this replica.
        sample_weight: Their weights.
        global_batch_size: Rows over all replicas. Default: those of this replica, times the replicas.
    """
    losses = per_example_loss if sample_weight is None else per_example_loss * sample_weight
    size = global_batch_size or len(losses) * _num_replicas()
    return losses.sum() / size


def scale_regularization_loss(regularization_loss: Tensor) -> Tensor:
    """A loss of the weights, which every replica has, over the number of replicas.

    Args:
        regularization_loss: The loss.
    """
    return torch.as_tensor(regularization_loss) / _num_replicas()


def _num_replicas() -> int:
    context = get_replica_context()
    return int(context.num_replicas_in_sync if context is not None else get_strategy().num_replicas_in_sync)
