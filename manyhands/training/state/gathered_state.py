"""The whole of a model's and its optimizer's state, where each worker has a part: put together for the chief, and cut.

What is written down is whole tensors under the names of the user's model, so a checkpoint does not know how the model
was divided, and loads under any layout. Tensors travel one at a time, and nobody has more than one of them in full.
Start reading at `WholeState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.checkpoint.state_packing import model_state, optimizer_state, pack, unpack
from manyhands.checkpoint.tensor_names import plain_name
from manyhands.checkpoint.tensor_stream import announced
from manyhands.comm.axis import Axis
from manyhands.parallel.model.tensor_shard import Share
from manyhands.parallel.replicas.fingerprint import digest

__all__ = ["Gathered", "WholeState"]

MODEL, OPTIMIZER = "model/", "training/optimizer"
STATE = f"{OPTIMIZER}/state/"
"""How names begin, in a checkpoint too."""


class _Told(msgspec.Struct):
    """What a worker has."""

    tensors: list[tuple[str, str, Share]]
    """Name, type and which part of the whole it is."""
    optimizer: Any
    """Its states, with references to those tensors."""


class Gathered(NamedTuple):
    """What there is: of all workers announced, without values; or what one has."""

    weights: dict[str, Tensor]
    aliases: dict[str, str]
    extra: dict[str, Any]
    optimizer: dict[str, Any]


class WholeState:
    """Of a model that is about to be divided: what there is, by name. `divided` then says what of it is here."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._names = {id(param): plain_name(name) for name, param in model.named_parameters()}
        weights, self._aliases, self._extra = model_state(model)
        self._like = {name: torch.empty_like(one, device="meta") for name, one in weights.items()}
        self._groups = [[self._names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
        self._shares: Mapping[str, Share] = {}
        self._present: frozenset[str] = frozenset()
        self._told: list[_Told] = []

    def divided(self, shares: Mapping[str, Share], present: frozenset[str] | None) -> None:
        """`present` are the names of what is here, None if some of everything is; `shares` those here in part."""
        self._shares = {plain_name(name): share for name, share in shares.items()}
        all_names = (*self._like, *self._aliases)
        self._present = frozenset(all_names if present is None else map(plain_name, present))

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

    def meet(self, axis: Axis) -> None:
        """Have every rank know who has what. For all of them alike, each time before `gathered` and `bring`."""
        packed = pack(optimizer_state(self._optimizer, self._names), OPTIMIZER, mine := self._weights())
        self._told = self._tell(axis, mine, packed)

    def gathered(self) -> Gathered:
        """After `meet`, on rank 0."""
        whole = {
            name: announced(share.shape, getattr(torch, dtype))
            for one in self._told
            for name, dtype, share in one.tensors
        }
        weights = {name: whole[MODEL + name] for name in self._like}
        return Gathered(weights, self._aliases, self._extra, self._merged(whole))

    @property
    def names(self) -> frozenset[str]:
        """What `bring` has the values of; after `meet`."""
        return frozenset(_names(self._told))

    def bring(self, axis: Axis, order: Sequence[str], give: Callable[[str, Tensor], None]) -> None:
        """Whole tensors to rank 0 of `axis`, in the order that it says. For all ranks alike, after `meet`."""
        mine = self._weights()
        pack(optimizer_state(self._optimizer, self._names), OPTIMIZER, mine)
        _bring(axis, self._told, mine, order, give)

    def hashes(self, axis: Axis) -> list[dict[tuple[str, Share], int]]:
        """Of what each rank has, by name and which part of the whole it is. For all ranks alike."""
        pack(optimizer_state(self._optimizer, self._names), OPTIMIZER, mine := self._weights())
        said = [(name, self._share(name, one), digest(one)) for name, one in mine.items()]
        told = axis.all_gather_bytes("copies of parts", msgspec.msgpack.encode(said))
        known = (msgspec.msgpack.decode(each, type=list[tuple[str, Share, int]]) for each in told)
        return [{(name, share): number for name, share, number in each} for each in known]

    def weights(self, axis: Axis) -> dict[str, Tensor]:
        """The whole model's state_dict, on rank 0. For all ranks alike."""
        found = self._all(axis, self._weights())
        tied = {name: found[first] for name, first in self._aliases.items()} if found else {}
        return {**found, **tied, **self._extra} if found else {}

    def gradients(self, axis: Axis) -> dict[str, Tensor]:
        """What the last step left in `.grad`, whole, on rank 0. For all ranks alike."""
        params = [one for group in self._optimizer.param_groups for one in group["params"] if one.grad is not None]
        return self._all(axis, {MODEL + self._names[id(param)]: param.grad.detach() for param in params})

    def _all(self, axis: Axis, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        told = self._tell(axis, mine, None)
        found: dict[str, Tensor] = {}
        _bring(axis, told, mine, list(dict.fromkeys(_names(told))), found.__setitem__)
        return {name.removeprefix(MODEL): one for name, one in found.items()}

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Have this worker's part of these, each a whole tensor."""
        self.keep((MODEL + name, value) for name, value in weights)

    def keep(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Have this worker's part of a checkpoint's whole tensors: of the weights in their places, of the rest here.

        An optimizer's states for weights of others are empty.
        """
        here: dict[str, list[Tensor]] = {}
        for name, one in self._local():
            here.setdefault(self._aliases.get(name, name), []).append(one)
        kept: dict[str, Tensor] = {}
        for name, value in tensors:
            weight, mine = _weight_of(name), here.get(_weight_of(name), ())
            if not name.startswith(MODEL):
                is_others = name.startswith(STATE) and not mine
                kept[name] = value.new_empty(0) if is_others else self._cut(weight, value)
            elif mine:
                part = self._cut(weight, value)
                for one in mine:
                    one.copy_(part)
        return kept

    def own(self) -> Gathered:
        """What this worker has, for one that is to have the same part."""
        return Gathered(dict(self._local()), {}, self._extra, optimizer_state(self._optimizer, self._names))

    def take_own(self, tensors: Mapping[str, Tensor]) -> None:
        """Have the weights that such a one has told of."""
        for name, mine in self._local():
            mine.copy_(tensors[MODEL + name])

    def part_of(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """Of a whole optimizer's state what concerns this worker's weights."""
        here = {self._names[id(param)] for group in self._optimizer.param_groups for param in group["params"]}
        states = {name: values for name, values in optimizer["state"].items() if name in here}
        groups = [
            {**group, "params": [name for name in group["params"] if name in here]}
            for group in optimizer["param_groups"]
        ]
        return {"state": states, "param_groups": groups}

    def _cut(self, weight: str, value: Tensor) -> Tensor:
        """This worker's part of a weight, or of a state of it that has its shape."""
        share = self._shares.get(weight)
        return share.cut(value) if share is not None and share.fits(value) else value

    def _local(self) -> Iterator[tuple[str, Tensor]]:
        for own, one in self._model.state_dict().items():
            name = plain_name(own)
            if name in self._present and isinstance(one, Tensor):
                yield name, one.detach()

    def _weights(self) -> dict[str, Tensor]:
        """What this worker has of the model, tied weights once."""
        return {MODEL + name: one for name, one in self._local() if name not in self._aliases}

    def _tell(self, axis: Axis, mine: Mapping[str, Tensor], packed: Any) -> list[_Told]:
        """What each rank says that it has."""
        tensors = [(name, str(one.dtype).removeprefix("torch."), self._share(name, one)) for name, one in mine.items()]
        data = msgspec.msgpack.encode(_Told(tensors, packed))
        return [msgspec.msgpack.decode(each, type=_Told) for each in axis.all_gather_bytes("who has what", data)]

    def _share(self, name: str, tensor: Tensor) -> Share:
        """Of a weight, or of a state of the optimizer's that has the shape that its weight has here."""
        share = self._shares.get(_weight_of(name))
        fits = share is not None and tuple(tensor.shape) == share.local_shape
        return share if share is not None and fits else Share(tuple(tensor.shape))

    def _merged(self, whole: Mapping[str, Tensor]) -> dict[str, Any]:
        """The states of all parameters, and the groups' settings as the chief has them."""
        optimizers = [unpack(one.optimizer, whole) for one in self._told]
        states = {name: values for one in reversed(optimizers) for name, values in one["state"].items()}
        groups = zip(optimizers[0]["param_groups"], self._groups, strict=True)
        return {"state": states, "param_groups": [{**group, "params": names} for group, names in groups]}


def _weight_of(name: str) -> str:
    """Of a weight's own name, or that of a state of the optimizer's."""
    if name.startswith(MODEL):
        return name.removeprefix(MODEL)
    return name.removeprefix(STATE).rpartition("/")[0]


def _names(told: Sequence[_Told]) -> Iterator[str]:
    return (name for one in told for name, _, _ in one.tensors)


def _bring(
    axis: Axis,
    told: Sequence[_Told],
    mine: Mapping[str, Tensor],
    order: Sequence[str],
    give: Callable[[str, Tensor], None],
) -> None:
    said = axis.all_gather_bytes("what the chief wants", msgspec.msgpack.encode(order) if axis.rank == 0 else b"")[0]
    parts = _parts(told)
    for number, name in enumerate(msgspec.msgpack.decode(said, type=list[str])):
        if axis.rank == 0:
            give(name, _receive(axis, number, name, mine, parts[name]))
        elif any(part.rank == axis.rank for part in parts[name]) and mine[name].numel():
            raw = mine[name].contiguous().cpu().view(-1).view(torch.uint8)
            axis.send_start(raw, 0, number, f"{name} to the chief").wait()


class _Part(NamedTuple):
    rank: int
    dtype: torch.dtype
    share: Share


def _parts(told: Sequence[_Told]) -> dict[str, list[_Part]]:
    """Each part of each tensor once, from the first worker that has it."""
    found: dict[str, dict[Share, _Part]] = {}
    for rank, one in enumerate(told):
        for name, dtype, share in one.tensors:
            found.setdefault(name, {}).setdefault(share, _Part(rank, getattr(torch, dtype), share))
    return {name: list(parts.values()) for name, parts in found.items()}


def _receive(axis: Axis, number: int, name: str, mine: Mapping[str, Tensor], parts: Sequence[_Part]) -> Tensor:
    whole: Tensor | None = None
    for rank, dtype, share in parts:
        part = mine[name] if rank == 0 else torch.empty(share.local_shape, dtype=dtype)
        if rank and part.numel():
            raw = part.view(-1).view(torch.uint8)
            axis.receive_start(raw, rank, number, f"{name} from rank {rank}").wait()
        if share.is_whole:
            return part
        whole = torch.empty(share.shape, dtype=dtype) if whole is None else whole
        share.paste_(whole, part)
    assert whole is not None, f"nobody has {name}"
    return whole
