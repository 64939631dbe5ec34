"""Whether a run can be given the workers and servers that `mh scale`, or its own script, asks for. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from manyhands.control.messages.launch_request import LaunchRequest
from manyhands.control.messages.worker_messages import Refusal

__all__ = ["may_start_servers", "why_not_scale", "with_servers"]


def may_start_servers(request: LaunchRequest) -> bool:
    """Whether a script's request for servers can be granted by starting again: one host, and none asked for so far."""
    return not request.servers and request.hosts_wanted == 1 and request.join is None and request.master is None


def with_servers(request: LaunchRequest, servers: int) -> LaunchRequest:
    """As `mh run --servers` would have it: with servers a run is elastic."""
    return replace(request, servers=servers, elastic=request.elastic or (1, request.workers))


def why_not_scale(
    request: LaunchRequest, workers: int | None, servers: int | None, replica: int, *, run: str, run_dir: str | None
) -> Refusal | None:
    """None: it can. Numbers of None stay as they are; `replica` workers come and go together."""
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
        what = f"A replica of the model is {replica} workers: {workers} would leave some without their mates."
        return _refusal(what, f"mh scale {run_dir} {nearest}")
    return _why_not_servers(request, servers, run, run_dir) if servers is not None else None


def _why_not_servers(request: LaunchRequest, servers: int, run: str, run_dir: str | None) -> Refusal | None:
    if not request.servers:
        return _refusal(f"{run} has no parameter servers, and cannot get any while it runs.", "mh run --servers 2")
    if request.server_tasks:
        what = f"The servers of {run} are tasks of a cluster, which says how many there are."
        return _refusal(what, "another cluster, in another run")
    if servers < 1:
        return _refusal(f"{servers} parameter servers are too few.", f"mh scale {run_dir} --servers 1")
    return None


def _refusal(what: str, fix: str) -> Refusal:
    return Refusal(error="UsageError", what=what, fix=[fix])
