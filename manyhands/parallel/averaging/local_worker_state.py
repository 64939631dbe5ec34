"""The state that differs between workers of local SGD, packed to bytes and back: weights, buffers, optimizer state.

The bytes contain no code: tensors are safetensors, numbers are msgpack. Optimizer state is tensors and numbers per
parameter; an optimizer that keeps anything else is refused before the first step. Start reading at `LocalWorkerState`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.optim import Optimizer

from manyhands.comm.axis import Axis
from manyhands.errors import SpecError
from manyhands.parallel.averaging.combine_ranks import to_first_rank

__all__ = [
    "LocalWorkerState",
    "check_optimizer",
    "gather_states",
    "load_optimizer",
    "mean_of_weights",
    "states_of_optimizer",
]

_PLAIN = (bool, int, float, str, type(None))
States = dict[int, dict[str, Any]]
"""By the parameter's index in the optimizer."""


class _Bytes(msgspec.Struct):
    tensors: bytes
    numbers: dict[str, Any]
    extra: dict[str, Any]


class LocalWorkerState(msgspec.Struct):
    weights: list[Tensor]
    """Weights and buffers, in the model's order; empty if all workers have the same ones."""
    optimizer: States
    extra: dict[str, Any] = {}

    def pack(self) -> bytes:
        tensors = {f"w/{index}": one.detach().cpu().contiguous() for index, one in enumerate(self.weights)}
        numbers: dict[str, Any] = {}
        for index, values in self.optimizer.items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"o/{index}/{name}"] = value.detach().cpu().contiguous()
                else:
                    numbers[f"{index}/{name}"] = value
        return msgspec.msgpack.encode(_Bytes(save(tensors), numbers, self.extra))

    @classmethod
    def unpack(cls, data: bytes) -> LocalWorkerState:
        packed = msgspec.msgpack.decode(data, type=_Bytes)
        tensors = load(packed.tensors)
        weights = {int(name[2:]): one for name, one in tensors.items() if name.startswith("w/")}
        values = {name[2:]: one for name, one in tensors.items() if name.startswith("o/")} | packed.numbers
        states: States = {}
        for name, value in sorted(values.items()):
            index, _, key = name.partition("/")
            states.setdefault(int(index), {})[key] = value
        return cls([weights[index] for index in sorted(weights)], dict(sorted(states.items())), packed.extra)

    def tree(self) -> dict[str, Any]:
        """The state as a checkpoint stores it."""
        return {"weights": self.weights, "optimizer": self.optimizer, "extra": self.extra}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> LocalWorkerState:
        return cls(list(tree["weights"]), dict(tree["optimizer"]), dict(tree["extra"]))


def gather_states(own: LocalWorkerState, axis: Axis) -> list[LocalWorkerState]:
    """The states of all ranks, on rank 0; the other ranks get an empty list."""
    return [LocalWorkerState.unpack(data) for data in to_first_rank(own.pack(), axis, "state of each worker")]


def mean_of_weights(states: Sequence[LocalWorkerState]) -> list[Tensor]:
    """The mean over the workers, for a run that resumes with another number of them.

    Tensors that are not floating point are taken from the first worker.
    """
    columns = zip(*(state.weights for state in states), strict=True)
    return [
        torch.stack([one.double() for one in column]).mean(0).to(column[0].dtype)
        if column[0].is_floating_point()
        else column[0]
        for column in columns
    ]


def states_of_optimizer(optimizer: Optimizer) -> States:
    states: States = optimizer.state_dict()["state"]
    return states


def load_optimizer(optimizer: Optimizer, states: States) -> None:
    """Load only the state of the parameters; settings such as the learning rate stay as they are."""
    own = {index: {name: _copied(value) for name, value in values.items()} for index, values in states.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": own})


def check_optimizer(optimizer: Optimizer) -> None:
    values_kept = [value for values in states_of_optimizer(optimizer).values() for value in values.values()]
    unsupported = next((value for value in values_kept if not isinstance(value, (Tensor, *_PLAIN))), None)
    if isinstance(optimizer, torch.optim.LBFGS) or unsupported is not None:
        keeps = type(unsupported).__name__ if unsupported is not None else "list"
        raise SpecError(
            f"Local SGD sends optimizer state between workers, and can send tensors and numbers only: "
            f"{type(optimizer).__name__} keeps a {keeps}.",
            where="mh.LocalSGD",
            fix=["SGD, AdamW, or any other optimizer that keeps tensors and numbers", 'strategy="mirrored"'],
        )


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
