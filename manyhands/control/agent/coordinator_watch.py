"""An agent's eye on the coordinator: on the first host it starts it again, on any other it gives up in the end."""

from __future__ import annotations

import time
from collections.abc import Callable

from manyhands.control.agent.resources import Premises
from manyhands.errors import GaveUp

__all__ = ["CoordinatorWatch"]

HUNG_COORDINATOR_S = 10.0
# Whoever waits for longer than this is told what for.
WAIT_IN_SILENCE_S = 3.0


class CoordinatorWatch:
    def __init__(
        self,
        premises: Premises,
        *,
        join_timeout_s: float,
        lost_after_s: float,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._at, self._say, self._warn = premises, say, warn
        self._join_timeout_s, self._lost_after_s = join_timeout_s, lost_after_s
        self._term_before = 0
        """The last one that was heard before the coordinator was started again."""
        self._waiting_since, self._said_waiting = time.monotonic(), ""

    def look(self, term: int) -> None:
        """Raises on a host that joined, when the run does not answer or has fallen silent."""
        link, coordinator = self._at.link, self._at.coordinator
        if coordinator is not None:
            coordinator.read_stderr()
            if link.silent_s > HUNG_COORDINATOR_S:
                self.revive("hung", term)
            return
        link.check_joining(self._join_timeout_s)
        if not link.ever_heard:
            self.say_waiting(f"no run answers at {link.endpoint}; trying for {self._join_timeout_s:g} s")
        limit = self._lost_after_s
        if link.ever_heard and link.silent_s > limit:
            raise GaveUp(f"The run's first host has been silent for {limit:g} s; its run is over here.")

    def revive(self, what: str, term: int) -> None:
        assert self._at.coordinator is not None
        self._warn(f"the coordinator (pid {self._at.coordinator.pid}) {what}; starting it again, training goes on")
        self._at.coordinator.restart(worked=term > self._term_before)
        self._term_before = term
        self._at.link.heard_at = time.monotonic()

    def wait_is_over(self) -> None:
        self._waiting_since, self._said_waiting = time.monotonic(), ""

    def say_waiting(self, what: str) -> None:
        """Once for each thing waited for, and only if that takes long enough to make somebody wonder."""
        if what != self._said_waiting and time.monotonic() - self._waiting_since > WAIT_IN_SILENCE_S:
            self._said_waiting = what
            self._say(f"waiting: {what}")
