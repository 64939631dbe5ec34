"""What replicas of a custom loop exchange: values of all workers, in rank order, outside of our own steps.

A custom loop computes and updates in the user's code; our part is the sum. The collectives are those of `mh.Hands`, of
a training whose model is a single unused weight. Start reading at `ReplicaExchange`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.distribute.central_weights import CentralWeights
from manyhands.errors import DataError, Diverged, PeerLost
from manyhands.parallel.gradients.custom_reduction import Reduction, combined

__all__ = ["ReplicaExchange"]

CHECK_EVERY = 50
"""Updates between two comparisons of the replicas' weights."""


class ReplicaExchange:
    """Collectives of all workers, each of which is one replica. `rank` and `size` stay as they are."""

    def __init__(self, join: Callable[[], mh.Hands]) -> None:
        """`join` joins the run: the process becomes the launcher there if several workers are asked for."""
        self._hands = join()
        unused = nn.Linear(1, 1, bias=False)
        self._hands.setup(unused, torch.optim.SGD(unused.parameters(), lr=0.0))
        self.rank, self.size = int(self._hands.rank), int(self._hands.world_size)
        self._checks = 0
        self.central: CentralWeights | None = None
        """The memory that has the weights, where the replicas share it."""
        self._alike: dict[int, Tensor] = {}
        """Tensors that were compared, by address: kept, so that no other gets it."""

    def share_weights(self) -> None:
        """Have one copy of the weights for all replicas, which one of them updates."""
        worker = self._hands._worker
        if (sharing := worker.sharing) is not None:  # it is None for one worker
            self.central = CentralWeights(sharing.plane, worker.shared_memory)

    def gather(self, value: Tensor) -> list[Tensor]:
        """Every replica's value, in rank order; shapes may differ."""
        if self.size == 1:
            return [value.detach().clone()]
        found = self._hands.gather(value.detach())
        if len(found) != self.size:
            raise PeerLost(
                f"The loop began with {self.size} replicas, and {len(found)} are left: sums would lack some.",
                fix=["no elastic=, for a loop with strategy.run", "model.fit, or mh.join, which replace lost workers"],
            )
        return found

    def sum(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The sums over the replicas, bitwise the same on all of them; the values of a dtype are sent together."""
        return self._each(values, lambda parts: parts.sum(0))

    def _each(self, values: Sequence[Tensor], combine: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """What `combine` makes of every replica's value of each: replicas are the first dimension of its argument."""
        found: list[Tensor] = list(values)
        for dtype in dict.fromkeys(value.dtype for value in values):
            chosen = [index for index, value in enumerate(values) if value.dtype == dtype]
            flat = torch.cat([values[index].detach().reshape(-1) for index in chosen])
            parts = self.gather(flat)
            if len({part.shape for part in parts}) > 1:
                sizes = ", ".join(str(part.numel()) for part in parts)
                raise DataError(
                    f"The replicas give different numbers of values to sum: {sizes}.",
                    where="strategy.run",
                    fix=["the same variables, with gradients, on every replica"],
                )
            combined_parts = combine(torch.stack(parts))
            pieces = torch.split(combined_parts, [values[one].numel() for one in chosen], dim=-1)
            for index, part in zip(chosen, pieces, strict=True):
                found[index] = part.reshape((*part.shape[:-1], *values[index].shape))
        return found

    def combine_gradients(
        self, gradients: Sequence[Tensor | None], variables: Sequence[Tensor], reduction: Reduction | None
    ) -> list[Tensor | None]:
        """The sum of each variable's gradients, or what the user's reduction makes of them; None where there are none.

        A variable that some replicas did not use counts as zero there: gradients of other variables, which may have
        the same shape, must not take its place. A reduction gets the gradients of those that did, in their order.
        """
        if self.size == 1 and reduction is None:
            return list(gradients)
        masks = self.gather(torch.tensor([one is not None for one in gradients], dtype=torch.uint8))
        if len({len(mask) for mask in masks}) > 1:
            raise DataError(
                f"The replicas' optimizers have different numbers of variables: {[len(mask) for mask in masks]}.",
                where="strategy.run",
                fix=["the same variables on every replica"],
            )
        used = torch.stack(masks).any(0).tolist()
        pairs = zip(gradients, variables, strict=True)
        filled = [torch.zeros_like(variable) if one is None else one for one, variable in pairs]
        given = [one for one, is_used in zip(filled, used, strict=True) if is_used]
        if reduction is None:
            sums = iter(self.sum(given))
            return [next(sums) if is_used else None for is_used in used]
        each = iter(self._each(given, lambda parts: parts))
        lists = [
            [part for part, has_one in zip(next(each), masks, strict=True) if has_one[index]] if is_used else []
            for index, is_used in enumerate(used)
        ]
        return combined(reduction, lists, variables)

    def check_same(self, names: Sequence[str]) -> None:
        """`DataError` unless every replica has the same names, in the same order."""
        digests = self.gather(torch.tensor([len(names), zlib.crc32("\n".join(names).encode())]))
        if any(not torch.equal(one, digests[0]) for one in digests):
            raise DataError(
                f"The replicas assigned different variables; this one {', '.join(names[:8]) or 'none'}.",
                where="strategy.run",
                fix=["the same variables, in the same order, on every replica"],
            )

    def check_alike(self, tensors: Sequence[Tensor]) -> None:
        """`Diverged` unless every replica has the same values: at the first use of these tensors, and now and then.

        Copying those of one replica would come too late: the others have computed with different ones.
        """
        self._checks += 1
        new = [one for one in tensors if id(one) not in self._alike]
        if self.size == 1 or not (new or self._checks % CHECK_EVERY == 0):
            return
        self._alike |= {id(one): one for one in new}
        digest = 0
        for one in tensors:
            digest = zlib.crc32(one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), digest)
        digests = self.gather(torch.tensor([len(tensors), digest]))
        if any(not torch.equal(one, digests[0]) for one in digests):
            raise Diverged(
                "The replicas have different weights.",
                where="strategy.run",
                fix=[
                    "with strategy.scope(): model = ..., without a seed that depends on the worker",
                    "the optimizer's step inside of strategy.run: outside, it is of this worker's gradients alone",
                ],
            )
