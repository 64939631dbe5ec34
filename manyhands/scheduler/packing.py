"""Decides which hosts a job's workers are on. Pure: numbers of workers in, workers per host out.

A job whose size stays is moved only if it is scattered, one that becomes smaller leaves hosts, and one that becomes
larger moves only onto workers that are free now or that smaller jobs leave: so no two jobs ever wait for each other's
hosts. Otherwise each gets as few hosts as possible, the largest jobs first. Start reading at `pack`.
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
    now = {job: _smaller(where, wanted[job]) for job, where in placed.items() if wanted.get(job)}
    free = [slots - sum(where[host] for where in now.values()) for host, slots in enumerate(hosts)]
    missing = {job: number - sum(now.get(job, ())) for job, number in wanted.items()}
    found: dict[str, Placed] = {job: where for job, where in now.items() if not missing[job]}
    needed, nowhere = sum(missing.values()), (0,) * len(hosts)
    for job in sorted((job for job in wanted if missing[job]), key=lambda job: -wanted[job]):
        needed -= missing[job]
        found[job] = _larger(wanted[job], now.get(job, nowhere), free, spare=sum(free) - needed)
        # What it leaves is not free before it has left.
        taken = (max(0, new - old) for new, old in zip(found[job], now.get(job, nowhere), strict=True))
        free = [room - number for room, number in zip(free, taken, strict=True)]
    for job in sorted((job for job in scattered if job in found and found[job] == placed[job]), key=wanted.__getitem__):
        moved = _place(
            wanted[job], [room + own for room, own in zip(free, found[job], strict=True)], nowhere, found[job]
        )
        if _hosts(moved) < _hosts(found[job]):
            free = [room - max(0, new - old) for room, new, old in zip(free, moved, found[job], strict=True)]
            found[job] = moved
    return {job: found[job] for job in wanted if wanted[job]}


def _smaller(where: Sequence[int], workers: int) -> Placed:
    """What is left of it with at most so many workers: it leaves the hosts where it has the fewest."""
    left, surplus = list(where), max(0, sum(where) - workers)
    for host in sorted(range(len(left)), key=lambda host: (left[host], -host)):
        leaving = min(left[host], surplus)
        left[host], surplus = left[host] - leaving, surplus - leaving
    return tuple(left)


def _larger(workers: int, now: Placed, free: Sequence[int], *, spare: int) -> Placed:
    """Its own workers and some that are free: wherever it takes the fewest hosts, if `spare` allows a move."""
    moved = _place(workers, [room + own for room, own in zip(free, now, strict=True)], (0,) * len(now), now)
    extended = _place(workers, [room + own for room, own in zip(free, now, strict=True)], now, now)
    takes = sum(max(0, new - old) for new, old in zip(moved, now, strict=True))
    return moved if takes <= spare and _hosts(moved) < _hosts(extended) else extended


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
