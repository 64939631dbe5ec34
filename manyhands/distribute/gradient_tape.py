"""`GradientTape` over torch.autograd, `function`, and the losses of a global batch.

Torch records operations whether there is a tape or not, so a tape is where gradients are asked for. Start reading at
`GradientTape`.
"""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from manyhands.distribute.replicas import get_replica_context, get_strategy
from manyhands.distribute.train.notices import refuse_unknown, say_once
from manyhands.errors import NotHere, SpecError, UsageError
from manyhands.spec.keyword_check import checked_class, checked_keywords
from manyhands.torch_private import pytree

__all__ = ["GradientTape", "UnconnectedGradients", "compute_average_loss", "function", "scale_regularization_loss"]


class UnconnectedGradients(enum.Enum):
    """What `gradient` gives for a source that the target does not use: None, or zeros of its shape."""

    NONE = "none"
    ZERO = "zero"


class _Recording(threading.local):
    """The tapes that record in this thread, the outermost first."""

    def __init__(self) -> None:
        self.tapes: list[GradientTape] = []


_recording = _Recording()


@checked_class()
class GradientTape:
    """`gradient(loss, variables)`: the gradients of this replica, by `torch.autograd.grad`.

    Where another tape records, gradients are recorded, too, for that tape to differentiate, as for a gradient
    penalty.

    Args:
        persistent: Keep what backward needs, so that `gradient` may be called again.
        watch_accessed_variables: Only True: torch records all trainable weights.
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        refuse_unknown(
            "GradientTape",
            {} if watch_accessed_variables else {"watch_accessed_variables": False},
            ["persistent", "watch_accessed_variables"],
        )
        self._persistent, self._used = persistent, False
        self._overlaps = False
        """Whether another tape has recorded the same operations: it needs them after this one."""
        self._grad_mode = torch.enable_grad()

    def __enter__(self) -> Self:
        if self in _recording.tapes:
            raise UsageError("This tape records already.", where="GradientTape", fix=["another GradientTape()"])
        self._grad_mode.__enter__()
        for other in _recording.tapes:
            other._overlaps = self._overlaps = True
        _recording.tapes.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in _recording.tapes:  # unless `gradient` has ended it
            _recording.tapes.remove(self)
        self._grad_mode.__exit__(kind, error, trace)

    def watch(self, tensor: Any) -> None:
        """Record a tensor that is no weight; before it is used.

        Args:
            tensor: A tensor of floating point numbers, or a structure of them.
        """
        for one in map(_tensor, pytree.tree_leaves(tensor)):
            if not (one.is_floating_point() or one.is_complex()):
                raise SpecError(
                    f"A tensor of {one.dtype} has no gradient.", where="GradientTape.watch", fix=["tensor.float()"]
                )
            one.requires_grad_(True)

    @contextmanager
    def stop_recording(self) -> Iterator[None]:
        """Inside, operations are not recorded: what they compute is a constant. Gradients may be asked for there."""
        if self not in _recording.tapes:
            raise UsageError(
                "stop_recording was called outside of the tape.",
                where="GradientTape",
                fix=["with tape: with tape.stop_recording():"],
            )
        if len(_recording.tapes) > 1:
            raise NotHere(
                "stop_recording would stop the other tape, too: torch has one record of operations for all tapes.",
                where="GradientTape.stop_recording",
                fix=["tensor.detach(), for what this tape must not see", "one tape at a time"],
            )
        _recording.tapes.remove(self)
        try:
            with torch.no_grad():
                yield
        finally:
            _recording.tapes.append(self)

    def reset(self) -> None:
        """Refused: torch's record belongs to the tensors, not to the tape."""
        raise NotHere(
            "reset would forget operations that torch keeps with their results.",
            where="GradientTape.reset",
            fix=["another GradientTape()", "tensor.detach(), for what was computed before"],
        )

    def watched_variables(self) -> Any:
        """Refused: torch records all trainable weights, and keeps no list of them."""
        raise NotHere(
            "Torch records every trainable weight, and keeps no list of those that were used.",
            where="GradientTape.watched_variables",
            fix=["model.trainable_variables"],
        )

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
    ) -> Any:
        """The gradient of the sum of `target` for each of `sources`, in their structure; None for what it does not use.

        Args:
            target: A tensor, such as the loss, or a structure of them.
            sources: Tensors, weights or Keras variables: one, or a structure of them.
            output_gradients: What each of `target` is multiplied by before it is summed, in its structure. Default:
                ones.
            unconnected_gradients: "none", or "zero" for zeros in place of None.
        """
        unconnected = _as_unconnected(unconnected_gradients)
        targets = [_tensor(one) for one in pytree.tree_leaves(target)]
        weights = _output_gradients(targets, output_gradients)
        create_graph = self._use()
        leaves, structure = pytree.tree_flatten(sources)
        found = _gradients(
            targets, [_tensor(one) for one in leaves], weights, create_graph, self._persistent or self._overlaps
        )
        return pytree.tree_unflatten(_connected(found, leaves, unconnected), structure)

    def jacobian(
        self,
        target: Any,
        sources: Any,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """The gradient of each element of `target` for each of `sources`: of the shape of the one, then of the other.

        Args:
            target: A tensor.
            sources: Tensors, weights or Keras variables: one, or a structure of them.
            unconnected_gradients: "none", or "zero" for zeros in place of None.
            parallel_iterations: Accepted as in TensorFlow: one element is differentiated after the other.
            experimental_use_pfor: The same.
        """
        unconnected, rows = _as_unconnected(unconnected_gradients), _tensor(target)
        create_graph = self._use()
        leaves, structure = pytree.tree_flatten(sources)
        tensors = [_tensor(one) for one in leaves]
        found = _stacked(rows.reshape(-1), tensors, create_graph)
        shaped = [
            None if one is None else one.reshape(rows.shape + tensor.shape)
            for one, tensor in zip(found, tensors, strict=True)
        ]
        if unconnected is UnconnectedGradients.ZERO:
            shaped = [
                tensor.new_zeros(rows.shape + tensor.shape) if one is None else one
                for one, tensor in zip(shaped, tensors, strict=True)
            ]
        return pytree.tree_unflatten(shaped, structure)

    def batch_jacobian(
        self,
        target: Any,
        source: Any,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Tensor | None:
        """The jacobian of each row of `target` for the same row of `source`, where rows do not use one another.

        Args:
            target: A tensor whose first dimension is the batch.
            source: Another one, with as many rows.
            unconnected_gradients: "none", or "zero" for zeros in place of None.
            parallel_iterations: Accepted as in TensorFlow: one element is differentiated after the other.
            experimental_use_pfor: The same.
        """
        unconnected, rows, given = _as_unconnected(unconnected_gradients), _tensor(target), _tensor(source)
        if not rows.ndim or not given.ndim or len(rows) != len(given):
            raise SpecError(
                f"The target's shape is {tuple(rows.shape)}, and the source's {tuple(given.shape)}.",
                where="GradientTape.batch_jacobian",
                fix=["the same first dimension", "jacobian(target, source)"],
            )
        shape = (len(rows), *rows.shape[1:], *given.shape[1:])
        # The rows' sum has each row's gradient in that row.
        [found] = _stacked(rows.reshape(len(rows), -1).sum(0), [given], self._use())
        if found is None:
            return given.new_zeros(shape) if unconnected is UnconnectedGradients.ZERO else None
        return found.transpose(0, 1).reshape(shape)

    def _use(self) -> bool:
        """Whether these gradients are to be recorded; `UsageError` where this tape's record was used already."""
        if self._used and not self._persistent:
            raise UsageError(
                "gradient was called twice on one tape.", where="GradientTape", fix=["GradientTape(persistent=True)"]
            )
        self._used = True
        if not self._persistent and self in _recording.tapes:
            _recording.tapes.remove(self)  # as in TensorFlow: asking inside of the tape ends it
        return bool(_recording.tapes)


def _gradients(
    targets: Sequence[Tensor], sources: Sequence[Tensor], weights: Sequence[Tensor], create_graph: bool, retain: bool
) -> list[Tensor | None]:
    pairs = [(one, weight) for one, weight in zip(targets, weights, strict=True) if one.requires_grad]
    used = [one for one in sources if one.requires_grad]
    if not pairs or not used:
        return [None] * len(sources)
    found = iter(
        torch.autograd.grad(
            [one for one, _ in pairs],
            used,
            grad_outputs=[weight for _, weight in pairs],
            retain_graph=retain or create_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
    )
    return [next(found) if one.requires_grad else None for one in sources]


def _stacked(elements: Tensor, sources: Sequence[Tensor], create_graph: bool) -> list[Tensor | None]:
    """The gradients of each element, one below the other; None for a source that none of them uses."""
    rows = [_gradients([one], sources, [torch.ones_like(one)], create_graph, retain=True) for one in elements]
    return [_column([row[index] for row in rows], source) for index, source in enumerate(sources)]


def _column(found: Sequence[Tensor | None], source: Tensor) -> Tensor | None:
    if all(one is None for one in found):
        return None
    return torch.stack([torch.zeros_like(source) if one is None else one for one in found])


def _output_gradients(targets: Sequence[Tensor], given: Any) -> list[Tensor]:
    """What each target is multiplied by: ones where nothing is given."""
    if given is None:
        return [torch.ones_like(one) for one in targets]
    leaves = pytree.tree_leaves(given, is_leaf=lambda one: one is None)
    if len(leaves) != len(targets):
        raise SpecError(
            f"There are {len(targets)} targets, and {len(leaves)} output_gradients.",
            where="GradientTape.gradient",
            fix=["output_gradients in the structure of target"],
        )
    weights = []
    for one, target in zip(leaves, targets, strict=True):
        weight = torch.ones_like(target) if one is None else torch.as_tensor(one).to(target)
        if weight.shape != target.shape:
            raise SpecError(
                f"A target has the shape {tuple(target.shape)}, and its output gradient {tuple(weight.shape)}.",
                where="GradientTape.gradient",
                fix=["output_gradients with the shapes of target"],
            )
        weights.append(weight)
    return weights


def _as_unconnected(given: UnconnectedGradients | str) -> UnconnectedGradients:
    try:
        return given if isinstance(given, UnconnectedGradients) else UnconnectedGradients(given)
    except ValueError:
        raise SpecError(
            f"unconnected_gradients is {given!r}.", where="GradientTape", fix=['"none"', '"zero"']
        ) from None


def _connected(
    found: Sequence[Tensor | None], sources: Sequence[Any], unconnected: UnconnectedGradients
) -> list[Tensor | None]:
    if unconnected is UnconnectedGradients.NONE:
        return list(found)
    return [torch.zeros_like(_tensor(s)) if one is None else one for one, s in zip(found, sources, strict=True)]


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
        [*harmless, "func"],
    )
    if func is None:
        return functools.partial(function, **options)
    say_once("function builds no graph: what it decorates runs eagerly, line by line.")
    return func


@checked_keywords
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


@checked_keywords
def scale_regularization_loss(regularization_loss: Tensor) -> Tensor:
    """A loss of the weights, which every replica has, over the number of replicas.

    Args:
        regularization_loss: The loss.
    """
    return torch.as_tensor(regularization_loss) / _num_replicas()


def _num_replicas() -> int:
    context = get_replica_context()
    return int(context.num_replicas_in_sync if context is not None else get_strategy().num_replicas_in_sync)
