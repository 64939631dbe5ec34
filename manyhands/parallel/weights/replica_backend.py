"""Where a group of ranks sums its gradients and holds its weights: in shared memory, over the network, or alone.

Ranks that share memory divide the update and keep one copy of the weights, where the optimizer allows it; others sum
over the network and have a copy each. Which of these it is, all ranks decide alike, and anew when they come and go.
Start reading at `Holding.divide`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.checkpoint.tensor_names import plain_name
from manyhands.comm.axis import Axis
from manyhands.comm.codecs import Codec
from manyhands.comm.host_memory import Segment
from manyhands.errors import EnvironmentProblem
from manyhands.parallel.gradients.compressed_sum import CodedGradientSum, CodedResiduals
from manyhands.parallel.gradients.custom_reduction import OwnReduction, Reduction
from manyhands.parallel.gradients.network_sum import GradientSum
from manyhands.parallel.gradients.reduce_scatter_sum import ShardedSum
from manyhands.parallel.gradients.shared_memory_sum import SharedGradients, summable
from manyhands.parallel.weights.fused_shared_weights import SharedWeights, shareable
from manyhands.parallel.weights.local_update import LocalUpdate, Update, runs_fused
from manyhands.parallel.weights.owner_updates import OwnedWeights, ownable
from manyhands.parallel.weights.shared_memory_group import Sharing
from manyhands.parallel.weights.shared_memory_weights import CommonWeights

__all__ = ["HeldByServers", "Holding", "Mapped"]


class Mapped(msgspec.Struct, frozen=True):
    """Which part of the shared memory a group's gradients and weights lie in."""

    layout: str
    current: int
    """The copy of the weights that is in use."""


class Holding:
    """Of one model and its optimizer. Nothing is decided until `divide` or, beside ranks that train, `attach`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        axis: Axis,
        sharing: Sharing | None,
        network: Callable[[], Axis],
        codec: Codec | None,
        *,
        bucket_bytes: int,
        check_every: int,
        tell: Callable[[str], None],
        reduction: Reduction | None = None,
    ) -> None:
        """`sharing` is given where ranks share memory; `network` is an axis that does without.

        With `reduction`, it puts slices' gradients together in place of their sum.
        """
        self._model, self._optimizer, self._codec, self._network = model, optimizer, codec, network
        self._bucket_bytes, self._check_every, self._tell = bucket_bytes, check_every, tell
        self._layout, self._reduction = "", reduction
        self._owed: CodedResiduals | None = None
        """By sums that were put down."""
        self._set_group(axis, sharing)
        self.sum: GradientSum | SharedGradients | ShardedSum | None = None
        self.weights: Update | None = None

    def _set_group(self, axis: Axis, sharing: Sharing | None) -> None:
        # What a codec is for is a network; who asks for one on a single host wants to see what it does.
        usable = sharing is not None and (self._codec is None or sharing.across is not None)
        self._axis, self.sharing = axis, sharing if usable else None

    @property
    def gradients(self) -> GradientSum | SharedGradients | ShardedSum:
        assert self.sum is not None, "divide or attach comes first"
        return self.sum

    @property
    def update(self) -> Update:
        assert self.weights is not None, "divide or attach comes first"
        return self.weights

    @property
    def common(self) -> CommonWeights | None:
        """The weights, where ranks have them in common."""
        return self.weights if isinstance(self.weights, CommonWeights) else None

    @property
    def coded(self) -> CodedResiduals | None:
        """What sums through a codec owe."""
        if isinstance(self.sum, SharedGradients):
            return self.sum.coded
        return self.sum if isinstance(self.sum, CodedGradientSum) else None

    @property
    def shared(self) -> SharedGradients | None:
        return self.sum if isinstance(self.sum, SharedGradients) else None

    @property
    def ranks_per_copy(self) -> int:
        """How many ranks look at each host's weights, where there are several hosts that share them."""
        return self.sharing.plane.world if self.sharing is not None and self.sharing.across is not None else 0

    def trained(self) -> list[nn.Parameter]:
        return [param for param in self._model.parameters() if param.requires_grad]

    def trained_names(self) -> list[str]:
        name_of = {id(param): plain_name(name) for name, param in self._model.named_parameters()}
        return [name_of[id(param)] for param in self.gradients.params]

    def divide(self) -> None:
        """Decide how gradients are summed and weights updated; kept as it is while the same parameters are trained."""
        trained = self.trained()
        if self.ranks_per_copy:  # each host shares what its first rank has
            self._axis.broadcast_(trained, "weights of rank 0")
        if self.common is not None and self.common.is_current and _same(trained, self.gradients.params):
            return
        if self.weights is not None:
            self.weights.close()
        before, self._owed = self.coded or self._owed, None
        if self.sum is not None:
            self.sum.close()
        if not (self.sharing is not None and summable(trained) and self._share(self.sharing, trained)):
            self._part(trained)
        if before is not None and self.coded is not None:
            self.coded.succeed(before)

    def accept_weights(self) -> None:
        """The weights were changed on purpose, on every rank alike."""
        if self.common is not None:
            self.common.accept()

    def _part(self, trained: Sequence[nn.Parameter]) -> None:
        """Every rank has weights of its own."""
        self.sum = self._new_sum(trained)
        self.weights = LocalUpdate(self.sum, self._optimizer)

    def _new_sum(self, trained: Sequence[nn.Parameter]) -> GradientSum:
        if self._reduction is not None:
            return OwnReduction(trained, self._network(), self._reduction)
        if self._codec is None:
            return GradientSum(trained, self._network(), self._bucket_bytes)
        return CodedGradientSum(trained, self._network(), self._bucket_bytes, self._codec)

    def _share(self, sharing: Sharing, trained: list[nn.Parameter]) -> bool:
        """Whether gradients, and weights if the optimizer allows it, lie in shared memory now; all ranks agree."""
        if sharing.across is not None and shareable(trained, self._optimizer):
            return False  # between hosts only sums on their way into weights are divided
        problem = ""
        try:
            self._make_shared(sharing, trained)
        except EnvironmentProblem as no_room:  # the same on every rank of this host
            problem = no_room.what
        if sharing.across is not None:
            told = self._axis.all_gather_bytes("room for shared memory", problem.encode())
            if problem == "" and any(told):
                self.update.close()
                self.gradients.close()
            problem = next((text.decode() for text in told if text), "")
        if problem:
            self._tell(f"gradients travel over the network layer instead of shared memory: {problem}")
        return not problem

    def _make_shared(self, sharing: Sharing, trained: list[nn.Parameter], mapped: Mapped | None = None) -> None:
        """New memory for all ranks, or with `mapped` that which the others have."""
        plane, layout = sharing.plane, mapped.layout if mapped else sharing.new_layout()
        memory = sharing.memory_of(layout)
        gradients = SharedGradients(
            trained, plane, memory, sharing.across, self._bucket_bytes, codec=self._codec, slots=sharing.slots
        )
        self._layout = layout
        try:
            if not shareable(trained, self._optimizer):
                copies, current = 2 if sharing.is_elastic else 1, mapped.current if mapped else None
                self.weights = SharedWeights(gradients, self._optimizer, plane, memory, copies=copies, current=current)
            elif not runs_fused(self._optimizer) and ownable(self._optimizer) and not sharing.is_elastic:
                self.weights = OwnedWeights(gradients, self._optimizer, plane, memory)
            else:
                self.weights = LocalUpdate(gradients, self._optimizer)
        except EnvironmentProblem:
            gradients.close()
            raise
        self.sum = gradients
        if self.common is not None:
            self.common.watch(self._check_every, self.trained_names())

    # Ranks that come and go, between steps or in the middle of one.

    @property
    def mapped(self) -> Mapped | None:
        """Where this rank's weights and gradients lie, for ranks that come later; None where not in shared memory."""
        if self.shared is None:
            return None
        return Mapped(self._layout, self.weights.current if isinstance(self.weights, SharedWeights) else 0)

    def attach(self, mapped: Mapped | None) -> None:
        """Join ranks that are training. Their state comes later; their weights, where shared, are this rank's now."""
        if self.sum is not None:  # one that fell behind by a step
            if mapped is not None and isinstance(self.weights, SharedWeights):
                self.weights.look_at_copy(mapped.current)
        elif mapped is not None and self.sharing is not None:
            self._make_shared(self.sharing, self.trained(), mapped)
        else:
            self._part(self.trained())
        self.accept_weights()

    def where(self, tensor: Tensor) -> tuple[str, int] | None:
        """Where in shared memory, if it lies there, so that it need not be sent to a rank that attaches."""
        return self.weights.where(tensor) if isinstance(self.weights, SharedWeights) else None

    def shared_tensor(self, where: tuple[str, int], shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        assert isinstance(self.weights, SharedWeights)
        return self.weights.tensor_at(where, shape, stride).clone()

    def regroup(self, axis: Axis, sharing: Sharing | None) -> None:
        """Go on with other ranks. Rows of a step under way stay, where they lie in shared memory."""
        self._set_group(axis, sharing)
        if self.sum is None:
            return
        if isinstance(self.sum, SharedGradients) and sharing is not None and sharing.slots is not None:
            self.sum.move(sharing.plane, sharing.slots)
            if self.common is not None:
                self.common.move(sharing.plane)
            return
        self.sum.leave()
        if isinstance(self.weights, LocalUpdate):
            self.sum = self._new_sum(self.sum.params)
            self.weights.move(self.sum)
        else:  # the group has members on another host now
            assert isinstance(self.weights, SharedWeights)
            self.weights.release()
            self._part(self.sum.params)

    def put_down(self) -> Callable[[], None]:
        """Have weights and states of this rank's own, and leave the parameters alone, until `divide`.

        Nobody waits for anybody here. What is returned gives the memory back, once every rank has come so far.
        """
        weights, gradients, self._owed = self.weights, self.sum, self.coded or self._owed
        self.weights = self.sum = None
        segments = [*_segments(weights), *_segments(gradients)] if self._frees else []
        if isinstance(weights, CommonWeights):
            weights.release()
        elif weights is not None:
            weights.close()
        if gradients is not None:
            gradients.leave()

        def give_back() -> None:
            for segment in segments:
                segment.free()

        return give_back

    @property
    def _frees(self) -> bool:
        """Of the ranks of a host, the first gives back what they share."""
        return self.sharing is not None and self.sharing.plane.rank == 0

    def abandon(self) -> None:
        """Leave the model alone: there will be another."""
        if self.sum is not None:
            self.sum.leave()


def _segments(shared: object) -> Sequence[Segment]:
    return shared.segments if isinstance(shared, CommonWeights | SharedGradients) else ()


def _same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


class HeldByServers:
    """What `Regrouping` asks of where an engine holds its weights: newcomers find them when a course is opened."""

    common = None
    mapped = Mapped("served", 0)

    def attach(self, mapped: Mapped | None) -> None:
        pass

    def where(self, tensor: Tensor) -> tuple[str, int] | None:
        return None

    def shared_tensor(self, where: tuple[str, int], shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        raise AssertionError("nothing is told to lie in shared memory")
