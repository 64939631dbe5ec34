"""Chooses how a group of ranks reduces gradients and stores weights: shared memory, network, or a single process.

Ranks that share memory divide the update and keep one copy of the weights if the optimizer allows it; other ranks sum
over the network and have a copy each. All ranks make the same choice, and make it again when the group changes. Start
reading at `ReplicaBackend.divide`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.checkpoint.tensor_names import plain_name
from manyhands.comm.axis import Axis
from manyhands.comm.codecs import Codec
from manyhands.comm.host_memory import Segment
from manyhands.errors import EnvironmentProblem
from manyhands.parallel.gradients.custom_reduction import CustomReduction, Reduction
from manyhands.parallel.gradients.interface import Residuals, Sum
from manyhands.parallel.gradients.network_sum import GradientSum
from manyhands.parallel.gradients.shared_memory_sum import SharedMemorySum, summable
from manyhands.parallel.model.tensor_shard import TensorShard
from manyhands.parallel.weights.fused_shared_weights import FusedSharedWeights, shareable
from manyhands.parallel.weights.local_update import LocalUpdate, Update, runs_fused
from manyhands.parallel.weights.owner_updates import OwnerUpdates, ownable
from manyhands.parallel.weights.shared_memory_group import SharedMemoryGroup
from manyhands.parallel.weights.shared_memory_weights import SharedMemoryWeights

__all__ = ["Mapped", "ReplicaBackend", "ServerBackend"]


class Mapped(msgspec.Struct, frozen=True):
    """Where in shared memory a group's gradients and weights are."""

    layout: str
    current: int
    """The copy of the weights that is in use."""


class ReplicaBackend:
    """For one model and its optimizer. `divide` decides; a rank that joins ranks in training calls `attach` instead."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        axis: Axis,
        sharing: SharedMemoryGroup | None,
        network: Callable[[], Axis],
        codec: Codec | None,
        *,
        bucket_bytes: int,
        check_every: int,
        warn: Callable[[str], None],
        reduction: Reduction | None = None,
        one_copy: bool = False,
    ) -> None:
        """`sharing` is given if ranks share memory; `network` returns an axis that uses no shared memory.

        `reduction`, if given, combines the gradients of slices instead of a sum. `one_copy`: the user has asked for one
        copy of the weights.
        """
        self._model, self._optimizer, self._codec, self._network = model, optimizer, codec, network
        self._bucket_bytes, self._check_every, self._warn = bucket_bytes, check_every, warn
        self._layout, self._reduction, self._one_copy = "", reduction, one_copy
        self._residuals: Residuals | None = None
        """Those of sums that were released by `put_down`."""
        self._set_group(axis, sharing)
        self.sum: Sum | None = None
        self.weights: Update | None = None
        self.shared: SharedMemorySum | None = None
        """The sum, if it is computed in shared memory."""
        self.common: SharedMemoryWeights | None = None
        """The weights, if ranks share them."""

    def _set_group(self, axis: Axis, sharing: SharedMemoryGroup | None) -> None:
        # Codecs are for networks. A user who sets one on a single host wants to see its effect: use the network there.
        # A user's reduction takes every slice's gradients, and shared memory has sums.
        usable = sharing is not None and (self._codec is None or sharing.across is not None) and self._reduction is None
        self._axis, self.sharing = axis, sharing if usable else None

    @property
    def gradients(self) -> Sum:
        assert self.sum is not None, "call divide() or attach() first"
        return self.sum

    @property
    def update(self) -> Update:
        assert self.weights is not None, "call divide() or attach() first"
        return self.weights

    @property
    def coded(self) -> Residuals | None:
        """The residuals of sums through a codec."""
        return self.sum.coded if self.sum is not None else None

    @property
    def ranks_per_copy(self) -> int:
        """How many ranks share each host's weights, if there are several hosts; else 0."""
        return self.sharing.plane.world if self.sharing is not None and self.sharing.across is not None else 0

    def trained(self) -> list[nn.Parameter]:
        return [param for param in self._model.parameters() if param.requires_grad]

    def trained_names(self) -> list[str]:
        name_of = {id(param): plain_name(name) for name, param in self._model.named_parameters()}
        return [name_of[id(param)] for param in self.gradients.params]

    def divide(self) -> None:
        """Decide how gradients are summed and weights updated; no change while the same parameters are trained."""
        trained = self.trained()
        if self.ranks_per_copy:  # each host shares its first rank's weights
            self._axis.broadcast_(trained, "weights of rank 0")
        if self.common is not None and self.common.is_current and _same(trained, self.gradients.params):
            return
        if self.weights is not None:
            self.weights.close()
        before, self._residuals = self.coded or self._residuals, None
        if self.sum is not None:
            self.sum.close()
        if not (self.sharing is not None and summable(trained) and self._share(self.sharing, trained)):
            self._use_local_weights(trained)
        if before is not None and self.coded is not None:
            self.coded.succeed(before)

    def synchronise(self) -> None:
        """Give every rank rank 0's weights and buffers, and look again at which parameters take gradients."""
        for param in self._model.parameters():
            param.grad = None  # one that is frozen now must not be updated with its last gradient for ever
        self.divide()
        shared = set(map(id, self.gradients.params)) if self.common is not None else set()
        own = [param for param in self._model.parameters() if id(param) not in shared]
        self._axis.broadcast_([*own, *self._model.buffers()], "weights of rank 0")
        self._axis.barrier("weights of rank 0")
        self.accept_weights()

    def editing(self) -> AbstractContextManager[None]:
        """Inside, weights may be changed by hand."""
        return self.common.editing() if self.common is not None else nullcontext()

    # Where ranks have parts of the weights between steps, `parallel.sharding` overrides these.

    @property
    def divided_frozen(self) -> tuple[Tensor, ...]:
        """Frozen parameters that are in parts."""
        return ()

    @property
    def shares(self) -> dict[int, TensorShard] | None:
        """Which part of each parameter this rank has between steps, by the parameter's id; None: all of each."""
        return None

    @property
    def passes_left(self) -> int:
        """How many more passes this rank has to make in this step, with slices or without."""
        return 0

    def before_step(self) -> None: ...
    def before_pass(self) -> None: ...
    def rest(self) -> None:
        """All passes of a step are made."""

    def gathered(self) -> AbstractContextManager[None]:
        """Inside, ranks may run as many forward passes as they like."""
        return nullcontext()

    # What a codec has left out of gradients, by name of parameter.

    def residual_state(self, gathered: Mapping[int, Tensor]) -> dict[str, Any]:
        if self.coded is None:
            return {}
        names, order = self.trained_names(), self.coded.settled_order
        return {
            "order": [names[index] for index in order] if order is not None else None,
            "residuals": {names[index]: rows for index, rows in gathered.items()},
        }

    def restore_residuals(self, state: Mapping[str, Any]) -> None:
        if self.coded is None or "residuals" not in state:
            return
        place = {name: index for index, name in enumerate(self.trained_names())}
        order = [place[name] for name in state["order"] or () if name in place]
        rows = {place[name]: rows for name, rows in state["residuals"].items() if name in place}
        self.coded.restore(order if order and len(order) == len(place) else None, rows)

    def accept_weights(self) -> None:
        """Accept that the weights were changed on purpose, in the same way on every rank."""
        if self.common is not None:
            self.common.accept()

    def _use_local_weights(self, trained: Sequence[nn.Parameter]) -> None:
        """Every rank has a separate copy of the weights."""
        self.sum, self.weights = self._new_sum(trained), LocalUpdate(trained, self._optimizer)
        self.shared = self.common = None

    def _new_sum(self, trained: Sequence[nn.Parameter]) -> GradientSum | CustomReduction:
        if self._reduction is not None:
            return CustomReduction(trained, self._network(), self._reduction)
        return GradientSum(trained, self._network(), self._bucket_bytes, self._codec)

    def _share(self, sharing: SharedMemoryGroup, trained: list[nn.Parameter]) -> bool:
        """Move gradients, and weights if the optimizer allows it, to shared memory; False on all ranks if any fails."""
        if sharing.across is not None and shareable(trained, self._optimizer):
            return False  # between hosts, sums are divided only if a fused update reads them
        problem = ""
        try:
            self._make_shared(sharing, trained)
        except EnvironmentProblem as no_room:  # the same on every rank of this host
            problem = no_room.what
        if sharing.across is not None:
            gathered = self._axis.all_gather_bytes("room for shared memory", problem.encode())
            if problem == "" and any(gathered):
                self.update.close()
                self.gradients.close()
            problem = next((text.decode() for text in gathered if text), "")
        if problem:
            self._warn(f"gradients are sent over the network layer instead of shared memory: {problem}")
        return not problem

    def _make_shared(
        self, sharing: SharedMemoryGroup, trained: list[nn.Parameter], mapped: Mapped | None = None
    ) -> None:
        """New memory for all ranks, or with `mapped` the memory that the other ranks use."""
        plane, layout = sharing.plane, mapped.layout if mapped else sharing.new_layout()
        memory = sharing.memory_of(layout)
        gradients = SharedMemorySum(
            trained, plane, memory, sharing.across, self._bucket_bytes, codec=self._codec, slots=sharing.slots
        )
        self._layout = layout
        try:
            common = self._share_weights(sharing, gradients, memory, mapped)
        except EnvironmentProblem:
            gradients.close()
            raise
        self.sum, self.shared, self.common = gradients, gradients, common
        self.weights = common if common is not None else LocalUpdate(trained, self._optimizer)
        if common is not None:
            common.watch(self._check_every, self.trained_names())

    def _share_weights(
        self,
        sharing: SharedMemoryGroup,
        gradients: SharedMemorySum,
        memory: Callable[[str, int], Segment],
        mapped: Mapped | None,
    ) -> FusedSharedWeights | OwnerUpdates | None:
        """Weights that ranks share, if the optimizer allows it."""
        optimizer, plane = self._optimizer, sharing.plane
        if not shareable(gradients.params, optimizer):
            copies, current = 2 if sharing.is_elastic else 1, mapped.current if mapped else None
            return FusedSharedWeights(gradients, optimizer, plane, memory, copies=copies, current=current)
        if not runs_fused(optimizer) and ownable(optimizer, one_copy=self._one_copy) and not sharing.is_elastic:
            return OwnerUpdates(gradients, optimizer, plane, memory)
        return None

    # Ranks that join or are lost, between steps or during one.

    @property
    def mapped(self) -> Mapped | None:
        """Where this rank's weights and gradients are, for ranks that join later; None if not in shared memory."""
        if self.shared is None:
            return None
        return Mapped(self._layout, self.common.current if self.common is not None else 0)

    def attach(self, mapped: Mapped | None) -> None:
        """Join ranks that are training. Their state is copied later; weights that they share are this rank's now."""
        if self.sum is not None:  # this rank is one step behind
            if mapped is not None and self.common is not None:
                self.common.look_at_copy(mapped.current)
        elif mapped is not None and self.sharing is not None:
            self._make_shared(self.sharing, self.trained(), mapped)
        else:
            self._use_local_weights(self.trained())
        self.accept_weights()

    def where(self, tensor: Tensor) -> tuple[str, int] | None:
        """The tensor's location in shared memory, if it is there: it need not be sent to a rank that attaches."""
        return self.common.where(tensor) if self.common is not None else None

    def shared_tensor(self, where: tuple[str, int], shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        assert self.common is not None
        return self.common.tensor_at(where, shape, stride).clone()

    def regroup(self, axis: Axis, sharing: SharedMemoryGroup | None) -> None:
        """Continue with another group of ranks. The current step's gradient buffers in shared memory are kept."""
        self._set_group(axis, sharing)
        if self.sum is None:
            return
        if self.shared is not None and sharing is not None and sharing.slots is not None:
            self.shared.move(sharing.plane, sharing.slots)
            if self.common is not None:
                self.common.move(sharing.plane)
            return
        self.sum.leave()
        if self.common is None:
            self.sum, self.shared = self._new_sum(self.sum.params), None
        else:  # the group has members on another host now
            self.common.release()
            self._use_local_weights(self.sum.params)

    def put_down(self) -> Callable[[], None]:
        """Give this rank a private copy of weights and optimizer state, until `divide`.

        No rank waits for another here. Call the returned function, which frees the shared memory, once every rank has
        done this.
        """
        weights, gradients, self._residuals = self.weights, self.sum, self.coded or self._residuals
        self.weights = self.sum = self.shared = self.common = None
        segments = [segment for one in (weights, gradients) if one is not None for segment in one.segments]
        if weights is not None:
            weights.release()
        if gradients is not None:
            gradients.leave()
        frees = self.sharing is not None and self.sharing.plane.rank == 0  # the first of a host's ranks

        def give_back() -> None:
            for segment in segments if frees else ():
                segment.free()

        return give_back

    def abandon(self) -> None:
        """Stop using the model, which will be replaced by another one."""
        if self.sum is not None:
            self.sum.leave()


def _same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


class ServerBackend:
    """The backend that `Regroup` sees if servers have the weights: workers that join get them with an interval."""

    common = None
    mapped = Mapped("served", 0)

    def attach(self, mapped: Mapped | None) -> None:
        pass

    def where(self, tensor: Tensor) -> tuple[str, int] | None:
        return None

    def shared_tensor(self, where: tuple[str, int], shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        raise AssertionError("`where` never reports a tensor in shared memory")
