"""Torch's optimizers on weights that the ranks of one host share: one rank, its owner, updates each tensor for all.

For optimizers that update each tensor independently and have no fused version. Summed gradients are in shared memory;
a rank sets `.grad` of the tensors it owns and runs torch's `step`, which writes the shared weights. Torch also creates
optimizer state in a tensor's first step. It then moves into shared memory, where every rank sees all of it: each has a
complete optimizer, whose `state_dict` is that of one process. Start reading at `OwnerUpdates.apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from manyhands.comm.host_memory import Segment
from manyhands.comm.shared_memory import Plane
from manyhands.comm.shared_memory_axis import PlaneAxis
from manyhands.optim.ftrl import FTRL
from manyhands.parallel.gradients.shared_memory_sum import SharedMemorySum
from manyhands.parallel.model.flat_layout import lay_out
from manyhands.parallel.replicas.fingerprint import fingerprint
from manyhands.parallel.weights.shared_memory_weights import SharedMemoryWeights
from manyhands.torch_private import foreach_mul_

__all__ = ["OwnerUpdates", "ownable", "owners"]

_ONE_TENSOR_AT_A_TIME = frozenset(
    (ASGD, FTRL, SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, RAdam, RMSprop, Rprop)
)


def ownable(optimizer: Optimizer, *, one_copy: bool = False) -> bool:
    """Whether the new value of each tensor is known to depend on that tensor alone.

    This cannot be seen from outside: D-Adaptation and Prodigy estimate one step size from all tensors. A subclass may
    do anything, and so may hooks, which would see only some gradients. One that wraps another library's optimizer says
    so as `divisible_by`; it counts only with `one_copy`, where the user has asked for one copy of the weights: that
    library's callbacks may write weights, each rank its own.
    """
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    declared = one_copy and getattr(optimizer, "divisible_by", "") in ("tensors", "elements")
    return (type(optimizer) in _ONE_TENSOR_AT_A_TIME or declared) and not hooks


def owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The owner of each tensor, with about as many bytes per rank: the largest first, to the rank with the fewest."""
    load, owner = [0] * num_ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner[index] = load.index(min(load))
        load[owner[index]] += sizes[index]
    return owner


class _OwnedState(msgspec.Struct, array_like=True):
    """Optimizer state of the parameter with index `place`, as its owner describes it to the other ranks."""

    place: int
    name: str
    dtype: str
    shape: list[int]
    strides: list[int]

    def like(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=getattr(torch, self.dtype), device="meta")


class OwnerUpdates(SharedMemoryWeights):
    """Makes all ranks share rank 0's weights. Every rank constructs one at the same time."""

    def __init__(
        self,
        gradients: SharedMemorySum,
        optimizer: Optimizer,
        plane: Plane,
        memory: Callable[[str, int], Segment],
    ) -> None:
        super().__init__(gradients, optimizer, plane, memory)
        self._axis = PlaneAxis(plane, timeout_s=plane.timeout_s)
        updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
        owner = owners([param.nbytes if id(param) in updated else 0 for param in self._params], plane.world)
        self._mine = {index for index, rank in enumerate(owner) if rank == plane.rank}
        self._states: dict[tuple[int, str], Tensor] = {}
        self._updates, self._fingerprints_left = 0, dict[int, int]()
        """Fingerprints of this rank's tensors, if the last update took them."""
        self._adopt()  # before weights move: if there is not enough memory, nothing has changed yet
        self._begin_sharing()
        # load_state_dict replaces the state.
        self._loaded = optimizer.register_load_state_dict_post_hook(lambda _: self._adopt())

    # ---- the update ----

    def scale(self, factor: float) -> None:
        self._check_untouched()
        self._factors = [factor]
        self._total: list[Tensor] | None = None

    def norm(self) -> float:
        self._total = self._gradients.total()
        return self._gradients.norm(self._total, *self._factors)

    def clip(self, factor: float) -> None:
        self._factors.append(factor)

    def apply(self) -> None:
        """Update the tensors that this rank owns; then wait for the other ranks and share the state they created."""
        total = self._total if self._total is not None else self._gradients.total()
        for index, fingerprint_left in self._fingerprints_left.items():
            if self._fingerprint(index) != fingerprint_left:
                self._raise_alarm(index)
        mine = [index for index in self._gradients.present if index in self._mine]
        grads = [total[index] for index in mine]
        for factor in self._factors:
            if factor != 1.0 and grads:
                foreach_mul_(grads, factor)
        for index, grad in zip(mine, grads, strict=True):
            self._params[index].grad = grad
        self._optimizer.step()
        for index in mine:
            self._params[index].grad = None  # the next backward writes there
        sent = self._axis.all_gather_bytes("new weights", self._describe_new_states(mine))
        if any(sent):
            self._share([state for text in sent if text for state in msgspec.json.decode(text, type=list[_OwnedState])])
        self._check_alarm()
        self._updates += 1
        due = self._watch_every and self._updates % self._watch_every == 0
        self._fingerprints_left = {index: self._fingerprint(index) for index in self._mine} if due else {}
        self._note_versions()

    def _fingerprint(self, index: int) -> int:
        states = [(name, value) for _, name, value in self._states_of([index])]
        return fingerprint([("", self._params[index]), *states])

    def accept(self) -> None:
        super().accept()
        self._fingerprints_left = {}

    # ---- optimizer state ----

    def _describe_new_states(self, indices: Iterable[int]) -> bytes:
        found = [(p, n, v) for p, n, v in self._states_of(indices) if v is not self._states.get((p, n))]
        return msgspec.json.encode([_describe(*state) for state in found]) if found else b""

    def _states_of(self, indices: Iterable[int]) -> list[tuple[int, str, Tensor]]:
        states = [(index, self._optimizer.state.get(self._params[index], {})) for index in indices]
        return [(p, name, value) for p, state in states for name, value in state.items() if isinstance(value, Tensor)]

    def _share(self, new: list[_OwnedState]) -> None:
        """Owners copy new state into shared memory, and every rank's optimizer uses it there."""
        self._make_room(new)
        state_of = self._optimizer.state
        for index, name in ((state.place, state.name) for state in new):
            state, shared = state_of[self._params[index]], self._states[index, name]
            if index in self._mine:
                shared.copy_(state[name])
            state[name] = shared
        # In the order of the parameters on every rank: a checkpoint does not depend on the owners.
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        ordered = {param: state_of[param] for param in params if param in state_of}
        state_of.clear()
        state_of.update(ordered)
        self._plane.barrier("states of the optimizer")

    def _make_room(self, states: Sequence[_OwnedState]) -> None:
        missing = [state for state in states if not _fits(state, self._states.get((state.place, state.name)))]
        if not missing:
            return
        likes = [state.like() for state in missing]
        flat = lay_out(likes)
        views = flat.views(likes, self._allot(f"states {len(self._segments)}", flat.num_bytes))
        self._states.update({(state.place, state.name): view for state, view in zip(missing, views, strict=True)})

    def _adopt(self) -> None:
        """Move state that is the same on every rank into shared memory; all write the same bytes, so none waits."""
        found = self._states_of(range(len(self._params)))
        self._make_room([_describe(*state) for state in found])
        self._fingerprints_left = {}
        for index, name, value in found:
            self._optimizer.state[self._params[index]][name] = self._states[index, name].copy_(value)

    def release(self) -> None:
        self._loaded.remove()
        super().release()


def _describe(index: int, name: str, value: Tensor) -> _OwnedState:
    return _OwnedState(index, name, str(value.dtype).removeprefix("torch."), list(value.shape), list(value.stride()))


def _fits(state: _OwnedState, known: Tensor | None) -> bool:
    return known is not None and list(known.shape) == state.shape and str(known.dtype) == f"torch.{state.dtype}"
