"""What the ranks of a host share: barriers, named memory, and the axis to other hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from manyhands.comm.host_memory import Segment
from manyhands.comm.shared_memory import Plane
from manyhands.parallel.gradients.hierarchical_sum import HostAxis

__all__ = ["SharedMemoryGroup"]


class SharedMemoryGroup:
    """The plane on which a host's ranks synchronise, the memory they share, and the axis to other hosts, if any.

    In an elastic run the ranks have `slots`, and `generation` is that of their group. Memory outlives groups.
    """

    def __init__(
        self,
        plane: Plane,
        memory: Callable[[str, int], Segment],
        across: HostAxis | None = None,
        *,
        slots: Sequence[int] | None = None,
        generation: str = "",
        use: str = "",
    ) -> None:
        """`use` makes names unique among uses of the memory at different times and by different trainings."""
        self.plane, self.across, self.slots, self.generation, self._memory = plane, across, slots, generation, memory
        self._layouts, self._use = 0, use

    @property
    def is_elastic(self) -> bool:
        return self.slots is not None

    def new_layout(self) -> str:
        """A name for memory of one layout of the parameters; the same on every rank, as all call it equally often."""
        self._layouts += 1
        return f"layout {self._use}{self.generation}/{self._layouts}"

    def memory_of(self, layout: str) -> Callable[[str, int], Segment]:
        """Allocates memory by name. Every rank asks for the same."""
        return lambda name, num_bytes: self._memory(f"{layout}/{name}", num_bytes)
