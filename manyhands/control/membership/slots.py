"""The worker slots of an elastic attempt: how many there are, on which host, and when a vacant one is filled again.

When a worker dies, its slot becomes vacant. A new incarnation fills it, unless the restart budget is spent: a death
counts only if fewer than 10 steps were completed since the slot's last death, or if the worker raised the same
exception at the same step. `mh scale`, and hosts that join or leave, add and remove slots. Pure; start reading at
`update_slots`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from manyhands.control.membership.failure_policy import signature
from manyhands.control.membership.state import AttemptState, Host, Member, Membership, Slot
from manyhands.control.messages.failure import WorkerEnd

__all__ = [
    "accepts_workers",
    "bounds",
    "count_death",
    "replicas_to_remove",
    "rescaled",
    "surplus",
    "update_slots",
    "workers_per_host",
]

FORGIVING_STEPS = 10
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0


def bounds(state: Membership) -> tuple[int, int]:
    assert state.settings.elastic is not None
    return state.settings.elastic


def asked_for(state: Membership) -> int | None:
    return state.workers_wanted if state.workers_wanted is not None else state.settings.workers_wanted


def wanted(state: Membership, hosts: Sequence[Host]) -> int:
    """How many workers there should be: the requested number, else as many as these hosts have slots."""
    least, most = bounds(state)
    number = asked_for(state)
    if number is None:
        number = sum(host.slots for host in hosts if not host.leaving)
    return max(least, min(number, most))


def workers_per_host(state: Membership, hosts: Sequence[Host]) -> dict[str, int]:
    """How many workers each host begins an attempt with."""
    share: dict[str, int] = {host.agent: 0 for host in hosts}
    for _ in range(wanted(state, hosts)):
        with_room = [host for host in hosts if share[host.agent] < host.slots]
        emptiest = min(with_room or [host for host in hosts if host.slots], key=lambda host: share[host.agent])
        share[emptiest.agent] += 1
    return share


def accepts_workers(state: Membership, agent: str) -> bool:
    """Whether workers can be started on this host, and those that it has can be admitted."""
    host = state.hosts.get(agent)
    return host is not None and not (host.silent or host.leaving or host.undecided)


# ---- deaths ----------------------------------------------------------------------------------------------------


def budget_is_spent(state: Membership) -> bool:
    return state.restarts + state.deaths > state.settings.job.max_restarts


def count_death(state: Membership, roster: AttemptState, worker: Member, end: WorkerEnd, now: float) -> Membership:
    """Record a death in its slot and, if it counts, against the run's restart budget."""
    slot = roster.slots.get(worker.slot)
    if slot is None:
        return replace(state, roster=roster)
    step, raised = roster.last_step or 0, end.kind in ("exception", "exit")
    again = raised and slot.died_of == signature(end)
    counts = again or (slot.died_at_step is not None and step - slot.died_at_step < FORGIVING_STEPS)
    quick = slot.quick_deaths + 1 if counts else 0
    delay_s = min(FIRST_DELAY_S * 2 ** (quick - 1), LONGEST_DELAY_S) if quick else 0.0
    state = replace(state, deaths=state.deaths + counts)
    slot = replace(
        slot,
        died_at_step=step,
        died_of=signature(end) if raised else None,
        quick_deaths=quick,
        refill_at=now + delay_s,
        retired=slot.retired or (counts and budget_is_spent(state)),
    )
    return replace(state, roster=replace(roster, slots={**roster.slots, worker.slot: slot}))


# ---- adding, removing, filling ---------------------------------------------------------------------------------


def rescaled(state: Membership, number: int | None) -> Membership:
    """Apply the number of `mh scale`, if it is new. Retired slots are tried again: the user asked for workers."""
    if number is None or number == state.workers_wanted:
        return state
    roster = state.roster
    if roster is not None:
        slots = {slot_number: replace(slot, retired=False) for slot_number, slot in roster.slots.items()}
        roster = replace(roster, slots=slots)
    return replace(state, workers_wanted=number, roster=roster)


def update_slots(state: Membership, roster: AttemptState, now: float) -> Membership:
    """Remove unwanted slots that no member occupies, add missing ones, fill vacant ones.

    A vacant slot of a silent host moves to another host that has room.
    """
    for change in (_give_up, _move, _add, _fill):
        after = change(state, roster, now)
        if after is not state:
            return after
    return state


def surplus(state: Membership, roster: AttemptState) -> int:
    """How many slots are too many, not counting those on hosts that leave anyway."""
    staying = [slot for slot in roster.slots.values() if not _is_leaving(state, slot)]
    return len(staying) - wanted(state, list(state.hosts.values()))


def _is_leaving(state: Membership, slot: Slot) -> bool:
    host = state.hosts.get(slot.agent)
    return host is None or host.leaving


def replicas_to_remove(state: Membership, roster: AttemptState) -> set[int]:
    """The numbers of the surplus replicas: first those with missing workers, then those with the highest numbers."""
    occupied = _occupied(roster)
    sizes = Counter(number // state.replica for number, slot in roster.slots.items() if not _is_leaving(state, slot))
    there = Counter(number // state.replica for number in occupied)
    removed, left = set[int](), surplus(state, roster)
    for replica in sorted(sizes, key=lambda number: (there[number], -number)):
        if sizes[replica] <= left:
            removed.add(replica)
            left -= sizes[replica]
    return removed


def _occupied(roster: AttemptState) -> set[int]:
    return {member.slot for member in roster.members if member.status != "dead"}


def _give_up(state: Membership, roster: AttemptState, now: float) -> Membership:
    occupied = _occupied(roster)
    free = [number for number in roster.slots if number not in occupied]
    unwanted = [number for number in free if _is_leaving(state, roster.slots[number])]
    joining = {worker.slot for worker in roster.joining}
    rest = sorted(set(free) - set(unwanted), key=lambda number: (number not in joining, number), reverse=True)
    if state.replica > 1:
        unwanted += [number for number in rest if number // state.replica in replicas_to_remove(state, roster)]
    else:
        unwanted += rest[: max(0, surplus(state, roster))]
    if not unwanted:
        return state
    return replace(
        state,
        roster=replace(
            roster,
            slots={number: slot for number, slot in roster.slots.items() if number not in unwanted},
            joining=tuple(worker for worker in roster.joining if worker.slot not in unwanted),
        ),
    )


def _move(state: Membership, roster: AttemptState, now: float) -> Membership:
    occupied = _occupied(roster)
    for number, slot in sorted(roster.slots.items()):
        host = state.hosts.get(slot.agent)
        if (
            number not in occupied
            and host is not None
            and host.silent
            and (other := _with_room(state, roster)) is not None
        ):
            joining = tuple(worker for worker in roster.joining if worker.slot != number)
            roster = replace(roster, joining=joining)
            return replace(state, roster=_placed(roster, number, replace(slot, agent=other.agent)))
    return state


def _add(state: Membership, roster: AttemptState, now: float) -> Membership:
    if surplus(state, roster) >= 0:
        return state
    used = set(roster.slots) | {worker.slot for worker in (*roster.members, *roster.joining, *roster.dismissed)}
    number = next((number for number in range(bounds(state)[1]) if number not in used), None)
    host = _with_room(state, roster, explicit=asked_for(state) is not None)
    if host is None or number is None:
        return state
    return replace(state, roster=_placed(roster, number, Slot(agent=host.agent)))


def _with_room(state: Membership, roster: AttemptState, *, explicit: bool = False) -> Host | None:
    """The host with the fewest slots in use, of those that have one to spare; with `explicit`, of all."""
    occupied = Counter(slot.agent for slot in roster.slots.values())
    hosts = [
        host
        for host in state.hosts.values()
        if accepts_workers(state, host.agent) and host.slots and (explicit or occupied[host.agent] < host.slots)
    ]
    return min(hosts, key=lambda host: (occupied[host.agent], not host.local, host.order), default=None)


def _placed(roster: AttemptState, number: int, slot: Slot) -> AttemptState:
    agents = roster.agents if slot.agent in roster.agents else (*roster.agents, slot.agent)
    return replace(roster, agents=agents, slots={**roster.slots, number: slot})


def _fill(state: Membership, roster: AttemptState, now: float) -> Membership:
    occupied = _occupied(roster) | {worker.slot for worker in roster.joining}
    vacant = [
        (number, slot)
        for number, slot in sorted(roster.slots.items())
        if number not in occupied and not slot.retired and slot.refill_at <= now and accepts_workers(state, slot.agent)
    ]
    if not vacant:
        return state
    newcomers = [
        Member(rank=-1, agent=slot.agent, incarnation=state.next_incarnation + index, slot=number)
        for index, (number, slot) in enumerate(vacant)
    ]
    return replace(
        state,
        next_incarnation=state.next_incarnation + len(newcomers),
        roster=replace(roster, joining=(*roster.joining, *newcomers)),
    )
