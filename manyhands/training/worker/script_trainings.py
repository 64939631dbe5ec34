"""The trainings of the user's script in one process, in order of creation, and what they share.

A training is what one `Trainer`, or one `join`, does. All trainings of a process share its connection to the launcher,
its connections to other workers, the record of events, and the count of public calls. One training at a time is in
use: only that one has shared memory and hooks on gradients. Start reading at `ScriptTrainings.use`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Protocol
from weakref import WeakSet

from torch import nn

from manyhands.comm.axis import Axis
from manyhands.control.session.run_session import RunSession
from manyhands.errors import ManyhandsError, SpecError, UsageError
from manyhands.launcher.evaluator_session import record_of
from manyhands.launcher.solo_run import SoloSession
from manyhands.launcher.worker_process.user_tracebacks import OURS
from manyhands.observe.recorder import Recorder
from manyhands.parameter_server.protocol.messages import Number

__all__ = ["ScriptTrainings"]

# How long to read another worker's note at the end of a script, when the coordinator may be gone already.
END_NOTE_TIMEOUT_S = 1.0
# How many lines of the call stack describe where a training was created; further ones would add nothing.
MAX_STACK_LINES = 6


class Usable(Protocol):
    def put_down(self) -> Callable[[], None]: ...
    def load_newest_weights(self) -> None: ...


class ScriptTrainings:
    """All trainings of the script that this process runs."""

    def __init__(self, session: RunSession) -> None:
        self.session = session
        self.recorder: Recorder | None = None
        self.made: list[str] = []
        """Where in the script each training was created, in order of creation."""
        self.call = 0
        """Number of public calls begun, over all trainings."""
        self.uses = 0
        """How often the training in use has changed, the first one included."""
        self.steps: dict[int, int] = {}
        """Committed steps by training, as far as this process knows them."""
        self.interval: Number = (0, 0, 0)
        """The newest interval on parameter servers, over all trainings."""
        self.divided: WeakSet[nn.Module] = WeakSet()
        """Partitioned modules: no worker has all of their weights any more."""
        self._trainings: WeakSet[Usable] = WeakSet()
        self._in_use: Usable | None = None
        self._memory_to_free: list[Callable[[], None]] = []
        self._connected: dict[str, dict[str, Axis]] = {}
        self._is_closed = False

    def make(self, kind: str) -> int:
        """Number a new training. Earlier ones load their newest weights first, since it may start from their models."""
        for one in self._trainings:
            one.load_newest_weights()
        self.made.append(f"{kind} {_user_lines()}".rstrip())
        return len(self.made)

    def watch(self, one: Usable) -> None:
        self._trainings.add(one)

    def use(self, one: Usable) -> bool:
        """Make `one` the training in use, on all workers at the same line of the script. False: it already is."""
        if self._in_use is one:
            return False
        if self._in_use is not None:
            self._memory_to_free.append(self._in_use.put_down())
        self._in_use, self.uses = one, self.uses + 1
        return True

    def give_back(self) -> None:
        """Free the shared memory of earlier trainings, once every worker has suspended them."""
        while self._memory_to_free:
            self._memory_to_free.pop()()

    def next_interval(self, generation: tuple[int, int]) -> Number:
        """A number above every interval that this worker has entered: servers serve the interval with the highest."""
        return *generation, self.interval[2] + 1 if self.interval[:2] == generation else 1

    def enter_interval(self, number: Number) -> None:
        self.interval = max(self.interval, number)

    def collect(self) -> None:
        """Free unused trainers before another one begins: each is a reference cycle that keeps all of its memory."""
        if len(self.made) > 1 and gc.isenabled():
            gc.collect()

    def connections(self, kind: str) -> tuple[str, dict[str, Axis]]:
        """Axes by name, for all trainings with the same `kind` of connection; and a prefix for those names."""
        axes = self._connected.setdefault(kind, {})
        index = list(self._connected).index(kind)
        return f"way {index + 1}/" if index else "", axes

    def retire(self) -> None:
        """Retire all connections: the group has changed."""
        for axes in self._connected.values():
            for axis in axes.values():
                axis.retire()
            axes.clear()

    def check_whole(self, number: int, model: nn.Module) -> None:
        """`SpecError` for a model that an earlier training has partitioned among the workers."""
        if any(module in self.divided for module in model.modules()):
            raise SpecError(
                f"{self.describe(number)} is given a model that an earlier training has partitioned: no worker has all "
                "of it.",
                fix=["earlier.save(FILE), a new model, and later.load(FILE)"],
            )

    def open_record(self) -> None:
        """Open the record of the run, unless it is open, if this worker is the chief of its present group."""
        if self.recorder is None and self.session.group.rank == 0:
            self.recorder = Recorder(self.session.run_dir / "events" / record_of(self.session))
            if isinstance(self.session, SoloSession):
                self.session.recorder = self.recorder

    # ---- the same trainings on every worker ----

    def describe(self, number: int) -> str:
        return f"training {number}: {self.made[number - 1]}"

    def check_same(self, number: int, axis: Axis) -> None:
        """`UsageError` on every worker unless all of them are about to begin the same training."""
        if axis.size == 1:
            return
        lines = [one.decode() for one in axis.all_gather_bytes("beginning a training", self.describe(number).encode())]
        other = next((rank for rank, one in enumerate(lines) if one != lines[0]), None)
        if other is not None:
            raise UsageError(
                f"Workers create different trainings: on rank 0 {lines[0]}; on rank {other} {lines[other]}.",
                fix=["create every Trainer and join on all workers, in the same order; no `if rank == 0:` around it"],
            )

    def ended_without(self, number: int) -> UsageError | None:
        """The error for this worker if another worker of its group ended its script without reaching this training."""
        for rank in range(self.session.group.world_size):
            if (made := self._end_of(rank)) is not None:
                return UsageError(
                    f"This worker begins {self.describe(number)}; rank {rank} has ended its script after {made}.",
                    fix=["create every Trainer and join on all workers; no `if rank == 0:` around it"],
                )
        return None

    def _end_of(self, rank: int) -> str | None:
        group = self.session.group
        with contextlib.suppress(ManyhandsError):
            if rank != group.rank and self.session.check([_end_key(group.generation, rank)]):
                return self.session.get(_end_key(group.generation, rank), END_NOTE_TIMEOUT_S).decode()
        return None

    def _post_end(self) -> None:
        group = self.session.group
        if self.made and group.world_size > 1 and group.rank >= 0:
            with contextlib.suppress(ManyhandsError):
                self.session.set(_end_key(group.generation, group.rank), self.describe(len(self.made)).encode())

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._post_end()
        for axes in self._connected.values():
            for axis in axes.values():
                axis.close()
        if self.recorder is not None and not isinstance(self.session, SoloSession):  # a solo run records one more event
            self.recorder.close(timeout_s=5.0)
        self.session.close()


def _end_key(generation: str, rank: int) -> str:
    return f"end of the script/{generation}/{rank}"


def _user_lines() -> str:
    """The call stack in the user's code, innermost line first: a function may have several callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    found: list[str] = []
    while frame is not None and not frame.f_code.co_filename.startswith(OURS) and len(found) < MAX_STACK_LINES:
        if not frame.f_code.co_filename.startswith("<"):  # Python's import machinery, which runs the script
            found.append(f"{os.path.basename(frame.f_code.co_filename)} line {frame.f_lineno}")
        frame = frame.f_back
    return f"in {', from '.join(found)}" if found else ""
