"""Parameters, gradients and optimizer's states divided over the ranks: torch's `fully_shard`, behind a `Holding`.

Between steps every `nn.Parameter` is the user's own object, whose values are this rank's part (`shares` says which);
optimizers, checkpoints and the fused update see nothing else. During a step torch puts whole parameters in their
place, block by block. Start reading at `FullyShardedHolding.divide`.
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
from manyhands.parallel.gradients.reduce_scatter_sum import Gathering, GroupSum, ShardedSum
from manyhands.parallel.model.layer_blocks import blocks_of
from manyhands.parallel.model.tensor_shard import Share, even_ranges
from manyhands.parallel.sharding.placeholder_group import formal_mesh
from manyhands.parallel.sharding.sharded_update import ShardedUpdate, check_dividable, cut_states_, stays_whole
from manyhands.parallel.tensor.layers import Divided, at_home, class_of, return_wholes_
from manyhands.parallel.tensor.whole_parameters import is_users_code
from manyhands.parallel.weights.replica_backend import Holding

__all__ = ["FullyShardedHolding", "Sharding"]


class Sharding(NamedTuple):
    """How a model is divided."""

    keep_whole: bool
    """Parameters stay whole from a step's first use of them to its last; else they are gathered for each use."""
    offload: bool = False
    """Parts wait in the host's memory; for accelerators."""


class _Place(NamedTuple):
    """One of the modules that have a parameter, and its name there."""

    module: nn.Module
    name: str


class _Part(NamedTuple):
    """A parameter of the user's, what torch has in its place, and where."""

    name: str
    param: nn.Parameter
    sharded: nn.Parameter
    places: list[_Place]
    share: Share


class _InParts:
    """Of a module whose parameters are parts, to be mixed into its class: a sum over parts is no sum over wholes."""

    _ids_of_parts: frozenset[int] = frozenset()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for name, param in super().named_parameters(*args, **kwargs):  # type: ignore[misc]
            here = getattr(param, "part", param)
            if is_users_code() and (isinstance(here, DTensor) or id(here) in self._ids_of_parts):
                raise TrainingFailed(
                    f"The loss asks for the model's parameters, and of {name} each worker has a part.",
                    fix=["weight_decay=, of the optimizer", 'mh.Sharded("optimizer"), whose workers see whole weights'],
                )
            yield name, param


class FullyShardedHolding(Holding):
    """Of one model and its optimizer. Frozen parameters are divided, too, unless they are small."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        axis: Axis,
        network: Callable[[], Axis],
        sharding: Sharding,
        *,
        device: torch.device,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(model, optimizer, axis, None, network, None, bucket_bytes=0, check_every=0, tell=tell)
        self._sharding, self._device = sharding, device
        self._modules: list[FSDPModule] = []
        self._parts: list[_Part] = []

    @property
    def shares(self) -> dict[int, Share]:
        """Which part of each parameter this rank has, by the parameter's id; those that are not there are whole."""
        return {id(part.param): part.share for part in self._parts}

    @property
    def divided_frozen(self) -> tuple[Tensor, ...]:
        return tuple(part.param for part in self._parts if not part.param.requires_grad)

    def divide(self) -> None:
        """Give each rank its part. All ranks have the same values before; once it is done it stays so."""
        if self._parts:
            self._check_unchanged()
            return
        self._check()
        for param in self._model.parameters():
            param.data = param.data.contiguous()  # torch divides nothing else
        places = _places_of(self._model)
        left_whole = {param for param in self._model.parameters() if stays_whole(param)}
        wholes = {id(param): (name, param) for name, param in self._model.named_parameters()}
        shapes = {key: tuple(param.shape) for key, (_, param) in wholes.items()}
        for module in self._model.modules():
            module.__class__ = class_of(_InParts, type(module))  # type: ignore[arg-type]
        with formal_mesh(self._axis.rank, self._axis.size, self._device) as mesh, at_home(self._model):
            names = self._shard(mesh, left_whole)
        for key, (name, param) in wholes.items():
            if param not in left_whole:
                self._parts.append(self._take(name, param, places[key], shapes[key]))
        for module in self._model.modules():
            module._ids_of_parts = frozenset(self.shares)  # type: ignore[assignment]
        cut_states_(self._optimizer, self.shares)
        with at_home(self._model):
            self._connect(names)
        self.rest()

    def _shard(self, mesh: DeviceMesh, left_whole: set[nn.Parameter]) -> list[str]:
        policy = CPUOffloadPolicy() if self._sharding.offload else OffloadPolicy()
        blocks = {name: one for name, one in blocks_of(self._model).items() if set(one.parameters()) - left_whole}
        if any(isinstance(module, Divided) for module in self._model.modules()):
            for module in (*blocks.values(), self._model):
                return_wholes_(module)  # before torch's own hook, which waits for the gradient of what it returns
        for block in blocks.values():
            again = not self._sharding.keep_whole
            fully_shard(block, mesh=mesh, reshard_after_forward=again, offload_policy=policy, ignored_params=left_whole)
        # What is outside of blocks is used first and last, so there is no point in letting go of it in between.
        fully_shard(
            self._model, mesh=mesh, reshard_after_forward=False, offload_policy=policy, ignored_params=left_whole
        )
        self._modules = [one for one in (*blocks.values(), self._model) if isinstance(one, FSDPModule)]
        return [*blocks, "the rest of the model"]

    def _take(self, name: str, param: nn.Parameter, places: list[_Place], shape: tuple[int, ...]) -> _Part:
        """Have the user's own object look at what torch has in its place."""
        sharded = places[0].module._parameters[places[0].name]
        assert isinstance(sharded, nn.Parameter) and isinstance(sharded, DTensor)
        param.data = sharded.to_local().detach()
        start, stop = even_ranges(shape[0], self._axis.size)[self._axis.rank]
        return _Part(name, param, sharded, places, Share(shape, ((0, ((start, stop),)),)))

    def _connect(self, names: list[str]) -> None:
        """Have gradients and parameters travel over our axis, and sums follow the slice tree."""
        trained = [part for part in self._parts if part.param.requires_grad]
        gradients = ShardedSum([part.param for part in trained], self._axis, self._network)
        gradients.sharded = [part.sharded for part in trained]
        for name, module in zip(names, self._modules, strict=True):
            group = GroupSum(gradients, name)
            gradients.groups.append(group)
            module.set_custom_all_gather(Gathering(self._axis, name))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(group)  # type: ignore[arg-type]
            module.set_gradient_divide_factor(1.0)  # slices are weighted already
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True, recurse=False)
        self._note_uses(gradients, trained)
        # Torch looks at all parameters once, and would do so in the middle of the user's loss.
        self._modules[-1]._get_fsdp_state()._lazy_init()
        self.sum, self.weights = gradients, ShardedUpdate(gradients, self._optimizer, self._axis)

    def _note_uses(self, gradients: ShardedSum, trained: list[_Part]) -> None:
        """Torch sends zeros for a parameter that has no gradient; who had one is for us to know."""
        waiting = dict(enumerate(trained))
        for module in self._modules:
            module.unshard()
            for place, part in list(waiting.items()):
                whole = part.places[0].module._parameters[part.places[0].name]
                if whole is not None and not isinstance(whole, DTensor):
                    whole.register_post_accumulate_grad_hook(_adder(gradients.used, place))  # type: ignore[no-untyped-call]
                    del waiting[place]
            module.reshard()
        assert not waiting

    def before_step(self) -> None:
        """Blocks come and go with the passes."""

    def before_pass(self) -> None:
        """A forward and a backward pass follow."""
        if self._sharding.keep_whole:
            assert isinstance(self.sum, ShardedSum)
            for module in self._modules:
                module.set_reshard_after_backward(self.sum.is_last_pass, recurse=False)

    def rest(self) -> None:
        """The user's own parameters, with this rank's parts, are the model's again."""
        for module in self._modules:
            module.reshard()
        for part in self._parts:
            for place in part.places:
                place.module._parameters[place.name] = part.param

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, forward passes find all parameters whole, and ranks may run as many of them as they like."""
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
    def whole_weights(self) -> Iterator[None]:
        """Inside, parameters have their whole values, to read and to write; rank 0's are divided again at the end."""
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

    def gather(self, share: Share, mine: Tensor) -> Tensor:
        """The whole of what ranks have parts of, on each of them."""
        rows = -(-share.shape[0] // self._axis.size)
        padded = mine.new_zeros(rows, *share.shape[1:])
        padded[: len(mine)].copy_(mine)
        whole = mine.new_empty(rows * self._axis.size, *share.shape[1:])
        self._axis.all_gather_start(whole.view(-1), padded.view(-1), "whole weights").wait()
        return whole[: share.shape[0]]

    def _check(self) -> None:
        check_dividable(self._model, self._optimizer)
        dtypes = {param.dtype for param in self._model.parameters() if param.requires_grad}
        if len(dtypes) > 1:
            raise TrainingFailed(
                f"Parameters of {', '.join(sorted(map(str, dtypes)))} do not travel together.",
                fix=["model.float()", 'precision="bf16", for faster forward passes'],
            )

    def _check_unchanged(self) -> None:
        for part in self._parts:
            if part.param.requires_grad != part.sharded.requires_grad:
                raise TrainingFailed(
                    f"{part.name} was {'frozen' if part.sharded.requires_grad else 'thawed'} after the model was "
                    "divided.",
                    fix=["requires_grad_(...) before Trainer(...)", 'strategy="mirrored"'],
                )

    def regroup(self, axis: Axis, sharing: Any) -> None:
        raise AssertionError("workers with parts of a model do not come and go")


def _adder(places: set[int], place: int) -> Callable[[Tensor], None]:
    return lambda _: places.add(place)


def _places_of(model: nn.Module) -> dict[int, list[_Place]]:
    """Where each parameter is; a tied one is in several places."""
    found: dict[int, list[_Place]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                found.setdefault(id(param), []).append(_Place(module, name))
    return found
