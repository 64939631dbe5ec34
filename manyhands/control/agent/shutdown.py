"""What a signal to the agent leads to: a checkpoint and the end of the run, this host's leaving, or an end at once."""

from __future__ import annotations

import signal
import time

from manyhands.control.agent.host_workers import Crew
from manyhands.control.agent.resources import Premises
from manyhands.control.agent.wishes import Wishes
from manyhands.control.messages.launch_request import Display
from manyhands.signals import REPEAT_AFTER_S, ends_at_once

__all__ = ["Departure"]

# A signal to one host has that host leave, one to all hosts stops the run. Only the coordinator's host can tell, so the
# others wait for so long, or for this part of the grace time, for the stop before they leave.
WAIT_FOR_STOP_S, PART_OF_GRACE = 2.0, 0.25

AGAIN = f"ctrl-C, or again after {REPEAT_AFTER_S:g} s: end at once"


class Departure:
    def __init__(self, premises: Premises, wishes: Wishes, display: Display) -> None:
        self._at, self._wishes, self._display = premises, wishes, display
        self._first_at: float | None = None
        self.by: float | None = None
        """When this host, having been told to go, kills what has not gone by itself."""
        self._leaves_at = 0.0

    def is_leaving(self, now: float) -> bool:
        return self.by is not None and now >= self._leaves_at

    def stay_for_stop(self, now: float) -> None:
        """The whole run stops: this host takes part in the checkpoint, unless it has begun to leave."""
        if not self.is_leaving(now):
            self.by = None

    def heed(self, number: int, grace_s: float, *, elastic: bool) -> int | None:
        """The first signal asks for a checkpoint; one that `ends_at_once` gives the exit code to end with.

        Any other one after the first changes nothing.
        """
        joined, name, now = self._at.coordinator is None, signal.Signals(number).name, time.monotonic()
        at_once = ends_at_once(number, None if self._first_at is None else now - self._first_at)
        if at_once:
            goes_on = "" if joined else "; the same command goes on from the last checkpoint"
            self._display.say(f"{name} again: everything here ends at once{goes_on}")
        if at_once or (joined and not self._at.link.ever_heard):
            return 130 if number == signal.SIGINT else 143
        if self._first_at is not None:
            return None
        self._first_at = now
        if joined and elastic:  # the others go on
            self._display.say(f"{name}: this host's workers have {grace_s:g} s to leave; {AGAIN}")
            self.by, self._leaves_at = now + grace_s, now + min(WAIT_FOR_STOP_S, PART_OF_GRACE * grace_s)
        else:
            self._display.say(f"{name}: workers have {grace_s:g} s to commit a checkpoint; {AGAIN}")
            self._wishes.ask_stop("preempt", number)
        return None

    def exit_code(self, crew: Crew | None, now: float) -> int | None:
        """Of a host that leaves, once it is gone; None: it is not, or stays."""
        if self.by is None or not self.is_leaving(now):
            return None
        if crew is None or crew.clear:
            return 0 if now < self.by else 143
        if now >= self.by:
            crew.kill_by(self.by)
        return None
