"""Stop and scale requests from signals, `mh stop` and `mh scale`: end the run, leave with this host, or end at once."""

from __future__ import annotations

import signal
import time

from msgspec.structs import replace

from manyhands.control.agent.host_workers import HostWorkers
from manyhands.control.agent.resources import AgentResources
from manyhands.control.messages.launch_request import Display, LaunchRequest
from manyhands.control.messages.status_messages import StatusRequest
from manyhands.control.messages.worker_messages import Refusal
from manyhands.signals import REPEAT_AFTER_S, ends_at_once

__all__ = ["Shutdown", "UserRequests", "may_start_servers", "why_not_scale", "with_servers"]


class UserRequests:
    def __init__(self, request: LaunchRequest) -> None:
        self._request = request
        self.stop: tuple[str, int] | None = None
        """Its kind, and the signal for workers that do not use our protocol. The first request counts."""
        self.workers: int | None = None
        self.servers: int | None = None
        self.replica = 1
        """How many workers one replica takes, as they report."""

    @property
    def stop_kind(self) -> str | None:
        return self.stop[0] if self.stop else None

    def ask_stop(self, kind: str, number: int) -> None:
        self.stop = self.stop or (kind, number)

    def apply(self, request: StatusRequest, *, run: str, run_dir: str | None) -> Refusal | None:
        """Apply a request; None: it was accepted."""
        match request.what:
            case "stop":
                self.ask_stop("stop", signal.SIGTERM)
            case "scale":
                return self._ask_scale(request.workers, request.servers, run, run_dir)
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


def may_start_servers(request: LaunchRequest) -> bool:
    """Whether a script's request for servers can be met by a restart: one host, and the launch has no servers yet."""
    return not request.servers and request.hosts_wanted == 1 and request.join is None and request.master is None


def with_servers(request: LaunchRequest, servers: int) -> LaunchRequest:
    """The same launch with `--servers`: with servers a run is elastic."""
    return replace(request, servers=servers, elastic=request.elastic or (1, request.workers))


def why_not_scale(
    request: LaunchRequest, workers: int | None, servers: int | None, replica: int, *, run: str, run_dir: str | None
) -> Refusal | None:
    """None: it can. Numbers of None stay unchanged; `replica` workers are added and removed together."""
    bounds = request.elastic
    if bounds is None:
        return _refusal(f"{run} is not elastic.", "mh run --elastic 1:4")
    if workers is not None and not bounds[0] <= workers <= bounds[1]:
        nearest = min(max(workers, bounds[0]), bounds[1])
        what = f"{workers} workers are outside of this run's bounds, {bounds[0]} to {bounds[1]}."
        return _refusal(what, f"mh scale {run_dir} {nearest}")
    if workers is not None and workers % replica:
        whole = [number for number in range(bounds[0], bounds[1] + 1) if number % replica == 0]
        nearest = min(whole, key=lambda number: abs(number - workers), default=bounds[1])
        what = f"A replica of the model takes {replica} workers: {workers} would leave one incomplete."
        return _refusal(what, f"mh scale {run_dir} {nearest}")
    return _why_not_servers(request, servers, run, run_dir) if servers is not None else None


def _why_not_servers(request: LaunchRequest, servers: int, run: str, run_dir: str | None) -> Refusal | None:
    if not request.servers:
        return _refusal(f"{run} has no parameter servers, and cannot get any while it runs.", "mh run --servers 2")
    if request.server_tasks:
        what = f"The servers of {run} are tasks of a cluster, which sets their number."
        return _refusal(what, "start another run, with another cluster")
    if servers < 1:
        return _refusal(f"{servers} parameter servers are too few.", f"mh scale {run_dir} --servers 1")
    return None


def _refusal(what: str, fix: str) -> Refusal:
    return Refusal(error="UsageError", what=what, fix=[fix])


# A signal to one host makes that host leave, a signal to all hosts stops the run. Only the coordinator's host can know
# which it was, so the other hosts wait for a stop order this long, or this part of the grace period, before they leave.
WAIT_FOR_STOP_S, PART_OF_GRACE = 2.0, 0.25

AGAIN = f"ctrl-C, or again after {REPEAT_AFTER_S:g} s: end at once"


class Shutdown:
    def __init__(self, resources: AgentResources, user_requests: UserRequests, display: Display) -> None:
        self._resources, self._user_requests, self._display = resources, user_requests, display
        self._first_at: float | None = None
        self.deadline: float | None = None
        """When this host, having been asked to leave, kills the workers that have not ended."""
        self._leaves_at = 0.0

    def is_leaving(self, now: float) -> bool:
        return self.deadline is not None and now >= self._leaves_at

    def stay_for_stop(self, now: float) -> None:
        """The whole run stops: this host joins in the checkpoint, unless it has begun to leave."""
        if not self.is_leaving(now):
            self.deadline = None

    def on_signal(self, number: int, grace_s: float, *, elastic: bool) -> int | None:
        """The first signal requests a checkpoint; for one that `ends_at_once`, return the exit code to end with.

        Any other signal after the first changes nothing.
        """
        joined, name, now = self._resources.coordinator is None, signal.Signals(number).name, time.monotonic()
        at_once = ends_at_once(number, None if self._first_at is None else now - self._first_at)
        if at_once:
            how_to_resume = "" if joined else "; the same command resumes from the last checkpoint"
            self._display.say(f"{name} again: everything here ends at once{how_to_resume}")
        if at_once or (joined and not self._resources.link.has_received):
            return 130 if number == signal.SIGINT else 143
        if self._first_at is not None:
            return None
        self._first_at = now
        if joined and elastic:  # the other hosts continue
            self._display.say(f"{name}: this host's workers have {grace_s:g} s to leave; {AGAIN}")
            self.deadline, self._leaves_at = now + grace_s, now + min(WAIT_FOR_STOP_S, PART_OF_GRACE * grace_s)
        else:
            self._display.say(f"{name}: workers have {grace_s:g} s to commit a checkpoint; {AGAIN}")
            self._user_requests.ask_stop("preempt", number)
        return None

    def exit_code(self, host_workers: HostWorkers | None, now: float) -> int | None:
        """The exit code of a leaving host, once its workers have ended; None: not yet, or it is not leaving."""
        if self.deadline is None or not self.is_leaving(now):
            return None
        if host_workers is None or host_workers.clear:
            return 0 if now < self.deadline else 143
        if now >= self.deadline:
            host_workers.kill_by(self.deadline)
        return None
