"""What people have asked of this run: that it stop, or that it be of another size.

An agent's own, by signals and by `mh stop` and `mh scale`; the coordinator hears of them in its reports.
"""

from __future__ import annotations

import signal

from manyhands.control.agent.user_requests import why_not_scale
from manyhands.control.messages.launch_request import LaunchRequest
from manyhands.control.messages.status_messages import Ask
from manyhands.control.messages.worker_messages import Refusal

__all__ = ["Wishes"]


class Wishes:
    def __init__(self, request: LaunchRequest) -> None:
        self._request = request
        self.stop: tuple[str, int] | None = None
        """Its kind, and the signal for workers that do not speak our protocol. The first one counts."""
        self.workers: int | None = None
        self.servers: int | None = None
        self.replica = 1
        """How many workers go and come together, as they say."""

    @property
    def stop_kind(self) -> str | None:
        return self.stop[0] if self.stop else None

    def ask_stop(self, kind: str, number: int) -> None:
        self.stop = self.stop or (kind, number)

    def hear(self, question: Ask, *, run: str, run_dir: str | None) -> Refusal | None:
        """What a person asks; None: it was taken in."""
        match question.what:
            case "stop":
                self.ask_stop("stop", signal.SIGTERM)
            case "scale":
                return self._ask_scale(question.workers, question.servers, run, run_dir)
        return None

    def _ask_scale(self, workers: int | None, servers: int | None, run: str, run_dir: str | None) -> Refusal | None:
        refusal = why_not_scale(self._request, workers, servers, self.replica, run=run, run_dir=run_dir)
        if refusal is None and self.stop is not None:
            refusal = Refusal(error="UsageError", what=f"{run} has been asked to stop.")
        if refusal is not None:
            return refusal
        self.workers = self.workers if workers is None else workers
        self.servers = self.servers if servers is None else servers
        return None
