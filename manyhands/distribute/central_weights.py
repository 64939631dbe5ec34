"""One copy of a custom loop's weights, in memory that the workers of a host share: `CentralStorageStrategy.run`.

Every worker computes with the same memory. The chief alone has optimizer state, and updates; the others wait for it.
Start reading at `CentralWeights.adopt`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from manyhands.comm.host_memory import Segment
from manyhands.comm.shared_memory import Plane
from manyhands.errors import NotHere, TrainingFailed
from manyhands.parallel.model.flat_layout import lay_out

__all__ = ["CentralWeights"]


class CentralWeights:
    """Parameters in shared memory. `updates_here` says whether this worker's optimizer changes them."""

    def __init__(self, plane: Plane, memory: Callable[[str, int], Segment]) -> None:
        """`memory` allocates memory by name: every worker asks for the same."""
        self._plane, self._memory = plane, memory
        self._versions: dict[int, tuple[Tensor, int]] = {}
        """Each parameter that is there, by its id, with torch's count of the changes that this worker has made."""
        self._num_segments = 0
        self.updates_here = plane.rank == 0

    def adopt(self, params: Sequence[Tensor]) -> None:
        """Move parameters that are not there yet into the shared memory, with the chief's values; on all workers."""
        self._check_untouched(params)
        new = [one for one in params if id(one) not in self._versions]
        if not new:
            return
        if (away := next((one for one in new if one.device.type != "cpu"), None)) is not None:
            raise NotHere(
                f"A weight is on {away.device}, and a loop's central storage is memory of the host, with which the CPU "
                "computes.",
                where="CentralStorageStrategy.run",
                fix=["MirroredStrategy(), with weights on each device", "model.fit, or mh.Trainer"],
            )
        flat = lay_out(new)
        self._num_segments += 1
        views = flat.views(new, self._memory(f"weights of a custom loop {self._num_segments}", flat.num_bytes))
        if self.updates_here:
            for view, param in zip(views, new, strict=True):
                view.copy_(param.detach())
        self._plane.barrier("weights in shared memory")
        for view, param in zip(views, new, strict=True):
            param.data = view
        self._note(new)

    def updated(self, params: Sequence[Tensor]) -> None:
        """The chief has updated them: all workers may compute with them again."""
        self._note(params)
        self._plane.barrier("updated weights")

    def _note(self, params: Sequence[Tensor]) -> None:
        self._versions |= {id(one): (one, one._version) for one in params}

    def _check_untouched(self, params: Sequence[Tensor]) -> None:
        """A change by the user's code would be made once by each worker, in the same memory."""
        known = [(one, self._versions[id(one)][1]) for one in params if id(one) in self._versions]
        if any(one._version != version for one, version in known):
            raise TrainingFailed(
                "Weights were changed outside of strategy.run, but the workers share them: each has changed them.",
                where="CentralStorageStrategy",
                fix=["the optimizer's step inside of strategy.run", "weights that are loaded before the first step"],
            )
