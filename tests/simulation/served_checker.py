"""The promises of parameter servers, checked against a run's history by code that knows nothing of how they are kept.

P1  each slice of each step counts exactly once on every server
P2  in sync and ssp(s), a slice of step t is computed with weights that contain all steps to t - 1 - s
P3  a server that was killed begins with what it had committed, no more and no less
P4  what is applied is what was written under that lease, whole; in sync, all servers apply the same
P5  no filling of a row is leased twice
P6  memory is bounded: rows, gradients that wait, steps seen out of order
M   all synchronise after every epoch and for the same reason; nothing is applied beyond, and nothing while they do
L   once faults stop, everything is applied everywhere, and all workers have synchronised after the last step
"""

from __future__ import annotations

from collections.abc import Iterator

from .served_history import Committed, Died, Granted, History, Left, Met, Started


def violations(history: History) -> list[str]:
    checks = (_once, _fresh, _restarts, _as_leased, _fillings, _bounded, _sync_points, _undisturbed, _ends)
    return [problem for check in checks for problem in check(history)]


def _once(history: History) -> Iterator[str]:
    counts: dict[tuple[int, int, int], int] = {}
    for event in history.of(Committed):
        for part in event.parts:
            if part.held.step != event.step:
                yield f"P1: server {event.server} put a slice of step {part.held.step} into step {event.step}"
            key = event.server, event.step, part.held.place
            counts[key] = counts.get(key, 0) + 1
    interval, steps = history.interval, {(event.server, event.step) for event in history.of(Committed)}
    if history.ended_at is not None:
        steps |= {(s, t) for s in range(history.num_servers) for t in range(interval.first, interval.last + 1)}
    wanted = {(server, step, place): 1 for server, step in steps for place in range(interval.items(step))}
    for key in sorted(counts.keys() | wanted.keys()):
        if counts.get(key, 0) != wanted.get(key, 0):
            yield f"P1: server {key[0]} has step {key[1]} slice {key[2]} {counts.get(key, 0)} times"


def _fresh(history: History) -> Iterator[str]:
    if history.ahead is None:
        return
    for event in history.of(Committed):
        for part in event.parts:
            if part.content is None:
                continue
            if not part.content.whole:
                yield f"P2: step {event.step} was computed with weights that were overwritten meanwhile"
            if part.content.based_on < event.step - 1 - history.ahead:
                yield f"P2: step {event.step} was computed with weights of step {part.content.based_on}"


def _restarts(history: History) -> Iterator[str]:
    applied: dict[int, set[int]] = {server: set() for server in range(history.num_servers)}
    before = history.interval.first - 1
    for event in history.events:
        match event:
            case Committed():
                applied[event.server].add(event.step)
            case Started() if {*range(before + 1, event.low + 1), *event.seen} != applied[event.server]:
                yield f"P3: server {event.server} began with {event.low} and {sorted(event.seen)}"


def _as_leased(history: History) -> Iterator[str]:
    granted = {event.held for event in history.of(Granted)}
    for event in history.of(Committed):
        for part in event.parts:
            where = f"server {event.server} applied to step {event.step}"
            if part.content is None:
                yield f"P4: {where} a row that was being written"
            elif part.content.held != part.held:
                yield f"P4: {where} {part.content.held} for {part.held}"
            elif part.held not in granted:
                yield f"P4: {where} {part.held}, which was never leased"
            elif history.ahead == 0 and part.content.based_on != event.step - 1:
                yield f"P4: {where} what was computed with weights of step {part.content.based_on}"


def _fillings(history: History) -> Iterator[str]:
    owners: dict[int, tuple[object, ...]] = {}
    for event in history.of(Granted):
        owner = event.worker, event.held
        if owners.setdefault(event.held.filling, owner) != owner:
            yield f"P5: filling {event.held.filling} was leased as {owners[event.held.filling]} and as {owner}"


def _bounded(history: History) -> Iterator[str]:
    if history.rows_used > history.num_rows:
        yield f"P6: {history.rows_used} rows were in use, there are {history.num_rows}"
    if history.ahead is not None:
        if history.seen:
            yield "P6: steps were applied out of order"
        if history.waiting > (1 + history.ahead) * history.interval.slices:
            yield f"P6: {history.waiting} gradients waited"
    elif max(history.waiting, history.seen) > history.interval.last - history.interval.first + 1:
        yield f"P6: {history.waiting} gradients waited, {history.seen} steps were remembered"


def _sync_points(history: History) -> Iterator[str]:
    reasons: dict[int, int] = {}
    last: dict[int, int] = {}
    for event in history.of(Met):
        if any(low != event.step or seen for low, seen in event.applied):
            yield f"M: worker {event.worker} synchronised after step {event.step} with {event.applied}"
        if reasons.setdefault(event.step, event.why) != event.why:
            yield f"M: the sync point after step {event.step} is for {reasons[event.step]} and for {event.why}"
        if event.step <= last.get(event.worker, history.interval.first - 1):
            yield f"M: worker {event.worker} synchronised after step {event.step} again"
        last[event.worker] = event.step
    interval = history.interval
    ends = [
        step for step in range(interval.first, interval.last + 1) if interval.ends_epoch(step) or step == interval.last
    ]
    if history.ended_at is not None and (missed := set(ends) - reasons.keys()):
        yield f"M: no worker synchronised after {sorted(missed)}"


def _undisturbed(history: History) -> Iterator[str]:
    inside: set[int] = set()
    for event in history.events:
        match event:
            case Met():
                inside.add(event.worker)
            case Left() | Died():
                inside.discard(event.worker)
            case Committed() if inside:
                yield f"M: server {event.server} applied step {event.step} while {sorted(inside)} met"


def _ends(history: History) -> Iterator[str]:
    if history.ended_at is None:
        yield "L: the interval did not end"
