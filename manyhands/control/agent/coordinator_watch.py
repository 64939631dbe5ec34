"""Watches the coordinator: the first host's agent restarts it, any other agent gives up after a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable

from manyhands.control.agent.resources import AgentResources
from manyhands.control.processes.child_process import MAX_QUICK_DEATHS
from manyhands.errors import GaveUp, ManyhandsError

__all__ = ["CoordinatorWatch"]

HUNG_COORDINATOR_S = 10.0
# After waiting longer than this, the agent says what it waits for.
WAIT_IN_SILENCE_S = 3.0
HINT_AFTER_S = 20.0


class CoordinatorWatch:
    def __init__(
        self,
        resources: AgentResources,
        *,
        join_timeout_s: float,
        lost_after_s: float,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        hint: str = "",
    ) -> None:
        self._resources, self._say, self._warn = resources, say, warn
        self._join_timeout_s, self._lost_after_s = join_timeout_s, lost_after_s
        self._term_before = 0
        """The last term that was received before the coordinator was restarted."""
        self._waiting_since, self._said_waiting, self._hint = time.monotonic(), "", hint

    def look(self, term: int) -> None:
        """On a joined host, raises if the run does not answer or has stopped sending."""
        link, coordinator = self._resources.link, self._resources.coordinator
        if coordinator is not None:
            coordinator.read_stderr()
            if link.silent_s > HUNG_COORDINATOR_S:
                self.restart_coordinator("hung", term)
            return
        link.check_joining(self._join_timeout_s)
        if not link.has_received:
            self.say_waiting(f"no run answers at {link.endpoint}; trying for {self._join_timeout_s:g} s")
        limit = self._lost_after_s
        if link.has_received and link.silent_s > limit:
            raise GaveUp(f"The run's first host has been silent for {limit:g} s; its run is over here.")

    def restart_coordinator(self, what: str, term: int) -> None:
        coordinator = self._resources.coordinator
        assert coordinator is not None
        self._warn(f"the coordinator (pid {coordinator.pid}) {what}; restarting it, training continues")
        # A term is received with its orders: it was able to start.
        if not coordinator.restart(worked=term > self._term_before):
            deaths = f"The coordinator died {MAX_QUICK_DEATHS} times in a row."
            raise ManyhandsError(f"{deaths} Its last output: {coordinator.last_output}")
        self._term_before = term
        self._resources.link.received_at = time.monotonic()

    def wait_is_over(self) -> None:
        self._waiting_since, self._said_waiting = time.monotonic(), ""

    def say_waiting(self, what: str) -> None:
        """Say it once for each thing waited for, and only if the wait is long enough for the user to notice."""
        if what != self._said_waiting and time.monotonic() - self._waiting_since > WAIT_IN_SILENCE_S:
            self._said_waiting = what
            self._say(f"waiting: {what}")
        if self._hint and time.monotonic() - self._waiting_since > HINT_AFTER_S:
            self._say(f"waiting: {self._hint}")
            self._hint = ""
