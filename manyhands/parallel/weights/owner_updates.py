"""Torch's own optimizers on weights that the ranks of one host share: each tensor is updated by one rank, for all.

For optimizers that look at one tensor at a time and have no fused version. The sums of gradients lie in shared memory;
a rank gives its own tensors their `.grad`, runs torch's `step`, and so writes weights that all look at. States are made
by torch, too, in a tensor's first step. They then move into shared memory, where every rank sees all of them: each
has a complete optimizer, whose `state_dict` is that of one process. Start reading at `OwnedWeights.apply`.
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
from manyhands.parallel.gradients.shared_memory_sum import SharedGradients
from manyhands.parallel.model.flat_layout import lay_out
from manyhands.parallel.replicas.fingerprint import fingerprint
from manyhands.parallel.weights.shared_memory_weights import CommonWeights
from manyhands.torch_private import foreach_mul_

__all__ = ["OwnedWeights", "ownable", "owners"]

_ONE_TENSOR_AT_A_TIME = frozenset(
    (ASGD, FTRL, SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, RAdam, RMSprop, Rprop)
)


def ownable(optimizer: Optimizer) -> bool:
    """Whether every tensor's new value is known to depend on that tensor alone.

    It cannot be told from outside: D-Adaptation and Prodigy estimate one step size from all of them. A subclass may do
    anything, and so may hooks, which would see some gradients only.
    """
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer) in _ONE_TENSOR_AT_A_TIME and not hooks


def owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """A rank for each tensor, so that all have about as much: the largest first, to whoever has least."""
    load, owner = [0] * num_ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owner[place] = load.index(min(load))
        load[owner[place]] += sizes[place]
    return owner


class _State(msgspec.Struct, array_like=True):
    """A state of a parameter, as its owner describes it to the others."""

    place: int
    name: str
    dtype: str
    shape: list[int]
    strides: list[int]

    def like(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=getattr(torch, self.dtype), device="meta")


class OwnedWeights(CommonWeights):
    """Rank 0's weights, for all ranks, from now on. Every rank makes one at the same time."""

    def __init__(
        self,
        gradients: SharedGradients,
        optimizer: Optimizer,
        plane: Plane,
        memory: Callable[[str, int], Segment],
    ) -> None:
        super().__init__(gradients, optimizer, plane, memory)
        self._axis = PlaneAxis(plane, timeout_s=plane.timeout_s)
        updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
        owner = owners([param.nbytes if id(param) in updated else 0 for param in self._params], plane.world)
        self._mine = {place for place, rank in enumerate(owner) if rank == plane.rank}
        self._states: dict[tuple[int, str], Tensor] = {}
        self._updates, self._left = 0, dict[int, int]()
        """Fingerprints of this rank's tensors, where the last update took them."""
        self._adopt()  # before weights move: where there is not enough memory, nothing has changed yet
        self._settle()
        # Whoever loads states replaces them.
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
        """Update this rank's own tensors; then wait for the others, and hear which states they have made."""
        total = self._total if self._total is not None else self._gradients.total()
        for place, left in self._left.items():
            if self._fingerprint(place) != left:
                self._raise_alarm(place)
        mine = [place for place in self._gradients.present if place in self._mine]
        grads = [total[place] for place in mine]
        for factor in self._factors:
            if factor != 1.0 and grads:
                foreach_mul_(grads, factor)
        for place, grad in zip(mine, grads, strict=True):
            self._params[place].grad = grad
        self._optimizer.step()
        for place in mine:
            self._params[place].grad = None  # the next backward writes there
        told = self._axis.all_gather_bytes("new weights", self._tell_new_states(mine))
        if any(told):
            self._share([state for text in told if text for state in msgspec.json.decode(text, type=list[_State])])
        self._look_for_alarm()
        self._updates += 1
        due = self._watch_every and self._updates % self._watch_every == 0
        self._left = {place: self._fingerprint(place) for place in self._mine} if due else {}
        self._note_versions()

    def _fingerprint(self, place: int) -> int:
        states = [(name, value) for _, name, value in self._states_of([place])]
        return fingerprint([("", self._params[place]), *states])

    def accept(self) -> None:
        super().accept()
        self._left = {}

    # ---- the optimizer's states ----

    def _tell_new_states(self, places: Iterable[int]) -> bytes:
        found = [(p, n, v) for p, n, v in self._states_of(places) if v is not self._states.get((p, n))]
        return msgspec.json.encode([_describe(*state) for state in found]) if found else b""

    def _states_of(self, places: Iterable[int]) -> list[tuple[int, str, Tensor]]:
        states = [(place, self._optimizer.state.get(self._params[place], {})) for place in places]
        return [(p, name, value) for p, state in states for name, value in state.items() if isinstance(value, Tensor)]

    def _share(self, new: list[_State]) -> None:
        """Owners put new states into shared memory, and every rank's optimizer looks at them there."""
        self._make_room(new)
        everything = self._optimizer.state
        for place, name in ((state.place, state.name) for state in new):
            state, shared = everything[self._params[place]], self._states[place, name]
            if place in self._mine:
                shared.copy_(state[name])
            state[name] = shared
        # In the order of the parameters on every rank: nothing that is saved tells who owned what.
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        ordered = {param: everything[param] for param in params if param in everything}
        everything.clear()
        everything.update(ordered)
        self._plane.meet("states of the optimizer")

    def _make_room(self, states: Sequence[_State]) -> None:
        missing = [state for state in states if not _fits(state, self._states.get((state.place, state.name)))]
        if not missing:
            return
        likes = [state.like() for state in missing]
        flat = lay_out(likes)
        views = flat.views(likes, self._allot(f"states {len(self._segments)}", flat.num_bytes))
        self._states.update({(state.place, state.name): view for state, view in zip(missing, views, strict=True)})

    def _adopt(self) -> None:
        """Move states that every rank has alike into shared memory; all write the same there, so none need wait."""
        found = self._states_of(range(len(self._params)))
        self._make_room([_describe(*state) for state in found])
        self._left = {}
        for place, name, value in found:
            self._optimizer.state[self._params[place]][name] = self._states[place, name].copy_(value)

    def release(self) -> None:
        self._loaded.remove()
        super().release()


def _describe(place: int, name: str, value: Tensor) -> _State:
    return _State(place, name, str(value.dtype).removeprefix("torch."), list(value.shape), list(value.stride()))


def _fits(state: _State, known: Tensor | None) -> bool:
    return known is not None and list(known.shape) == state.shape and str(known.dtype) == f"torch.{state.dtype}"
