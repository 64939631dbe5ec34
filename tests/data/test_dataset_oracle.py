"""Random chains against a plain Python reading of them, and the same list for 1, 2 and 3 workers and after any stop."""

from __future__ import annotations

import random
from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

import manyhands as mh
from manyhands.data.sample_order import Position
from tests.data.test_dataset_chains import Run, elements, interleaved_by_hand

LARGEST = 60
"""Elements at most: longer chains are cut by a take."""


def noise(value):
    return (value, random.random())


def is_kept(value):
    return total(value) % 3 != 0


def total(value):
    if isinstance(value, dict):
        return sum(map(total, value.values()))
    return sum(map(total, value)) if isinstance(value, list | tuple) else int(value)


def inner(value):
    return mh.Dataset.range(total(value) % 4).map(lambda n: (n, 0))


def inner_list(value):
    return [(n, 0) for n in range(total(value) % 4)]


class Step:
    """One step of a chain, and what it does to a list. Shuffles are compared as sets of elements, in `Case`."""

    def __init__(self, text, apply, on_list):
        self.text, self.apply, self.on_list = text, apply, on_list

    def __repr__(self):
        return self.text


def small(low=0, high=5):
    return some.integers(low, high)


def take(n):
    return Step(f"take({n})", lambda d: d.take(n), lambda x: x if n == -1 else x[:n])


def skip(n):
    return Step(f"skip({n})", lambda d: d.skip(n), lambda x: [] if n == -1 else x[n:])


def repeat(n):
    return Step(f"repeat({n})", lambda d: d.repeat(n), lambda x: x * n)


def shard(pair):
    num, index = max(pair), min(pair)
    num += num == index
    return Step(f"shard({num}, {index})", lambda d: d.shard(num, index), lambda x: x[index::num])


def enumerated(n):
    return Step(f"enumerate({n})", lambda d: d.enumerate(n), lambda x: list(enumerate(x, n)))


def zipped(n):
    return Step(
        f"zip(range({n}))",
        lambda d: mh.Dataset.zip(mh.Dataset.range(n), d),
        lambda x: list(zip(range(n), x, strict=False)),
    )


def concatenated(n):
    # Elements of one structure, so that the whole can be batched: itself, then its first ones.
    return Step(f"concatenate(take({n}))", lambda d: d.concatenate(d.take(n)), lambda x: x + x[:n])


def interleave(pair):
    cycle, block = pair
    return Step(
        f"interleave({cycle}, {block})",
        lambda d: d.interleave(lambda *v: inner(v), cycle, block),
        lambda x: list(interleaved_by_hand([inner_list(one) for one in x], cycle, block)),
    )


PLAIN = [
    Step("map", lambda d: d.map(lambda *v: {"v": v[0] if len(v) == 1 else v}), lambda x: [{"v": one} for one in x]),
    Step("filter", lambda d: d.filter(lambda *v: is_kept(v)), lambda x: [one for one in x if is_kept(one)]),
    Step("forward", lambda d: d.filter(lambda *v: True), lambda x: x),
    Step("cache", lambda d: d.cache(), lambda x: x),
    Step("prefetch", lambda d: d.prefetch(2), lambda x: x),
]


def rebatched(n):
    return Step(f"batch({n}).unbatch()", lambda d: d.batch(n).unbatch(), lambda x: x)


def batched_and_cut(pair):
    size, count = pair
    return Step(
        f"batch({size}).skip({count}).unbatch()",
        lambda d: d.batch(size).skip(count).unbatch(),
        lambda x: x[size * count :],
    )


STEPS = some.one_of(
    some.tuples(small(1, 4), small(0, 2)).map(batched_and_cut),
    small(1, 4).map(rebatched),
    some.sampled_from(PLAIN),
    small(-1, 30).map(take),
    small(-1).map(skip),
    small(0, 3).map(repeat),
    some.tuples(small(), small()).map(shard),
    small().map(enumerated),
    small(0, 30).map(zipped),
    small().map(concatenated),
    some.tuples(small(1, 4), small(1, 4)).map(interleave),
)
CHAINS = some.tuples(small(0, 25), some.lists(STEPS, max_size=6))
ENDS = some.tuples(small(3, 7), some.booleans())
SLOW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def built(size, steps):
    data, wanted = mh.Dataset.range(size), list(range(size))
    for step in steps:
        data, wanted = step.apply(data), step.on_list(wanted)
        if len(wanted) > LARGEST:
            data, wanted = data.take(LARGEST), wanted[:LARGEST]
    return data, wanted


def same(found, wanted):
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return int(found) == wanted


@SLOW
@given(CHAINS)
def test_a_random_chain_is_what_plain_lists_give(case):
    data, wanted = built(*case)
    found = elements(data)
    assert len(found) == len(wanted) and all(map(same, found, wanted)), data
    assert data.cardinality() in (len(wanted), data.UNKNOWN_CARDINALITY)


SHUFFLES = some.sampled_from(["full", 1, 3, 10, None])


@SLOW
@given(CHAINS, SHUFFLES, ENDS, some.booleans(), small(1, 6))
def test_a_random_chain_is_one_list_for_all_workers_and_after_a_stop(case, shuffle, end, forward, stop):
    data, wanted = built(*case)
    data = data.filter(lambda *v: True) if forward else data
    if shuffle is not None and not (shuffle == "full" and data.cardinality() < 0):
        data = data.shuffle(shuffle)
    data = data.map(lambda *v: noise(total(v))).batch(end[0], drop_remainder=end[1])
    rows = len(wanted) // end[0] * end[0] if end[1] else len(wanted)
    if not rows:
        return
    run = Run(data, slices=3)
    whole, _ = run.steps(epochs=2)
    for epoch in range(2):
        found = list(chain.from_iterable(piece[0] for _, of, pieces in whole if of == epoch for piece in pieces))
        assert len(found) == rows
        if not end[1]:
            assert sorted(found) == sorted(map(total, wanted))
    for world in (2, 3):
        assert run.steps(world, epochs=2)[0] == whole
    stop = min(stop, len(whole) - 1)
    if stop:
        before, position = run.steps(2, count=stop, epochs=2)
        after, _ = run.steps(3, position, before[-1][0] + 1, epochs=2)
        assert before + after == whole and isinstance(position, Position)


@pytest.mark.long
@settings(SLOW, max_examples=1500)
@given(CHAINS)
def test_very_many_random_chains_are_what_plain_lists_give(case):
    data, wanted = built(*case)
    found = elements(data)
    assert len(found) == len(wanted) and all(map(same, found, wanted)), data
