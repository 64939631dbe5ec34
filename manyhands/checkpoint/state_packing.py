"""Training state as tensors and plain values, and back.

`pack` separates any tree of dicts, lists, tuples, tensors and plain values: tensors get names, the rest becomes JSON.
`unpack` is its inverse. The state of optimizers, schedulers and hooks is packed here, so nothing is ever pickled.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.checkpoint.tensor_names import own_names, plain_name
from manyhands.errors import CheckpointSaveFailed

__all__ = [
    "load_model_state",
    "model_state",
    "optimizer_state",
    "pack",
    "restore_optimizer",
    "restore_rng",
    "rng_state",
    "unpack",
]

_PLAIN = (str, int, float, bool, type(None))


def pack(tree: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """The tree with tensors replaced by references; the tensors are added to `tensors` under names below `prefix`."""
    if isinstance(tree, Tensor):
        tensors[prefix] = tree.detach()
        return {"$tensor": prefix}
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, np.ndarray):
        tensors[prefix] = torch.from_numpy(tree.copy())
        return {"$array": prefix}
    if isinstance(tree, _PLAIN):
        return {"$float": repr(tree)} if isinstance(tree, float) and not np.isfinite(tree) else tree
    if isinstance(tree, Mapping):
        items = [[key, pack(value, f"{prefix}/{key}", tensors)] for key, value in tree.items()]
        kind = "$counter" if isinstance(tree, Counter) else "$dict"
        return {kind: [[_key(key, prefix), value] for key, value in items]}
    if isinstance(tree, list | tuple | set | deque):
        kind = {list: "$list", tuple: "$tuple"}.get(type(tree), "$list")
        return {kind: [pack(value, f"{prefix}/{i}", tensors) for i, value in enumerate(tree)]}
    raise CheckpointSaveFailed(
        f"{prefix} contains a {type(tree).__name__}, which cannot be saved without running code on load.",
        fix=["keep tensors, numbers, strings, lists and dicts in state() and state_dict()"],
    )


def _key(key: Any, prefix: str) -> Any:
    if not isinstance(key, str | int):
        raise CheckpointSaveFailed(
            f"{prefix} has a key of type {type(key).__name__}; only strings and integers are saved."
        )
    return key


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    match kind:
        case "$tensor":
            return tensors[value]
        case "$array":
            return tensors[value].numpy()
        case "$float":
            return float(value)
        case "$dict":
            return {key: unpack(item, tensors) for key, item in value}
        case "$counter":
            return Counter({key: unpack(item, tensors) for key, item in value})
        case "$tuple":
            return tuple(unpack(item, tensors) for item in value)
        case _:
            return [unpack(item, tensors) for item in value]


def model_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """A model's tensors without duplicates, further names for them (tied weights), and state that is no tensor.

    Names are plain ones: the same for a compiled and an uncompiled model.
    """
    weights: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    extra: dict[str, Any] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for own, value in model.state_dict().items():
        name = plain_name(own)
        if not isinstance(value, Tensor):
            extra[name] = value
            continue
        storage = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (name,)
        first = seen.setdefault(storage, name)
        if first == name:
            weights[name] = value.detach()
        else:
            aliases[name] = first
    return weights, aliases, extra


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """`load_state_dict` that works whether or not the model, or the saved one, is compiled."""
    own = own_names(model.state_dict())
    model.load_state_dict({own.get(plain_name(name), name): value for name, value in state.items()})


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The optimizer's state by parameter name (`names` by the parameter's id), so that it loads in any layout."""
    state = optimizer.state_dict()
    position = _positions(optimizer)
    by_name = {_name(position[index], names): values for index, values in state["state"].items()}
    groups = [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "params": [_name(position[i], names) for i in group["params"]],
        }
        for group in state["param_groups"]
    ]
    return {"state": by_name, "param_groups": groups}


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], names: Mapping[int, str]) -> None:
    index_of = {_name(param, names): index for index, param in _positions(optimizer).items()}
    groups = [
        {**group, "params": [index_of[plain_name(name)] for name in group["params"]]} for group in saved["param_groups"]
    ]
    # load_state_dict keeps the objects it is given; copies, so that training does not change what was loaded.
    state = {index_of[plain_name(n)]: {k: _copy(v) for k, v in values.items()} for n, values in saved["state"].items()}
    optimizer.load_state_dict({"state": OrderedDict(state), "param_groups": groups})


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _positions(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return dict(enumerate(params))


def _name(param: Tensor, names: Mapping[int, str]) -> str:
    return names.get(id(param), f"?{tuple(param.shape)}")


def rng_state() -> dict[str, Any]:
    """The generators for code outside of slices; inside, randomness is keyed by (seed, step, slice)."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "internal": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }


def restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    saved = state["numpy"]
    keys = saved["keys"].numpy().astype(np.uint32)
    np.random.set_state((saved["kind"], keys, saved["position"], saved["has_gauss"], saved["cached"]))
