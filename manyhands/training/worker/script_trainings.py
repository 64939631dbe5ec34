"""What one process makes of the user's script: its trainings, by their order of creation, and what they have in common.

A training is what one `Trainer`, or one `join`, does. All trainings of a process share its line to the launcher, its
connections to other workers, the record of events, and the count of public calls. One training at a time is in use:
it alone holds shared memory and looks at gradients. Start reading at `Script.use`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol
from weakref import WeakSet

from torch import nn

from manyhands.comm.axis import Axis
from manyhands.control.session.session import Session
from manyhands.errors import ManyhandsError, SpecError, UsageError
from manyhands.launcher.solo_run import Solo
from manyhands.launcher.worker_process.user_tracebacks import OURS
from manyhands.observe.recorder import Recorder
from manyhands.parameter_server.protocol.messages import Number

__all__ = ["Script"]

# At the end of a script, when the coordinator may be gone already.
LAST_WORD_S = 1.0
# Of a script, where a training was made; beyond that, they say nothing that the others do not.
MOST_LINES = 6


class Usable(Protocol):
    def put_down(self) -> Callable[[], None]: ...
    def look_back(self) -> None: ...


class Script:
    """One run of the script in this process."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.recorder: Recorder | None = None
        self.is_joined = False
        self.made: list[str] = []
        """Where in the script, by the order of creation."""
        self.call = 0
        """How many public calls were begun, of all trainings."""
        self.uses = 0
        """How often one training after another was taken in use."""
        self.steps: dict[int, int] = {}
        """Committed steps, by training, as far as they are known here."""
        self.course: Number = (0, 0, 0)
        """The newest one of parameter servers, of all trainings."""
        self.divided: WeakSet[nn.Module] = WeakSet()
        """Modules of which no worker has all weights any more."""
        self._trainings: WeakSet[Usable] = WeakSet()
        self._in_use: Usable | None = None
        self._unneeded: list[Callable[[], None]] = []
        self._connected: dict[str, dict[str, Axis]] = {}
        self._is_closed = False

    def make(self, kind: str) -> int:
        """The number of a new training, which may begin with what those before it have come to."""
        for one in self._trainings:
            one.look_back()
        self.made.append(f"{kind} {_place_in_script()}".rstrip())
        return len(self.made)

    def watch(self, one: Usable) -> None:
        self._trainings.add(one)

    def use(self, one: Usable) -> bool:
        """Take a training in use, as all workers do at the same point of the script. False: it is in use already."""
        if self._in_use is one:
            return False
        if self._in_use is not None:
            self._unneeded.append(self._in_use.put_down())
        self._in_use, self.uses = one, self.uses + 1
        return True

    def give_back(self) -> None:
        """Every worker has put down the trainings before this one: their shared memory is nobody's."""
        while self._unneeded:
            self._unneeded.pop()()

    def next_course(self, generation: tuple[int, int]) -> Number:
        """Above that of every course that this worker has entered: servers take the newest one for what is wanted."""
        return *generation, self.course[2] + 1 if self.course[:2] == generation else 1

    def enter_course(self, number: Number) -> None:
        self.course = max(self.course, number)

    def collect(self) -> None:
        """Free a trainer that is out of use, a ring of references with all its memory, before another one begins."""
        if len(self.made) > 1 and gc.isenabled():
            gc.collect()

    def connections(self, kind: str) -> tuple[str, dict[str, Axis]]:
        """Axes by name, for all trainings that connect in the same way; and what to put before their names."""
        known = self._connected.setdefault(kind, {})
        place = list(self._connected).index(kind)
        return f"way {place + 1}/" if place else "", known

    def retire(self) -> None:
        """The group is another now."""
        for axes in self._connected.values():
            for axis in axes.values():
                axis.retire()
            axes.clear()

    def check_whole(self, number: int, model: nn.Module) -> None:
        """`SpecError` for a model that an earlier training has divided among the workers."""
        if any(module in self.divided for module in model.modules()):
            raise SpecError(
                f"{self.describe(number)} is given a model that an earlier training has divided: no worker has it all.",
                fix=["earlier.save(FILE), a new model, and later.load(FILE)"],
            )

    # ---- the same trainings on every worker ----

    def describe(self, number: int) -> str:
        return f"training {number}: {self.made[number - 1]}"

    def check_same(self, number: int, axis: Axis) -> None:
        """`UsageError` on every worker unless all of them are about to begin the same training."""
        if axis.size == 1:
            return
        said = [one.decode() for one in axis.all_gather_bytes("beginning a training", self.describe(number).encode())]
        other = next((rank for rank, one in enumerate(said) if one != said[0]), None)
        if other is not None:
            raise UsageError(
                f"Workers make different trainings: on rank 0 {said[0]}; on rank {other} {said[other]}.",
                fix=["make every Trainer and join on all workers, in the same order; no `if rank == 0:` around it"],
            )

    def ended_without(self, number: int) -> UsageError | None:
        """What to say where another worker of this group has ended its script, and never comes to this training."""
        for rank in range(self.session.group.world_size):
            if (made := self._end_of(rank)) is not None:
                return UsageError(
                    f"This worker begins {self.describe(number)}; rank {rank} has ended its script after {made}.",
                    fix=["make every Trainer and join on all workers; no `if rank == 0:` around it"],
                )
        return None

    def _end_of(self, rank: int) -> str | None:
        group = self.session.group
        if not isinstance(self.session, Session):
            return None
        with contextlib.suppress(ManyhandsError):
            if rank != group.rank and self.session.check([_end_key(group.generation, rank)]):
                return str(self.session.get(_end_key(group.generation, rank), LAST_WORD_S).decode())
        return None

    def _tell_end(self) -> None:
        group = self.session.group
        if self.made and group.world_size > 1 and group.rank >= 0 and isinstance(self.session, Session):
            with contextlib.suppress(ManyhandsError):
                self.session.set(_end_key(group.generation, group.rank), self.describe(len(self.made)).encode())

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._tell_end()
        for axes in self._connected.values():
            for axis in axes.values():
                axis.close()
        if self.recorder is not None and not isinstance(self.session, Solo):  # a solo run has one more thing to record
            self.recorder.close(timeout_s=5.0)
        self.session.close()


def _end_key(generation: str, rank: int) -> str:
    return f"end of the script/{generation}/{rank}"


def _place_in_script() -> str:
    """The lines of the user's code that are running, the innermost first: a function may be called from anywhere."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    found: list[str] = []
    while frame is not None and not frame.f_code.co_filename.startswith(OURS) and len(found) < MOST_LINES:
        if not frame.f_code.co_filename.startswith("<"):  # Python's own, which runs the script
            found.append(f"{os.path.basename(frame.f_code.co_filename)} line {frame.f_lineno}")
        frame = frame.f_back
    return f"in {', from '.join(found)}" if found else ""
