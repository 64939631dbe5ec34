"""State of a partitioned model and its optimizer: gathered on the chief for a save, sharded again on loading.

A checkpoint has complete tensors under the names of the user's model, so it does not depend on how the model was
partitioned, and loads under any layout. Tensors are sent one at a time, and no worker has more than one complete
tensor at a time. Start reading at `WholeState`.
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
from manyhands.parallel.model.tensor_shard import TensorShard
from manyhands.parallel.replicas.fingerprint import digest

__all__ = ["GatheredState", "WholeState"]

MODEL, OPTIMIZER = "model/", "training/optimizer"
STATE = f"{OPTIMIZER}/state/"
"""Prefixes of tensor names, as in a checkpoint."""


class _WorkerTensors(msgspec.Struct):
    """The tensors and the optimizer state that one worker has."""

    tensors: list[tuple[str, str, TensorShard]]
    """Name, dtype, and which shard of the complete tensor it is."""
    optimizer: Any
    """Optimizer state, with references to those tensors."""


class GatheredState(NamedTuple):
    """The state of all workers, announced without values; or the state of one worker."""

    weights: dict[str, Tensor]
    aliases: dict[str, str]
    extra: dict[str, Any]
    optimizer: dict[str, Any]


class WholeState:
    """The complete state of a model that is about to be partitioned, by name. `divided` sets which shards are here."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._names = {id(param): plain_name(name) for name, param in model.named_parameters()}
        weights, self._aliases, self._extra = model_state(model)
        self._like = {name: torch.empty_like(one, device="meta") for name, one in weights.items()}
        self._groups = [[self._names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
        self._shards: Mapping[str, TensorShard] = {}
        self._present: frozenset[str] = frozenset()
        self._layouts: list[_WorkerTensors] = []

    def divided(self, shares: Mapping[str, TensorShard], present: frozenset[str] | None) -> None:
        """`present`: names of the tensors of which this worker has any (None: all); `shares`: shards, where sharded."""
        self._shards = {plain_name(name): shard for name, shard in shares.items()}
        all_names = (*self._like, *self._aliases)
        self._present = frozenset(all_names if present is None else map(plain_name, present))

    def placement(self) -> dict[str, TensorShard]:
        """The tensors on this worker, and which shard of each."""
        return {
            name: self._shards.get(name, TensorShard(tuple(self._like[name].shape)))
            for name in self._like
            if name in self._present
        }

    def like(self) -> dict[str, Tensor]:
        """The tensors of the complete model, without values."""
        return self._like

    def exchange_layout(self, axis: Axis) -> None:
        """Exchange which rank has which tensors. Call it on all ranks before each `gathered` and `gather_tensors`."""
        packed = pack(optimizer_state(self._optimizer, self._names), OPTIMIZER, mine := self._weights())
        self._layouts = self._exchange(axis, mine, packed)

    def gathered(self) -> GatheredState:
        """The state of all ranks, without values; after `exchange_layout`, on rank 0."""
        whole = {
            name: announced(shard.shape, getattr(torch, dtype))
            for one in self._layouts
            for name, dtype, shard in one.tensors
        }
        weights = {name: whole[MODEL + name] for name in self._like}
        return GatheredState(weights, self._aliases, self._extra, self._merged(whole))

    @property
    def names(self) -> frozenset[str]:
        """The tensors that `gather_tensors` sends; after `exchange_layout`."""
        return frozenset(_names(self._layouts))

    def gather_tensors(self, axis: Axis, order: Sequence[str], give: Callable[[str, Tensor], None]) -> None:
        """Send complete tensors to rank 0 of `axis`, in its `order`. Call it on all ranks, after `exchange_layout`."""
        mine = self._weights()
        pack(optimizer_state(self._optimizer, self._names), OPTIMIZER, mine)
        _gather_tensors(axis, self._layouts, mine, order, give)

    def hashes(self, axis: Axis) -> list[dict[tuple[str, TensorShard], int]]:
        """Hashes of the tensors of each rank, by name and shard. Call it on all ranks."""
        pack(optimizer_state(self._optimizer, self._names), OPTIMIZER, mine := self._weights())
        digests = [(name, self._shard_of(name, one), digest(one)) for name, one in mine.items()]
        gathered = axis.all_gather_bytes("hashes of shards", msgspec.msgpack.encode(digests))
        known = (msgspec.msgpack.decode(each, type=list[tuple[str, TensorShard, int]]) for each in gathered)
        return [{(name, shard): number for name, shard, number in each} for each in known]

    def weights(self, axis: Axis) -> dict[str, Tensor]:
        """The state_dict of the complete model, on rank 0. Call it on all ranks."""
        found = self._all(axis, self._weights())
        tied = {name: found[first] for name, first in self._aliases.items()} if found else {}
        return {**found, **tied, **self._extra} if found else {}

    def gradients(self, axis: Axis) -> dict[str, Tensor]:
        """The complete gradients that the last step left in `.grad`, on rank 0. Call it on all ranks."""
        params = [one for group in self._optimizer.param_groups for one in group["params"] if one.grad is not None]
        return self._all(axis, {MODEL + self._names[id(param)]: param.grad.detach() for param in params})

    def _all(self, axis: Axis, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        layouts = self._exchange(axis, mine, None)
        found: dict[str, Tensor] = {}
        _gather_tensors(axis, layouts, mine, list(dict.fromkeys(_names(layouts))), found.__setitem__)
        return {name.removeprefix(MODEL): one for name, one in found.items()}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this worker's shards of complete tensors into its weights."""
        self.load_tensors((MODEL + name, value) for name, value in weights)

    def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Take this worker's shards of a checkpoint's complete tensors: copy the weights in place, return the others.

        Optimizer state of weights that only other workers have is empty.
        """
        here: dict[str, list[Tensor]] = {}
        for name, one in self._local():
            here.setdefault(self._aliases.get(name, name), []).append(one)
        kept: dict[str, Tensor] = {}
        for name, value in tensors:
            weight, mine = _weight_of(name), here.get(_weight_of(name), ())
            if not name.startswith(MODEL):
                is_elsewhere = name.startswith(STATE) and not mine
                kept[name] = value.new_empty(0) if is_elsewhere else self._local_shard(weight, value)
            elif mine:
                part = self._local_shard(weight, value)
                for one in mine:
                    one.copy_(part)
        return kept

    def local_state(self) -> GatheredState:
        """The state of this worker, for another one with the same part of the model."""
        return GatheredState(dict(self._local()), {}, self._extra, optimizer_state(self._optimizer, self._names))

    def load_local(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the weights of a worker with the same part of the model."""
        for name, mine in self._local():
            mine.copy_(tensors[MODEL + name])

    def local_optimizer_state(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """The optimizer state of this worker's weights, out of the complete one."""
        here = {self._names[id(param)] for group in self._optimizer.param_groups for param in group["params"]}
        states = {name: values for name, values in optimizer["state"].items() if name in here}
        groups = [
            {**group, "params": [name for name in group["params"] if name in here]}
            for group in optimizer["param_groups"]
        ]
        return {"state": states, "param_groups": groups}

    def _local_shard(self, weight: str, value: Tensor) -> Tensor:
        """This worker's shard of a weight, or of optimizer state with the shape of the weight."""
        shard = self._shards.get(weight)
        return shard.cut(value) if shard is not None and shard.fits(value) else value

    def _local(self) -> Iterator[tuple[str, Tensor]]:
        for key, one in self._model.state_dict().items():
            name = plain_name(key)
            if name in self._present and isinstance(one, Tensor):
                yield name, one.detach()

    def _weights(self) -> dict[str, Tensor]:
        """The weights on this worker, tied ones once."""
        return {MODEL + name: one for name, one in self._local() if name not in self._aliases}

    def _exchange(self, axis: Axis, mine: Mapping[str, Tensor], packed: Any) -> list[_WorkerTensors]:
        """Exchange what each rank has, by rank."""
        tensors = [
            (name, str(one.dtype).removeprefix("torch."), self._shard_of(name, one)) for name, one in mine.items()
        ]
        data = msgspec.msgpack.encode(_WorkerTensors(tensors, packed))
        return [msgspec.msgpack.decode(each, type=_WorkerTensors) for each in axis.all_gather_bytes("layout", data)]

    def _shard_of(self, name: str, tensor: Tensor) -> TensorShard:
        """The shard of a weight, or of optimizer state with the local shape of its weight."""
        shard = self._shards.get(_weight_of(name))
        fits = shard is not None and tuple(tensor.shape) == shard.local_shape
        return shard if shard is not None and fits else TensorShard(tuple(tensor.shape))

    def _merged(self, whole: Mapping[str, Tensor]) -> dict[str, Any]:
        """The optimizer state of all parameters, with the chief's settings of the parameter groups."""
        optimizers = [unpack(one.optimizer, whole) for one in self._layouts]
        states = {name: values for one in reversed(optimizers) for name, values in one["state"].items()}
        groups = zip(optimizers[0]["param_groups"], self._groups, strict=True)
        return {"state": states, "param_groups": [{**group, "params": names} for group, names in groups]}


def _weight_of(name: str) -> str:
    """The weight's name, from the name of the weight or of its optimizer state in a checkpoint."""
    if name.startswith(MODEL):
        return name.removeprefix(MODEL)
    return name.removeprefix(STATE).rpartition("/")[0]


def _names(layouts: Sequence[_WorkerTensors]) -> Iterator[str]:
    return (name for one in layouts for name, _, _ in one.tensors)


def _gather_tensors(
    axis: Axis,
    layouts: Sequence[_WorkerTensors],
    mine: Mapping[str, Tensor],
    order: Sequence[str],
    give: Callable[[str, Tensor], None],
) -> None:
    wanted = axis.all_gather_bytes("order of the tensors", msgspec.msgpack.encode(order) if axis.rank == 0 else b"")[0]
    sources = _shard_sources(layouts)
    for number, name in enumerate(msgspec.msgpack.decode(wanted, type=list[str])):
        if axis.rank == 0:
            give(name, _receive(axis, number, name, mine, sources[name]))
        elif any(source.rank == axis.rank for source in sources[name]) and mine[name].numel():
            raw = mine[name].contiguous().cpu().view(-1).view(torch.uint8)
            axis.send_start(raw, 0, number, f"{name} to the chief").wait()


class _ShardSource(NamedTuple):
    rank: int
    dtype: torch.dtype
    shard: TensorShard


def _shard_sources(layouts: Sequence[_WorkerTensors]) -> dict[str, list[_ShardSource]]:
    """Each shard of each tensor once, from the first worker that has it."""
    found: dict[str, dict[TensorShard, _ShardSource]] = {}
    for rank, one in enumerate(layouts):
        for name, dtype, shard in one.tensors:
            found.setdefault(name, {}).setdefault(shard, _ShardSource(rank, getattr(torch, dtype), shard))
    return {name: list(sources.values()) for name, sources in found.items()}


def _receive(axis: Axis, number: int, name: str, mine: Mapping[str, Tensor], sources: Sequence[_ShardSource]) -> Tensor:
    whole: Tensor | None = None
    for rank, dtype, shard in sources:
        part = mine[name] if rank == 0 else torch.empty(shard.local_shape, dtype=dtype)
        if rank and part.numel():
            raw = part.view(-1).view(torch.uint8)
            axis.receive_start(raw, rank, number, f"{name} from rank {rank}").wait()
        if shard.is_whole:
            return part
        whole = torch.empty(shard.shape, dtype=dtype) if whole is None else whole
        shard.paste_(whole, part)
    assert whole is not None, f"no rank has {name}"
    return whole
