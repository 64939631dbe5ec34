"""What the ranks of a host share: where they meet, memory by name, and their way to other hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from manyhands.comm.host_memory import Segment
from manyhands.comm.shared_memory import Plane
from manyhands.parallel.gradients.hierarchical_sum import AcrossHosts

__all__ = ["Sharing"]


class Sharing:
    """The plane that a host's ranks meet on, memory for what they share, and their way to other hosts, if there are.

    Where ranks come and go, they have `slots`, and `generation` is their group's. Memory outlives groups.
    """

    def __init__(
        self,
        plane: Plane,
        memory: Callable[[str, int], Segment],
        across: AcrossHosts | None = None,
        *,
        slots: Sequence[int] | None = None,
        generation: str = "",
        use: str = "",
    ) -> None:
        """`use` sets apart what is shared at different times, and by different trainings."""
        self.plane, self.across, self.slots, self.generation, self._memory = plane, across, slots, generation, memory
        self._layouts, self._use = 0, use

    @property
    def is_elastic(self) -> bool:
        return self.slots is not None

    def new_layout(self) -> str:
        """A name for memory of one layout of the parameters; the same on every rank, as each asks for as many."""
        self._layouts += 1
        return f"layout {self._use}{self.generation}/{self._layouts}"

    def memory_of(self, layout: str) -> Callable[[str, int], Segment]:
        """Memory by name. Every rank asks for the same."""
        return lambda name, num_bytes: self._memory(f"{layout}/{name}", num_bytes)
