"""Runs one rank's operations of a pipeline schedule: forwards and backwards of its stages, slice by slice.

Messages between stages contain sizes, structure and the state of torch's generator: slices may differ in their number
of rows, and dropout draws what one process would draw. Activations are kept from a stage's forward to its backward, and
no longer. The engine does all else for a slice (`StageCallbacks`): buffers, randomness, precision, weights and sums.
Start reading at `StageRunner.train`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from manyhands.comm.axis import Axis
from manyhands.comm.point_to_point import Messages
from manyhands.errors import SpecError
from manyhands.parallel.pipeline.model_proxy import PLAIN, EvaluationProxy, call_up_to_model, call_with_model
from manyhands.parallel.pipeline.partition import BlockRange, Inputs
from manyhands.parallel.pipeline.schedule import Op, Schedule, make_schedule
from manyhands.parallel.pipeline.split_backward import InputGradientPass, Roots, StageInput, backward
from manyhands.parallel.pipeline.timeline import TimelineSpan, needs
from manyhands.parallel.tensor.autograd_collectives import Split, slices_in_order
from manyhands.parallel.tensor.sharded_tensor import ShardedTensor, parted
from manyhands.torch_private import pytree

__all__ = ["Slice", "StageCallbacks", "StageRunner"]


class Slice(Protocol):
    @property
    def index(self) -> int: ...
    @property
    def batch(self) -> Any: ...


class StageCallbacks(Protocol):
    """What the engine does for a slice."""

    def slice_context(self, piece: Any) -> AbstractContextManager[Any]:
        """Around the forward of each of this rank's stages: the step's buffers, the slice's randomness, precision."""

    def weigh(self, piece: Any, result: Any) -> Tensor:
        """The scalar from which backward starts, from the loss function's result. On the rank of the last stage."""

    def slice_done(self, piece: Any) -> None:
        """The `.grad` of the weights has the gradients of this slice only; take them away before the next slice's.

        Called for slices in ascending order.
        """


class Arrived(NamedTuple):
    """The message from a stage to the next one."""

    value: Any
    flows: list[bool]
    """Which of its tensors require gradients."""
    randomness: Tensor
    """State of torch's generator after the stage's forward."""
    dims: list[int]
    """For each tensor that is a shard of a sequence (tensor-parallel ranks send the others), its dim; -1: whole."""


class _Pass:
    """One stage's state for one slice, from its forward to the end of its backward."""

    def __init__(self, stage_inputs: list[StageInput]) -> None:
        self.stage_inputs = stage_inputs
        self.roots: list[GradientEdge] = []
        self.second_half: InputGradientPass | None = None


class StageRunner:
    """This rank's stages of a model, on the ranks of the pipeline.

    Promises: at `slice_done`, this rank's parameters have the gradients that one process would have for that slice; of
    a tied weight on two ranks, each has its part of the sum. Every rank of the pipeline makes the same calls.
    """

    def __init__(
        self,
        messages: Messages,
        model: nn.Module,
        parts: Sequence[BlockRange],
        loss: Callable[..., Any],
        hooks: StageCallbacks,
        *,
        schedule: str = "1f1b",
        chunks: int | None = None,
        recompute: bool = False,
        mates: Axis | None = None,
    ) -> None:
        """`parts` are those of all stages in their order; this rank does not call the parts of other ranks.

        `mates` are the ranks over which the stage's layers are sharded. With `recompute` a stage keeps only its inputs,
        and computes its activations again in backward.
        """
        self._messages, self._whole, self._parts, self._loss, self._hooks = messages, model, list(parts), loss, hooks
        self._name, self._chunks, self._recompute, self._mates = schedule, chunks, recompute, mates
        self._schedules: dict[int, Schedule] = {}
        self._params = list({id(p): p for stage in self.stages for p in self._parts[stage].params.values()}.values())
        self._pieces: list[Slice] = []
        self._began = 0.0
        self.spans: list[TimelineSpan] = []
        """The last step's operations on this rank, in seconds from its beginning; between them the rank waits.

        Sending the results and accumulating gradients are part of an operation.
        """
        self.most_alive = 0
        """The largest number of forwards whose activations were kept at once in the last step."""

    def schedule(self, microbatches: int) -> Schedule:
        if microbatches not in self._schedules:
            made = make_schedule(self._name, self._messages.size, microbatches, self._chunks)
            assert made.stages == len(self._parts), f"{made.stages} stages, but {len(self._parts)} parts"
            self._schedules[microbatches] = made
        return self._schedules[microbatches]

    @property
    def stages(self) -> list[int]:
        """This rank's stages."""
        return self.schedule(1).stages_of(self._messages.rank)

    @property
    def microbatches(self) -> int:
        """Their number in the last step."""
        return len(self._pieces)

    @property
    def began(self) -> float:
        """When the last step began, on this host's clock."""
        return self._began

    @property
    def bytes_sent(self) -> int:
        return self._messages.bytes_sent

    # ---- training ----------------------------------------------------------------------------------------------

    def train(self, pieces: Sequence[Slice], name: str) -> None:
        """Forward and backward of these slices, the same ones on every rank; `name` is the step's, for messages."""
        if not pieces:
            return
        self._step, self._pieces, self._plan = name, list(pieces), self.schedule(len(pieces))
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._local_messages: dict[int, Any] = {}
        self._stored_grads: dict[int, dict[nn.Parameter, Tensor]] = {}
        self._stages_left = [len(self.stages)] * len(pieces)
        self._buffer_addresses = {stage: {b.data_ptr() for b in self._buffers(stage)} for stage in self.stages}
        self.spans, self.most_alive, self._began = [], 0, perf_counter()
        row = self._plan.rows[self._messages.rank]
        with self._all_or_nothing():
            for op, following in zip(row, [*row[1:], None], strict=True):
                if following is not None:
                    self._expect(following)
                {"F": self._forward, "B": self._backward, "W": self._weights}[op.kind](op)

    def _forward(self, op: Op) -> None:
        piece, last = self._pieces[op.microbatch], op.stage == self._plan.stages - 1
        entered = _Entered(Arrived(*self._receive(op, op.stage - 1)) if op.stage else None, self._mates)
        one = self._passes[op.stage, op.microbatch] = _Pass(entered.stage_inputs)
        self.most_alive = max(self.most_alive, len(self._passes))
        call = call_with_model if last else call_up_to_model
        with self._timed(op):
            with self._hooks.slice_context(piece):
                result = call(self._loss, self._whole, piece.batch, lambda inputs: self._run(op.stage, inputs, entered))
                leaving = None if last else _leaving(result)
            outputs = [self._hooks.weigh(piece, result)] if last else _flowing(result)
            one.roots = [get_gradient_edge(tensor) for tensor in outputs]
            if leaving is not None:
                self._send(op, op.stage + 1, leaving)

    def _run(self, stage: int, inputs: Inputs, entered: _Entered) -> Any:
        """Run the stage's part when the loss calls the model."""
        if entered.randomness is not None:
            torch.default_generator.set_state(entered.randomness)
        part = self._parts[stage]
        with _copying_saved_buffers(self._buffer_addresses.get(stage, ())):
            if not self._recompute or not torch.is_grad_enabled():
                return part(inputs, entered.value)
            return checkpoint(part, inputs, entered.value, use_reentrant=False)

    def _backward(self, op: Op) -> None:
        one = self._passes[op.stage, op.microbatch]
        last = op.stage == self._plan.stages - 1
        grads = [None] if last else self._receive(op, op.stage + 1)
        roots = [(edge, grad) for edge, grad in zip(one.roots, grads, strict=True) if last or grad is not None]
        one.roots = []
        with self._timed(op):
            self._run_backward(op, one, roots)
            if op.stage:
                self._send(op, op.stage - 1, [stage_input.grad for stage_input in one.stage_inputs])
            one.stage_inputs = []
            if not self._plan.splits_backward:
                self._finish(op)
            elif self._recompute:
                self._store_grads(op.microbatch)

    def _run_backward(self, op: Op, one: _Pass, roots: Roots) -> None:
        """Backward of a stage; only the gradients of inputs, if the schedule computes those of weights separately."""
        with self._unchanged_buffers(op.stage):
            if self._plan.splits_backward and not self._recompute:
                one.second_half = InputGradientPass(roots, one.stage_inputs)
            else:
                backward(roots)

    def _weights(self, op: Op) -> None:
        second = self._passes[op.stage, op.microbatch].second_half
        with self._timed(op) if second is not None else nullcontext():
            if second is not None:
                second.finish()
            self._finish(op)

    def _finish(self, op: Op) -> None:
        """A stage has all of a slice's gradients; once all stages of this rank have theirs, the slice is done."""
        del self._passes[op.stage, op.microbatch]
        self._stages_left[op.microbatch] -= 1
        if self._stages_left[op.microbatch]:
            self._store_grads(op.microbatch)
            return
        for param, grad in self._stored_grads.pop(op.microbatch, {}).items():
            param.grad = grad if param.grad is None else grad.add_(param.grad)
        self._hooks.slice_done(self._pieces[op.microbatch])

    def _store_grads(self, microbatch: int) -> None:
        stored = self._stored_grads.setdefault(microbatch, {})
        for param in self._params:
            if param.grad is not None:
                stored[param] = param.grad if param not in stored else stored[param].add_(param.grad)
                param.grad = None

    @contextmanager
    def _timed(self, op: Op) -> Iterator[None]:
        start = perf_counter() - self._began
        yield
        self.spans.append(TimelineSpan(op, start, perf_counter() - self._began))

    @contextmanager
    def _unchanged_buffers(self, stage: int) -> Iterator[None]:
        """A recomputed forward must not count twice in running averages."""
        before = [(buffer, buffer.clone()) for buffer in (self._buffers(stage) if self._recompute else ())]
        yield
        for buffer, value in before:
            buffer.copy_(value)

    def _buffers(self, stage: int) -> list[Tensor]:
        return [buffer for module in self._parts[stage].modules.values() for buffer in module.buffers()]

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Inside, messages are sent; at the end all are delivered. After an error, pending messages are dropped."""
        try:
            yield
            self._messages.flush()
        except BaseException:
            self._messages.forget()
            raise

    # ---- between stages ----------------------------------------------------------------------------------------

    def _expect(self, op: Op) -> None:
        """Start to receive what this operation will need from other ranks."""
        for needed in needs(op, self._plan):
            source = self._plan.ranks_of_stages[needed.stage]
            if source != self._messages.rank:
                tag = self._tag(op.kind, needed.stage, op.microbatch)
                self._messages.expect(source, tag, f"{op} of {self._step}, from stage {needed.stage}")

    def _receive(self, op: Op, stage: int) -> Any:
        """What that stage sent to this one; taken from this rank's memory if it has both stages."""
        tag = self._tag(op.kind, stage, op.microbatch)
        source = self._plan.ranks_of_stages[stage]
        if source == self._messages.rank:
            return self._local_messages.pop(tag)
        return self._messages.receive(source, tag, f"{op} of {self._step}, from stage {stage}")

    def _send(self, op: Op, stage: int, value: Any) -> None:
        tag = self._tag(op.kind, op.stage, op.microbatch)
        to = self._plan.ranks_of_stages[stage]
        if to == self._messages.rank:
            self._local_messages[tag] = value
        else:
            self._messages.send(value, to, tag, f"{op} of {self._step}, to stage {stage}")

    def _tag(self, kind: str, stage: int, microbatch: int) -> int:
        """The tag of what a stage sends forward, or back; 0 is for evaluation."""
        return 1 + (microbatch * self._plan.stages + stage) * 2 + (kind == "B")

    # ---- evaluation --------------------------------------------------------------------------------------------

    @property
    def model(self) -> EvaluationProxy:
        """The whole model in evaluation: every rank of the pipeline calls it in the same way and gets its output."""
        return EvaluationProxy(self._whole, self.forward_only)

    def forward_only(self, inputs: Inputs) -> Any:
        """The model's output, on every rank of the pipeline. Without gradients."""
        plan = self.schedule(1)
        self._plan, self._step, self._local_messages, self._buffer_addresses = plan, "evaluation", {}, {}
        output: Any = None
        with torch.no_grad(), self._all_or_nothing():
            for stage in self.stages:
                op = Op("F", stage, 0)
                entered = _Entered(Arrived(*self._receive(op, stage - 1)) if stage else None, self._mates)
                output = self._run(stage, inputs, entered)
                if stage < plan.stages - 1:
                    self._send(op, stage + 1, _leaving(output))
            output = self._share(inputs, output)
        return output

    def _share(self, inputs: Inputs, output: Any) -> Any:
        """The last stage's rank sends the output to all others."""
        owner, last = self._plan.ranks_of_stages[-1], self._parts[-1]
        if self._messages.rank != owner:
            sent, state = self._messages.receive(owner, 0, "output in evaluation")
            torch.default_generator.set_state(state)
            return last.from_sent(inputs, sent)
        message = [last.to_send(output), torch.default_generator.get_state()]
        for rank in range(self._messages.size):
            if rank != owner:
                self._messages.send(message, rank, 0, "output in evaluation")
        return output


class _Entered:
    """What the stage before sent, ready as input of this stage's part."""

    def __init__(self, arrived: Arrived | None, mates: Axis | None) -> None:
        self.stage_inputs: list[StageInput] = []
        self.value: Any = None
        self.randomness = arrived.randomness if arrived else None
        if arrived is not None:
            facts = zip(arrived.flows, arrived.dims, strict=True)
            self.value = pytree.tree_map_only(Tensor, lambda one: self._enter(one, *next(facts), mates), arrived.value)

    def _enter(self, tensor: Tensor, flows: bool, dim: int, mates: Axis | None) -> Tensor:
        if flows and torch.is_grad_enabled():
            self.stage_inputs.append(StageInput(tensor))
            tensor = self.stage_inputs[-1].tensor
        if dim < 0:
            return tensor
        assert mates is not None
        ranges = slices_in_order(tensor.size(dim) * mates.size, mates.size)
        return parted(tensor, Split(mates, dim, ranges, "input from the stage before", sequence=True))


@contextmanager
def _copying_saved_buffers(addresses: Collection[int]) -> Iterator[None]:
    """Backward gets the buffers at these addresses as forward left them, even if other slices have changed them since.

    BatchNorm saves its running averages for backward, and torch refuses saved tensors that were written to.
    """

    def keep(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.data_ptr() in addresses else tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor) if addresses else nullcontext():
        yield


def _flowing(value: Any) -> list[Tensor]:
    """The tensors that require gradients, as they are sent."""
    return [_sent(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _leaving(value: Any) -> Arrived:
    leaves = pytree.tree_leaves(value)
    for leaf in leaves:
        if not isinstance(leaf, Tensor | PLAIN):  # gradients could not flow back through it, even on one rank
            raise SpecError(
                f"A stage hands on a {type(leaf).__name__}, which cannot be sent to the next stage.",
                fix=["tensors, numbers and None, in tuples, lists and dicts", "a cut elsewhere: cuts="],
            )
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    flows = [tensor.requires_grad for tensor in tensors]
    dims = [tensor.division.dim if _is_by_sequence(tensor) else -1 for tensor in tensors]
    plain = pytree.tree_map_only(Tensor, lambda tensor: _sent(tensor).detach(), value)
    return Arrived(plain, flows, torch.default_generator.get_state(), dims)


def _sent(tensor: Tensor) -> Tensor:
    """For a sequence shard, only this rank's part, which the same tensor-parallel rank of the next stage receives."""
    return tensor.part if _is_by_sequence(tensor) else tensor


def _is_by_sequence(tensor: Tensor) -> TypeGuard[ShardedTensor]:
    return isinstance(tensor, ShardedTensor) and tensor.division.sequence
