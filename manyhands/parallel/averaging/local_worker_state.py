"""What a worker that trains weights of its own has to itself, as bytes and back: weights, buffers, optimizer states.

No code travels: tensors as safetensors, numbers as msgpack. States of an optimizer are tensors and numbers by
parameter; one that keeps anything else is refused before the first step. Start reading at `OwnState`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.optim import Optimizer

from manyhands.errors import SpecError

__all__ = ["OwnState", "check_optimizer", "load_optimizer", "mean_of_weights", "states_of_optimizer"]

_PLAIN = (bool, int, float, str, type(None))
States = dict[int, dict[str, Any]]
"""By the parameter's place in the optimizer."""


class _Bytes(msgspec.Struct):
    tensors: bytes
    numbers: dict[str, Any]
    extra: dict[str, Any]


class OwnState(msgspec.Struct):
    weights: list[Tensor]
    """Weights and buffers, in the model's order; none where all workers have the same."""
    optimizer: States
    extra: dict[str, Any] = {}

    def pack(self) -> bytes:
        tensors = {f"w/{place}": one.detach().cpu().contiguous() for place, one in enumerate(self.weights)}
        numbers: dict[str, Any] = {}
        for place, values in self.optimizer.items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"o/{place}/{name}"] = value.detach().cpu().contiguous()
                else:
                    numbers[f"{place}/{name}"] = value
        return msgspec.msgpack.encode(_Bytes(save(tensors), numbers, self.extra))

    @classmethod
    def unpack(cls, data: bytes) -> OwnState:
        packed = msgspec.msgpack.decode(data, type=_Bytes)
        tensors = load(packed.tensors)
        weights = {int(name[2:]): one for name, one in tensors.items() if name.startswith("w/")}
        values = {name[2:]: one for name, one in tensors.items() if name.startswith("o/")} | packed.numbers
        states: States = {}
        for name, value in sorted(values.items()):
            place, _, key = name.partition("/")
            states.setdefault(int(place), {})[key] = value
        return cls([weights[place] for place in sorted(weights)], dict(sorted(states.items())), packed.extra)

    def tree(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"weights": self.weights, "optimizer": self.optimizer, "extra": self.extra}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> OwnState:
        return cls(list(tree["weights"]), dict(tree["optimizer"]), dict(tree["extra"]))


def mean_of_weights(states: Sequence[OwnState]) -> list[Tensor]:
    """For workers that are more, or fewer, than those whose states these are. What is no number is the first one's."""
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
    """The states alone: settings such as the learning rate stay as they are."""
    own = {place: {name: _copied(value) for name, value in values.items()} for place, values in states.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": own})


def check_optimizer(optimizer: Optimizer) -> None:
    kept = [value for values in states_of_optimizer(optimizer).values() for value in values.values()]
    strange = next((value for value in kept if not isinstance(value, (Tensor, *_PLAIN))), None)
    if isinstance(optimizer, torch.optim.LBFGS) or strange is not None:
        keeps = type(strange).__name__ if strange is not None else "list"
        raise SpecError(
            f"Workers that train weights of their own tell each other their optimizers' states, and "
            f"{type(optimizer).__name__} keeps a {keeps}.",
            where="mh.LocalSGD",
            fix=["SGD, AdamW, or any other that keeps tensors and numbers", 'strategy="mirrored"'],
        )


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
