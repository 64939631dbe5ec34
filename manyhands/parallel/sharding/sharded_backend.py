"""Weights that are sharded between steps: what `fsdp_backend` and `gather_per_step` have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.axis import Axis
from manyhands.parallel.gradients.reduce_scatter_sum import ShardedSum
from manyhands.parallel.model.tensor_shard import TensorShard
from manyhands.parallel.weights.replica_backend import ReplicaBackend

__all__ = ["ShardedBackend"]


class ShardedBackend(ReplicaBackend):
    """For one model and its optimizer. Frozen parameters are sharded, too, unless they are small."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        axis: Axis,
        network: Callable[[], Axis],
        *,
        warn: Callable[[str], None],
        bucket_bytes: int = 0,
    ) -> None:
        super().__init__(
            model, optimizer, axis, None, network, None, bucket_bytes=bucket_bytes, check_every=0, warn=warn
        )

    @property
    def shares(self) -> dict[int, TensorShard]:
        """This rank's shard of each sharded parameter, by the parameter's id; other parameters are whole."""
        raise NotImplementedError

    @property
    def passes_left(self) -> int:
        assert isinstance(self.sum, ShardedSum)
        return self.sum.passes_left

    def synchronise(self) -> None:
        """Give every rank rank 0's buffers and unsharded parameters; the first time, also its shard of the others."""
        divided = self.shares
        whole = [param for param in self._model.parameters() if id(param) not in divided]
        self._axis.broadcast_([*whole, *self._model.buffers()], "weights of rank 0")
        self.divide()
        self._axis.barrier("weights of rank 0")

    def gather(self, share: TensorShard, mine: Tensor) -> Tensor:
        """The whole tensor from the ranks' shards, on every rank."""
        rows = -(-share.shape[0] // self._axis.size)
        padded = mine.new_zeros(rows, *share.shape[1:])
        padded[: len(mine)].copy_(mine)
        return self._axis.all_gather(padded, "whole weights").flatten(0, 1)[: share.shape[0]]

    def put_down(self) -> Callable[[], None]:
        """Every rank keeps its shard: no other training may have this model."""
        return lambda: None

    def regroup(self, axis: Axis, sharing: Any) -> None:
        raise AssertionError("a sharded model does not support elastic workers")
