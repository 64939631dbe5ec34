"""The places of an elastic attempt: how many there are, on which host, and when a vacated one is filled again.

A death vacates its slot. A new incarnation fills it, unless the restart budget is spent: a death counts only if fewer
than 10 steps were made since the slot's last one, or if it raised the same exception at the same step. `mh scale` and
hosts that come or go add slots and remove them. Pure; start reading at `staff`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from manyhands.control.membership.failure_policy import signature
from manyhands.control.membership.state import Host, Member, Membership, Roster, Slot
from manyhands.control.messages.failure import WorkerEnd

__all__ = ["bounds", "count_death", "lay_out", "open_to", "replicas_to_go", "rescaled", "staff", "surplus"]

FORGIVING_STEPS = 10
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0


def bounds(state: Membership) -> tuple[int, int]:
    assert state.settings.elastic is not None
    return state.settings.elastic


def asked_for(state: Membership) -> int | None:
    return state.workers_wanted if state.workers_wanted is not None else state.settings.workers_wanted


def wanted(state: Membership, hosts: Sequence[Host]) -> int:
    """How many workers there should be: as asked for, else as many as these hosts have slots."""
    least, most = bounds(state)
    number = asked_for(state)
    if number is None:
        number = sum(host.slots for host in hosts if not host.leaving)
    return max(least, min(number, most))


def lay_out(state: Membership, hosts: Sequence[Host]) -> dict[str, int]:
    """How many workers each host begins an attempt with."""
    share: dict[str, int] = {host.agent: 0 for host in hosts}
    for _ in range(wanted(state, hosts)):
        with_room = [host for host in hosts if share[host.agent] < host.slots]
        least_laden = min(with_room or [host for host in hosts if host.slots], key=lambda host: share[host.agent])
        share[least_laden.agent] += 1
    return share


def open_to(state: Membership, agent: str) -> bool:
    """Workers can be started on this host, and those it has can be admitted."""
    host = state.hosts.get(agent)
    return host is not None and not host.silent and not host.leaving


# ---- deaths ----------------------------------------------------------------------------------------------------


def budget_is_spent(state: Membership) -> bool:
    return state.restarts + state.deaths > state.settings.job.max_restarts


def count_death(state: Membership, roster: Roster, worker: Member, end: WorkerEnd, now: float) -> Membership:
    """Note a death in its slot's book and, if it counts, in the run's."""
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
    """As `mh scale` says, if that is news. Who asks for workers wants slots that were given up on tried again."""
    if number is None or number == state.workers_wanted:
        return state
    roster = state.roster
    if roster is not None:
        slots = {place: replace(slot, retired=False) for place, slot in roster.slots.items()}
        roster = replace(roster, slots=slots)
    return replace(state, workers_wanted=number, roster=roster)


def staff(state: Membership, roster: Roster, now: float) -> Membership:
    """Give up slots that are not wanted and hold no member, add those that are missing, fill those that are vacant.

    A vacant one on a host that is silent goes to another that has room.
    """
    for change in (_give_up, _move, _add, _fill):
        after = change(state, roster, now)
        if after is not state:
            return after
    return state


def surplus(state: Membership, roster: Roster) -> int:
    """How many slots are too many, not counting those on hosts that go anyway."""
    staying = [slot for slot in roster.slots.values() if not _goes(state, slot)]
    return len(staying) - wanted(state, list(state.hosts.values()))


def _goes(state: Membership, slot: Slot) -> bool:
    host = state.hosts.get(slot.agent)
    return host is None or host.leaving


def replicas_to_go(state: Membership, roster: Roster) -> set[int]:
    """The numbers of those that are too many: first the ones that lack somebody, then the last."""
    held = _held(roster)
    sizes = Counter(number // state.replica for number, slot in roster.slots.items() if not _goes(state, slot))
    there = Counter(number // state.replica for number in held)
    going, left = set[int](), surplus(state, roster)
    for replica in sorted(sizes, key=lambda number: (there[number], -number)):
        if sizes[replica] <= left:
            going.add(replica)
            left -= sizes[replica]
    return going


def _held(roster: Roster) -> set[int]:
    return {member.slot for member in roster.members if member.status != "dead"}


def _give_up(state: Membership, roster: Roster, now: float) -> Membership:
    held = _held(roster)
    free = [number for number in roster.slots if number not in held]
    unwanted = [number for number in free if _goes(state, roster.slots[number])]
    joining = {worker.slot for worker in roster.joining}
    rest = sorted(set(free) - set(unwanted), key=lambda number: (number not in joining, number), reverse=True)
    if state.replica > 1:
        unwanted += [number for number in rest if number // state.replica in replicas_to_go(state, roster)]
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


def _move(state: Membership, roster: Roster, now: float) -> Membership:
    held = _held(roster)
    for number, slot in sorted(roster.slots.items()):
        host = state.hosts.get(slot.agent)
        if number not in held and host is not None and host.silent and (other := _with_room(state, roster)) is not None:
            joining = tuple(worker for worker in roster.joining if worker.slot != number)
            roster = replace(roster, joining=joining)
            return replace(state, roster=_placed(roster, number, replace(slot, agent=other.agent)))
    return state


def _add(state: Membership, roster: Roster, now: float) -> Membership:
    if surplus(state, roster) >= 0:
        return state
    used = set(roster.slots) | {worker.slot for worker in (*roster.members, *roster.joining, *roster.dismissed)}
    number = next((number for number in range(bounds(state)[1]) if number not in used), None)
    host = _with_room(state, roster, explicit=asked_for(state) is not None)
    if host is None or number is None:
        return state
    return replace(state, roster=_placed(roster, number, Slot(agent=host.agent)))


def _with_room(state: Membership, roster: Roster, *, explicit: bool = False) -> Host | None:
    """The least laden of the hosts that have a slot to spare; with `explicit`, of all."""
    held = Counter(slot.agent for slot in roster.slots.values())
    hosts = [
        host
        for host in state.hosts.values()
        if open_to(state, host.agent) and host.slots and (explicit or held[host.agent] < host.slots)
    ]
    return min(hosts, key=lambda host: (held[host.agent], not host.local, host.order), default=None)


def _placed(roster: Roster, number: int, slot: Slot) -> Roster:
    agents = roster.agents if slot.agent in roster.agents else (*roster.agents, slot.agent)
    return replace(roster, agents=agents, slots={**roster.slots, number: slot})


def _fill(state: Membership, roster: Roster, now: float) -> Membership:
    held = _held(roster) | {worker.slot for worker in roster.joining}
    vacant = [
        (number, slot)
        for number, slot in sorted(roster.slots.items())
        if number not in held and not slot.retired and slot.refill_at <= now and open_to(state, slot.agent)
    ]
    if not vacant:
        return state
    newcomers = [
        Member(
            rank=-1,
            agent=slot.agent,
            local_rank=0,
            incarnation=state.next_incarnation + place,
            slot=number,
            moved_at=now,
        )
        for place, (number, slot) in enumerate(vacant)
    ]
    return replace(
        state,
        next_incarnation=state.next_incarnation + len(newcomers),
        roster=replace(roster, joining=(*roster.joining, *newcomers)),
    )
