"""Parameters, gradients and optimizer state sharded over the ranks: torch's `fully_shard`, behind a `ReplicaBackend`.

Between steps every `nn.Parameter` is the user's object, whose values are this rank's shard (`shares` says which);
optimizers, checkpoints and the fused update see nothing else. During a step torch replaces them by whole parameters,
block by block. Start reading at `FsdpBackend.divide`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from manyhands.comm.axis import Axis
from manyhands.errors import TrainingFailed
from manyhands.parallel.gradients.reduce_scatter_sum import FsdpSum, Gathering, GroupSum
from manyhands.parallel.model.layer_blocks import blocks_of
from manyhands.parallel.model.tensor_shard import TensorShard, even_ranges
from manyhands.parallel.sharding.placeholder_group import formal_mesh
from manyhands.parallel.sharding.sharded_backend import ShardedBackend
from manyhands.parallel.sharding.sharded_update import ShardedUpdate, check_dividable, cut_states_, stays_whole
from manyhands.parallel.tensor.layers import ParallelLayer, at_home, class_of, return_wholes_
from manyhands.parallel.tensor.whole_parameters import is_users_code

__all__ = ["FsdpBackend", "Sharding"]


class Sharding(NamedTuple):
    """How a model is sharded."""

    keep_whole: bool
    """Whether parameters stay whole from their first use in a step to their last; else they are gathered per use."""
    offload: bool = False
    """Whether shards are kept in the host's memory; for accelerators."""


class _Location(NamedTuple):
    """A module that has a parameter, and the parameter's name there."""

    module: nn.Module
    name: str


class _ShardedParameter(NamedTuple):
    """A user's parameter, the sharded parameter that replaces it in torch, and its locations."""

    name: str
    param: nn.Parameter
    sharded: nn.Parameter
    locations: list[_Location]
    share: TensorShard


class _ParameterGuard:
    """Mixed into the class of a module whose parameters are shards: a user's sum over shards would be wrong."""

    _ids_of_parts: frozenset[int] = frozenset()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for name, param in super().named_parameters(*args, **kwargs):  # type: ignore[misc]
            here = getattr(param, "part", param)
            if is_users_code() and (isinstance(here, DTensor) or id(here) in self._ids_of_parts):
                raise TrainingFailed(
                    f"The loss reads the model's parameters, but each worker has only a shard of {name}.",
                    fix=["weight_decay=, of the optimizer", 'mh.Sharded("optimizer"), whose workers see whole weights'],
                )
            yield name, param


class FsdpBackend(ShardedBackend):
    """Whole parameters block by block, while a pass is in the block."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        axis: Axis,
        network: Callable[[], Axis],
        sharding: Sharding,
        *,
        device: torch.device,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(model, optimizer, axis, network, warn=warn)
        self._sharding, self._device = sharding, device
        self._modules: list[FSDPModule] = []
        self._parts: list[_ShardedParameter] = []

    @property
    def shares(self) -> dict[int, TensorShard]:
        return {id(part.param): part.share for part in self._parts}

    @property
    def divided_frozen(self) -> tuple[Tensor, ...]:
        return tuple(part.param for part in self._parts if not part.param.requires_grad)

    def divide(self) -> None:
        """Give each rank its shard. All ranks have the same values before; later calls only check `requires_grad`."""
        if self._parts:
            self._check_unchanged()
            return
        self._check()
        for param in self._model.parameters():
            param.data = param.data.contiguous()  # torch requires it
        locations = _locations_of(self._model)
        left_whole = {param for param in self._model.parameters() if stays_whole(param)}
        wholes = {id(param): (name, param) for name, param in self._model.named_parameters()}
        shapes = {key: tuple(param.shape) for key, (_, param) in wholes.items()}
        for module in self._model.modules():
            module.__class__ = class_of(_ParameterGuard, type(module))  # type: ignore[arg-type]
        with formal_mesh(self._axis.rank, self._axis.size, self._device) as mesh, at_home(self._model):
            names = self._shard(mesh, left_whole)
        for key, (name, param) in wholes.items():
            if param not in left_whole:
                self._parts.append(self._take(name, param, locations[key], shapes[key]))
        for module in self._model.modules():
            module._ids_of_parts = frozenset(self.shares)  # type: ignore[assignment]
        cut_states_(self._optimizer, self.shares)
        with at_home(self._model):
            self._connect(names)
        self.rest()

    def _shard(self, mesh: DeviceMesh, left_whole: set[nn.Parameter]) -> list[str]:
        policy = CPUOffloadPolicy() if self._sharding.offload else OffloadPolicy()
        blocks = {name: one for name, one in blocks_of(self._model).items() if set(one.parameters()) - left_whole}
        if any(isinstance(module, ParallelLayer) for module in self._model.modules()):
            for module in (*blocks.values(), self._model):
                return_wholes_(module)  # before torch's hook, which waits for the gradient of the module's output
        for block in blocks.values():
            reshard = not self._sharding.keep_whole
            fully_shard(
                block, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy, ignored_params=left_whole
            )
        # Parameters outside of blocks are used first and last, so resharding them in between would save nothing.
        fully_shard(
            self._model, mesh=mesh, reshard_after_forward=False, offload_policy=policy, ignored_params=left_whole
        )
        self._modules = [one for one in (*blocks.values(), self._model) if isinstance(one, FSDPModule)]
        return [*blocks, "the rest of the model"]

    def _take(
        self, name: str, param: nn.Parameter, locations: list[_Location], shape: tuple[int, ...]
    ) -> _ShardedParameter:
        """Make the user's parameter share memory with torch's sharded one."""
        sharded = locations[0].module._parameters[locations[0].name]
        assert isinstance(sharded, nn.Parameter) and isinstance(sharded, DTensor)
        param.data = sharded.to_local().detach()
        start, stop = even_ranges(shape[0], self._axis.size)[self._axis.rank]
        return _ShardedParameter(name, param, sharded, locations, TensorShard(shape, ((0, ((start, stop),)),)))

    def _connect(self, names: list[str]) -> None:
        """Make torch communicate over our axis, and sum gradients along the slice tree."""
        trained = [part for part in self._parts if part.param.requires_grad]
        gradients = FsdpSum([part.param for part in trained], self._axis, self._network)
        gradients.sharded = [part.sharded for part in trained]
        for name, module in zip(names, self._modules, strict=True):
            group = GroupSum(gradients, name)
            gradients.groups.append(group)
            module.set_custom_all_gather(Gathering(self._axis, name))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(group)  # type: ignore[arg-type]
            module.set_gradient_divide_factor(1.0)  # slices are weighted already
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True, recurse=False)
        self._record_uses(gradients, trained)
        # Torch reads all parameters once, and would otherwise do so in the middle of the user's loss.
        self._modules[-1]._get_fsdp_state()._lazy_init()
        self.sum, self.weights = gradients, ShardedUpdate(gradients.params, self._optimizer, self._axis)

    def _record_uses(self, gradients: FsdpSum, trained: list[_ShardedParameter]) -> None:
        """Record which parameters had a gradient: torch sends zeros for those that had none."""
        waiting = dict(enumerate(trained))
        for module in self._modules:
            module.unshard()
            for index, part in list(waiting.items()):
                whole = part.locations[0].module._parameters[part.locations[0].name]
                if whole is not None and not isinstance(whole, DTensor):
                    whole.register_post_accumulate_grad_hook(_adder(gradients.used, index))  # type: ignore[no-untyped-call]
                    del waiting[index]
            module.reshard()
        assert not waiting

    def before_pass(self) -> None:
        """Called before a forward and a backward pass."""
        if self._sharding.keep_whole:
            assert isinstance(self.sum, FsdpSum)
            for module in self._modules:
                module.set_reshard_after_backward(self.sum.is_last_pass, recurse=False)

    def rest(self) -> None:
        """Put the user's parameters, with this rank's shards, back into the model."""
        for module in self._modules:
            module.reshard()
        for part in self._parts:
            for location in part.locations:
                location.module._parameters[location.name] = part.param

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, all parameters are whole in forward passes, and each rank may run any number of them."""
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in self._modules[:-1]:
                module.set_reshard_after_forward(not self._sharding.keep_whole, recurse=False)
            self.rest()

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Inside, parameters are whole, to read and to write; at the end rank 0's values are sharded again."""
        parts = [part.param.data for part in self._parts]
        for part in self._parts:
            part.param.data = self.gather(part.share, part.param.data)
        try:
            yield
        finally:
            wholes = [part.param.data for part in self._parts]
            self._axis.broadcast_(wholes, "weights of rank 0")
            for part, mine, whole in zip(self._parts, parts, wholes, strict=True):
                part.param.data = mine.copy_(part.share.cut(whole))

    def _check(self) -> None:
        check_dividable(self._model, self._optimizer)
        dtypes = {param.dtype for param in self._model.parameters() if param.requires_grad}
        if len(dtypes) > 1:
            raise TrainingFailed(
                f"Parameters of {', '.join(sorted(map(str, dtypes)))} cannot be sharded together.",
                fix=["model.float()", 'precision="bf16", for faster forward passes'],
            )

    def _check_unchanged(self) -> None:
        for part in self._parts:
            if part.param.requires_grad != part.sharded.requires_grad:
                raise TrainingFailed(
                    f"{part.name} was {'frozen' if part.sharded.requires_grad else 'unfrozen'} after the model was "
                    "sharded.",
                    fix=["requires_grad_(...) before Trainer(...)", 'strategy="mirrored"'],
                )


def _adder(used: set[int], index: int) -> Callable[[Tensor], None]:
    return lambda _: used.add(index)


def _locations_of(model: nn.Module) -> dict[int, list[_Location]]:
    """The locations of each parameter; a tied one has several."""
    found: dict[int, list[_Location]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                found.setdefault(id(param), []).append(_Location(module, name))
    return found
