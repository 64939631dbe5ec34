"""Every private name of torch that manyhands uses: what for, and what happens if a version of torch lacks it.

torch may change or drop any of these without notice, so pyproject.toml pins the version that was tested. If there is a
substitute, it is defined below and used automatically; a strategy that needs a missing name is refused with an error
(`check_strategy_names`). `mh doctor` checks all of them (`missing`), and tests/guards/test_torch_private.py refuses a
private name in the sources that is not in `NAMES`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.errors import EnvironmentProblem

try:
    from torch.utils import _pytree as pytree
except ImportError as error:
    raise EnvironmentProblem(
        f"torch {torch.__version__} has no torch.utils._pytree, which manyhands needs.",
        fix=["pip install 'torch>=2.13,<2.14'"],
    ) from error

__all__ = [
    "BATCH_NORMS",
    "DROPOUTS",
    "NAMES",
    "PrivateName",
    "are_transforms_active",
    "check_strategy_names",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_zero_",
    "missing",
    "preserve_version_counter",
    "pytree",
    "safe_softmax",
]

ALL = ("*",)
# Features; `strategies.registry` says which strategy uses which.
GROUPS, SHARDS, LAYERS, STAGES = ("groups",), ("shards",), ("layers",), ("stages",)


class PrivateName(NamedTuple):
    name: str
    """Dotted name from torch, or an attribute of the object that `of` returns."""
    used_for: str
    needed_by: tuple[str, ...] = ()
    """Features: strategies that use one of them are refused without it. `ALL`: every strategy is."""
    instead: str = ""
    """What is used if it is missing and no strategy is refused."""
    of: Callable[[], Any] | None = None

    @property
    def is_there(self) -> bool:
        try:
            found = self.of() if self.of is not None else torch
            for part in self.name.split(".")[0 if self.of is not None else 1 :]:
                found = getattr(found, part)
        except (AttributeError, ImportError):
            return False
        return True


def _optimizer() -> Any:
    return SimpleNamespace(**torch.optim.Optimizer.__annotations__)  # creating one may load torch's compiler


def _gloo() -> Any:
    return torch.distributed.ProcessGroupGloo


def _sharded_module() -> Any:
    return importlib.import_module("torch.distributed.fsdp").FSDPModule


def _sharded_state() -> Any:
    return importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_state").FSDPState


def _loader() -> Any:
    return importlib.import_module("torch.utils.data.dataloader")


def _distributed() -> Any:
    return importlib.import_module("torch.distributed.distributed_c10d")


def _in_place() -> Any:
    return torch.ops.aten.add_.Tensor


NAMES = (
    PrivateName("torch.utils._pytree", "nested batches and outputs", ALL),
    PrivateName(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "the graph of a model that cannot be exported",
        instead="mh graph fails for such a model, and nothing else does",
    ),
    PrivateName("torch._foreach_add_", "sums of many gradients in one call", instead="a loop over tensors"),
    PrivateName("torch._foreach_copy_", "copies of many tensors in one call", instead="a loop over tensors"),
    PrivateName("torch._foreach_mul_", "clipping and loss scaling in one call", instead="a loop over tensors"),
    PrivateName("torch._foreach_zero_", "clearing many tensors in one call", instead="a loop over tensors"),
    PrivateName("torch._safe_softmax", "sharded attention with fully masked rows", instead="softmax, then zeros"),
    PrivateName(
        "torch._C._are_functorch_transforms_active",
        "a quicker backward of linear layers, outside of functorch",
        instead="torch's own backward",
    ),
    PrivateName("torch._C.DisableTorchFunctionSubclass", "sharded tensors", LAYERS),
    PrivateName("torch._C._nn", "functions on sharded tensors", LAYERS),
    PrivateName("torch.Tensor._make_wrapper_subclass", "sharded tensors", LAYERS),
    PrivateName(
        "torch.autograd.grad_mode._unsafe_preserve_version_counter", "BatchNorm's averages between microbatches", STAGES
    ),
    PrivateName("torch.nn.modules.batchnorm._BatchNorm", "finding batch statistics", instead="the public classes"),
    PrivateName("torch.nn.modules.dropout._DropoutNd", "finding dropout", instead="the public classes"),
    PrivateName(
        "torch.nn.modules.transformer._detect_is_causal_mask",
        "tracing nn.TransformerEncoder with a mask",
        instead="the trace fails where the model compares its mask, and says so",
    ),
    PrivateName("_output_padding", "sharded transposed convolutions", LAYERS, of=lambda: nn.ConvTranspose1d),
    PrivateName("_parameters", "replacing a module's parameters", ALL, of=nn.Identity),
    PrivateName("_buffers", "replacing a module's buffers", ALL, of=nn.Identity),
    PrivateName("_modules", "replacing a module's children", ALL, of=nn.Identity),
    PrivateName("_forward_hooks", "keeping modules with hooks unsharded", ALL, of=nn.Identity),
    PrivateName("_forward_pre_hooks", "keeping modules with hooks unsharded", ALL, of=nn.Identity),
    PrivateName("_backward_hooks", "keeping modules and tensors with hooks unchanged", ALL, of=nn.Identity),
    PrivateName(
        "_compiled_call_impl",
        "running sharded layers uncompiled",
        instead="layers compiled by their method compile() stay compiled",
        of=nn.Identity,
    ),
    PrivateName("_version", "whether a buffer or weight was changed in place", ALL, of=lambda: torch.zeros(1)),
    PrivateName("_is_view", "outputs that share memory with others", LAYERS, of=lambda: torch.zeros(1)),
    PrivateName("_schema", "whether an operation changes its argument", LAYERS, of=_in_place),
    PrivateName("_optimizer_step_pre_hooks", "fused updates, only without optimizer hooks", ALL, of=_optimizer),
    PrivateName("_optimizer_step_post_hooks", "fused updates, only without optimizer hooks", ALL, of=_optimizer),
    PrivateName(
        "_opt_called",
        "marking a fused update as a step for schedulers; it is set, not read",
        instead="the scheduler warns of steps in the wrong order",
        of=lambda: type("Set", (), {"_opt_called": True}),
    ),
    PrivateName("_register_fake", "tracing a model into stages", STAGES, of=lambda: torch.library.Library),
    PrivateName("_Options", "Gloo at one address", GROUPS, of=_gloo),
    PrivateName("_Options._timeout", "the timeout of collectives", GROUPS, of=_gloo),
    PrivateName("_Options._devices", "Gloo at one address", GROUPS, of=_gloo),
    PrivateName("_allgather_base", "gathering into one tensor", GROUPS, of=_gloo),
    PrivateName("_get_fsdp_state", "access to sharded parameters before a step", SHARDS, of=_sharded_module),
    PrivateName(
        "_lazy_init",
        "the same",
        SHARDS,
        of=_sharded_state,
    ),
    PrivateName("_BaseDataLoaderIter", "a warning that ranks read the same batches", instead="no warning", of=_loader),
    PrivateName(
        "_MultiProcessingDataLoaderIter._shutdown_workers",
        "ending loader processes at once",
        instead="they end with their worker",
        of=_loader,
    ),
    PrivateName(
        "_iterator",
        "the same: the loader processes of a DataLoader",
        instead="they end with their worker",
        of=lambda: SimpleNamespace(**torch.utils.data.DataLoader.__annotations__),
    ),
    PrivateName(
        "_get_default_store", "a warning that ranks read the same batches", instead="no warning", of=_distributed
    ),
    PrivateName("_default_pg_init_method", "the same", instead="no warning", of=_distributed),
    PrivateName("torch._dynamo", "deferring its import for a quicker start", instead="it is not deferred"),
    PrivateName("torch._inductor.config", "deterministic compiled code in exact runs", instead="it is not enabled"),
)


def missing() -> list[PrivateName]:
    """Names that this torch lacks. Modules whose import is only intercepted count as present."""
    not_imported = ("torch._dynamo", "torch._inductor.config")
    return [one for one in NAMES if one.name not in not_imported and not one.is_there]


@functools.cache
def check_strategy_names(strategy: str, uses: tuple[str, ...]) -> None:
    """Raise `EnvironmentProblem` if this torch lacks a name that the strategy, with these features, needs."""
    lacking = [one for one in NAMES if set(one.needed_by) & {*uses, *ALL} and not one.is_there]
    if lacking:
        raise EnvironmentProblem(
            f"torch {torch.__version__} lacks {', '.join(one.name for one in lacking)}, private names that strategy "
            f'"{strategy}" needs ({lacking[0].used_for}).',
            fix=["pip install 'torch>=2.13,<2.14', the version that was tested"],
        )


# ---- substitutes -------------------------------------------------------------------------------------------------


def _copy_each(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def _add_each(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.add_(value)


def _mul_each(targets: Sequence[Tensor], factor: Any) -> None:
    for target in targets:
        target.mul_(factor)


def _zero_each(targets: Sequence[Tensor]) -> None:
    for target in targets:
        target.zero_()


def _softmax_then_zeros(scores: Tensor, dim: int) -> Tensor:
    masked = (scores == float("-inf")).all(dim, keepdim=True)
    return torch.softmax(scores, dim).masked_fill(masked, 0.0)


def _always() -> bool:
    return True


foreach_add_: Callable[..., Any] = getattr(torch, "_foreach_add_", _add_each)
foreach_copy_: Callable[..., Any] = getattr(torch, "_foreach_copy_", _copy_each)
foreach_mul_: Callable[..., Any] = getattr(torch, "_foreach_mul_", _mul_each)
foreach_zero_: Callable[..., Any] = getattr(torch, "_foreach_zero_", _zero_each)
safe_softmax: Callable[[Tensor, int], Tensor] = getattr(torch, "_safe_softmax", _softmax_then_zeros)
are_transforms_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", _always)
preserve_version_counter: Any = getattr(torch.autograd.grad_mode, "_unsafe_preserve_version_counter", None)
BATCH_NORMS: tuple[type[Any], ...] = (
    getattr(nn.modules.batchnorm, "_BatchNorm", nn.BatchNorm2d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)
DROPOUTS: tuple[type[Any], ...] = (
    getattr(nn.modules.dropout, "_DropoutNd", nn.Dropout),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)
