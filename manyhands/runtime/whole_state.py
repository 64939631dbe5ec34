"""The whole of a model's and its optimizer's state, where each worker has a part: put together for the chief, and cut.

What is written down is whole tensors under the names of the user's model, so a checkpoint does not know how the model
was divided, and loads under any layout. Tensors travel to the chief one at a time. Start reading at `WholeState`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.axis import Axis
from manyhands.parallel.shares import Share
from manyhands.runtime.state import model_state, optimizer_state, pack, unpack

__all__ = ["WholeState"]


class _Told(msgspec.Struct):
    """What a worker has."""

    tensors: list[tuple[str, str, Share]]
    """Name, type and which part of the whole it is; they are sent in this order."""
    optimizer: Any
    """Its states, with references to those tensors."""


class _Gathered(NamedTuple):
    weights: dict[str, Tensor]
    aliases: dict[str, str]
    extra: dict[str, Any]
    optimizer: dict[str, Any]

    def state_dict(self) -> dict[str, Tensor]:
        """As the whole model would have it."""
        return {**self.weights, **{name: self.weights[first] for name, first in self.aliases.items()}, **self.extra}


class WholeState:
    """Of a model that is about to be divided: what there is, by name. `divided` then says what of it is here."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._names = {id(param): name for name, param in model.named_parameters()}
        weights, self._aliases, self._extra = model_state(model)
        self._like = {name: torch.empty_like(one, device="meta") for name, one in weights.items()}
        self._groups = [[self._names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
        self._shares: Mapping[str, Share] = {}
        self._present: frozenset[str] = frozenset()
        self._gathered: _Gathered | None = None

    def divided(self, shares: Mapping[str, Share], present: frozenset[str] | None) -> None:
        """`present` are the names of what is here, None if some of everything is; `shares` those here in part."""
        self._shares = shares
        self._present = frozenset([*self._like, *self._aliases]) if present is None else present

    def placement(self) -> dict[str, Share]:
        """What is here, and which part of it."""
        return {
            name: self._shares.get(name, Share(tuple(self._like[name].shape)))
            for name in self._like
            if name in self._present
        }

    def like(self) -> dict[str, Tensor]:
        """Tensors without values, as the whole model has them."""
        return self._like

    def gather(self, axis: Axis) -> None:
        """Have the whole on rank 0 of `axis`, whose ranks send to one another. For all of them alike."""
        mine = {f"model/{name}": one for name, one in self._local() if name not in self._aliases}
        packed = pack(optimizer_state(self._optimizer, self._names), "optimizer", mine)
        told, whole = self._bring(axis, mine, packed)
        if axis.rank:
            return
        weights = {name: whole[f"model/{name}"] for name in self._like}
        self._gathered = _Gathered(weights, self._aliases, self._extra, self._merged(told, whole))

    def gradients(self, axis: Axis) -> dict[str, Tensor]:
        """What the last step left in `.grad`, whole, on rank 0. For all ranks alike."""
        params = [one for group in self._optimizer.param_groups for one in group["params"] if one.grad is not None]
        mine = {f"model/{self._names[id(param)]}": param.grad.detach() for param in params}
        return {name.removeprefix("model/"): one for name, one in self._bring(axis, mine, None)[1].items()}

    def gathered(self) -> _Gathered:
        """What `gather` has brought, once: it is as large as everything. On rank 0."""
        assert self._gathered is not None, "gather comes first"
        gathered, self._gathered = self._gathered, None
        return gathered

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Have this worker's part of these."""
        with torch.no_grad():
            for name, mine in self._local():
                share = self._shares.get(self._aliases.get(name, name))
                value = weights[self._aliases.get(name, name)]
                mine.copy_(value if share is None else share.cut(value))

    def own(self) -> _Gathered:
        """What this worker has, for one that is to have the same part."""
        return _Gathered(dict(self._local()), {}, self._extra, optimizer_state(self._optimizer, self._names))

    def take_own(self, weights: Mapping[str, Tensor]) -> None:
        """Have what such a one has told of."""
        with torch.no_grad():
            for name, mine in self._local():
                mine.copy_(weights[name])

    def part_of(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """This worker's part of the whole optimizer's state."""
        here = {self._names[id(param)] for group in self._optimizer.param_groups for param in group["params"]}
        states = {
            name: {key: self._cut(name, value) for key, value in values.items()}
            for name, values in optimizer["state"].items()
            if name in here
        }
        groups = [
            {**group, "params": [name for name in group["params"] if name in here]}
            for group in optimizer["param_groups"]
        ]
        return {"state": states, "param_groups": groups}

    def _cut(self, name: str, value: Any) -> Any:
        share = self._shares.get(name)
        return share.cut(value) if share is not None and isinstance(value, Tensor) and share.fits(value) else value

    def _local(self) -> Iterator[tuple[str, Tensor]]:
        for name, one in self._model.state_dict().items():
            if name in self._present and isinstance(one, Tensor):
                yield name, one.detach()

    def _bring(self, axis: Axis, mine: Mapping[str, Tensor], packed: Any) -> tuple[list[_Told], dict[str, Tensor]]:
        """What each rank says that it has, and on rank 0 all of it."""
        tensors = [(name, str(one.dtype).removeprefix("torch."), self._share(name, one)) for name, one in mine.items()]
        data = msgspec.msgpack.encode(_Told(tensors, packed))
        told = [msgspec.msgpack.decode(each, type=_Told) for each in axis.all_gather_bytes("who has what", data)]
        if axis.rank == 0:
            return told, _receive_all(axis, told, mine)
        _send(axis, told, mine)
        return told, {}

    def _share(self, name: str, tensor: Tensor) -> Share:
        """Of a weight, or of a state of the optimizer's that has the shape that its weight has here."""
        kind, _, rest = name.partition("/")
        weight = rest if kind == "model" else rest.removeprefix("state/").rpartition("/")[0]
        share = self._shares.get(weight)
        fits = share is not None and tuple(tensor.shape) == share.local_shape
        return share if share is not None and fits else Share(tuple(tensor.shape))

    def _merged(self, told: Sequence[_Told], whole: Mapping[str, Tensor]) -> dict[str, Any]:
        """The states of all parameters, and the groups' settings as the chief has them."""
        optimizers = [unpack(one.optimizer, whole) for one in told]
        states = {name: values for one in reversed(optimizers) for name, values in one["state"].items()}
        groups = zip(optimizers[0]["param_groups"], self._groups, strict=True)
        return {"state": states, "param_groups": [{**group, "params": names} for group, names in groups]}


def _firsts(told: Sequence[_Told]) -> Iterator[tuple[int, int, str, str, Share]]:
    """Each part of each tensor, from the first worker that has it: rank, number, name, type, share."""
    seen: set[tuple[str, Share]] = set()
    for rank, one in enumerate(told):
        for number, (name, dtype, share) in enumerate(one.tensors):
            if (name, share) not in seen:
                seen.add((name, share))
                yield rank, number, name, dtype, share


def _send(axis: Axis, told: Sequence[_Told], mine: Mapping[str, Tensor]) -> None:
    for rank, number, name, _, _ in _firsts(told):
        if rank == axis.rank and mine[name].numel():
            raw = mine[name].contiguous().cpu().view(-1).view(torch.uint8)
            axis.send_start(raw, 0, number, f"{name} to the chief").wait()


def _receive_all(axis: Axis, told: Sequence[_Told], mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for rank, number, name, dtype, share in _firsts(told):
        part = mine[name] if rank == 0 else torch.empty(share.local_shape, dtype=getattr(torch, dtype))
        if rank and part.numel():
            raw = part.view(-1).view(torch.uint8)
            axis.receive_start(raw, rank, number, f"{name} from rank {rank}").wait()
        if share.is_whole:
            whole[name] = part
        else:
            share.paste_(whole.setdefault(name, torch.empty(share.shape, dtype=part.dtype)), part)
    return whole
