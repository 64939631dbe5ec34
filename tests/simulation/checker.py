"""The promises of an elastic run, checked against its history by code that knows nothing of how they are kept.

E1  all that apply a step apply the same; a step is redone only by a group without those who had applied it
E2  each slice contributes to each applied step exactly once
E3  no worker's step decreases, and no attempt goes back behind a step that was applied
E4  only members contribute, all of them, and no incarnation is started twice
E5  once faults stop, the run ends, and ends well; fewer workers than the lower bound take one step at most
E6  one lineage: generations never repeat, are on disk before anyone enters them, and share a member with the one before
"""

from __future__ import annotations

from collections.abc import Iterator

from .history import Adopted, Applied, Committed, Entered, Generation, History, Started

PATIENCE_S = 90.0
"""From the last fault to the end of the run: silence, replacement with its longest delay, and the remaining steps."""


def violations(history: History) -> list[str]:
    checks = (_same_step, _slices, _never_back, _only_members, _progress, _too_few, _lineage)
    return [problem for check in checks for problem in check(history)]


def _number(generation: str) -> tuple[int, int]:
    term, counter = generation.split(".")
    return int(term), int(counter)


def _groups(history: History) -> dict[str, tuple[int, ...]]:
    return {generation.name: generation.group for generation in history.of(Generation)}


def _same_step(history: History) -> Iterator[str]:
    groups = _groups(history)
    digests: dict[int, int] = {0: 0}
    applied: dict[tuple[int, int], list[Applied]] = {}
    for event in history.of(Applied):
        if digests.setdefault(event.step, event.digest) != event.digest:
            yield f"E1: worker {event.incarnation} has another state after step {event.step} than others"
        earlier = applied.setdefault((event.attempt, event.step), [])
        for other in earlier:
            later = _number(event.generation) > _number(other.generation)
            if later and other.incarnation in groups.get(event.generation, ()):
                yield (
                    f"E1: step {event.step} was applied by {other.incarnation} in {other.generation} and again in "
                    f"{event.generation}, of which it is a member"
                )
        earlier.append(event)
    for event in history.of(Adopted):
        if digests.setdefault(event.step, event.digest) != event.digest:
            yield f"E1: worker {event.incarnation} adopted another state of step {event.step}"


def _slices(history: History) -> Iterator[str]:
    whole = tuple(range(history.num_slices))
    for event in history.of(Applied):
        if tuple(sorted(event.slices)) != whole:
            yield f"E2: step {event.step} in {event.generation} was made of slices {sorted(event.slices)}"


def _never_back(history: History) -> Iterator[str]:
    reached: dict[int, int] = {}
    frontier: dict[int, dict[tuple[int, int], int]] = {}
    committed = 0
    for event in history.events:
        match event:
            case Committed():
                committed = event.step
            case Adopted() | Applied():
                if event.step < reached.get(event.incarnation, 0):
                    yield f"E3: worker {event.incarnation} went back to step {event.step}"
                reached[event.incarnation] = event.step
        if isinstance(event, Applied):
            if event.attempt not in frontier and event.step != committed + 1:
                yield f"E3: attempt {event.attempt} began with step {event.step}, the checkpoint is of {committed}"
            # Behind a healed partition the last step of an older generation may still come through: it is that
            # generation's own, and what counts is how far it and those before it had come.
            own, steps = _number(event.generation), frontier.setdefault(event.attempt, {})
            if any(event.step < step for generation, step in steps.items() if generation <= own):
                yield f"E3: attempt {event.attempt} went back to step {event.step} in {event.generation}"
            steps[own] = max(event.step, steps.get(own, 0))


def _only_members(history: History) -> Iterator[str]:
    groups = _groups(history)
    for event in history.of(Applied):
        if sorted(event.contributors) != sorted(groups.get(event.generation, ())):
            yield (
                f"E4: step {event.step} in {event.generation} was made by {sorted(event.contributors)}, "
                f"its members are {sorted(groups.get(event.generation, ()))}"
            )
    started: set[int] = set()
    for event in history.of(Started):
        if event.incarnation in started:
            yield f"E4: incarnation {event.incarnation} was started twice"
        started.add(event.incarnation)


def _progress(history: History) -> Iterator[str]:
    if history.ended_at is None:
        yield f"E5: the run did not end within {PATIENCE_S:g} s of the last fault"
    elif history.exit_code == 75:
        if not history.stopped or not history.of(Committed):
            yield "E5: the run ended as if it had been stopped with a checkpoint"
    elif history.exit_code == 143 and history.stopped:
        return
    elif history.exit_code == 0:
        done = max((event.step for event in history.of(Applied)), default=0)
        if done != history.num_steps:
            yield f"E5: the run ended well after step {done} of {history.num_steps}"
    elif history.exit_code != 4 or not (history.hosts_lost or history.budget < 1000):
        yield f"E5: the run ended with {history.exit_code}: {history.reason}"


def _too_few(history: History) -> Iterator[str]:
    groups, steps = _groups(history), dict[str, set[int]]()
    for event in history.of(Applied):
        steps.setdefault(event.generation, set()).add(event.step)
    for generation, taken in steps.items():
        size = len(groups.get(generation, ()))
        if size < history.least and len(taken) > 1:
            yield f"E5: {size} workers took {len(taken)} steps in {generation}; at least {history.least} were asked for"


def _lineage(history: History) -> Iterator[str]:
    on_disk: dict[str, Generation] = {}
    last: Generation | None = None
    for event in history.events:
        match event:
            case Generation():
                if event.name in on_disk:
                    yield f"E6: generation {event.name} was issued twice"
                if last is not None and _number(event.name)[1] <= _number(last.name)[1]:
                    yield f"E6: generation {event.name} came after {last.name}"
                if last is not None and last.attempt == event.attempt and not set(last.group) & set(event.group):
                    yield f"E6: {event.name} has no member of {last.name}"
                on_disk[event.name] = last = event
            case Entered():
                if event.generation not in on_disk:
                    yield f"E6: worker {event.incarnation} entered {event.generation} before it was on disk"
    for event in history.of(Entered):
        if event.generation not in history.surviving:
            yield f"E6: worker {event.incarnation} was in {event.generation}, of which the log knows nothing"
