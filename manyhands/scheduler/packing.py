"""Decides which hosts a job's workers are on. Pure: numbers of workers in, workers per host out.

Jobs take their places one after the other, and each needs only workers that are free or that jobs before it leave: so
no two jobs ever wait for each other's hosts. A job whose size stays is moved only if it is scattered, and one that
becomes smaller only leaves hosts. Otherwise each gets as few hosts as possible, the largest first. Start reading at
`pack`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

__all__ = ["pack"]

Placed = tuple[int, ...]


def pack(
    wanted: Mapping[str, int],
    placed: Mapping[str, Sequence[int]],
    hosts: Sequence[int],
    scattered: Collection[str] = (),
) -> dict[str, Placed]:
    """Workers of each job on each host. `placed`: where they are now. Needs as many workers as there are, or fewer.

    Jobs that are `scattered` are moved to fewer hosts, where there is room, although their size stays.
    """
    assert sum(wanted.values()) <= sum(hosts), "more workers than the hosts have"
    nowhere = (0,) * len(hosts)
    found = {job: _smaller(where, wanted[job]) for job, where in placed.items() if wanted.get(job)}
    free = [slots - sum(where[host] for where in found.values()) for host, slots in enumerate(hosts)]
    moving = [
        job for job in scattered if found.get(job) == tuple(placed.get(job, ())) and sum(found[job]) == wanted[job]
    ]
    growing = [job for job in wanted if wanted[job] > sum(found.get(job, ()))]
    for job in [*_largest_first(moving, wanted), *_largest_first(growing, wanted)]:
        old = found.get(job, nowhere)
        found[job] = _arrange(wanted[job], old, free)
        free = [room - new + before for room, new, before in zip(free, found[job], old, strict=True)]
    return {job: found[job] for job in wanted if wanted[job]}


def _largest_first(jobs: Sequence[str], wanted: Mapping[str, int]) -> list[str]:
    return sorted(jobs, key=lambda job: -wanted[job])


def _smaller(where: Sequence[int], workers: int) -> Placed:
    """What is left of it with at most so many workers: it leaves the hosts where it has the fewest."""
    left, surplus = list(where), max(0, sum(where) - workers)
    for host in sorted(range(len(left)), key=lambda host: (left[host], -host)):
        leaving = min(left[host], surplus)
        left[host], surplus = left[host] - leaving, surplus - leaving
    return tuple(left)


def _arrange(workers: int, now: Placed, free: Sequence[int]) -> Placed:
    """Where it is and some more; or elsewhere, if that takes fewer hosts."""
    room = [number + own for number, own in zip(free, now, strict=True)]
    moved, extended = _place(workers, room, (0,) * len(now), now), _place(workers, room, now, now)
    return moved if _hosts(moved) < _hosts(extended) else extended


def _hosts(where: Placed) -> int:
    return sum(number > 0 for number in where)


def _place(workers: int, room: Sequence[int], begin: Placed, now: Placed) -> Placed:
    where, left = list(begin), workers - sum(begin)
    for host in sorted(range(len(room)), key=lambda host: -begin[host]):  # hosts that it has already
        if begin[host] and left:
            added = min(left, room[host] - where[host])
            where[host], left = where[host] + added, left - added
    while left:
        rooms = [(number, not now[host], host) for host, number in enumerate(room) if number > 0 and not where[host]]
        fitting = [one for one in rooms if one[0] >= left]
        # The host where the least is left; if none has room for all, the one with the most room.
        number, _, host = min(fitting) if fitting else max(rooms, key=lambda one: (one[0], not one[1], -one[2]))
        where[host] = min(left, number)
        left -= where[host]
    return tuple(where)
