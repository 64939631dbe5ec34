"""The tree over slices: the same grouping whichever rank computed a slice."""

from __future__ import annotations

import gc
import itertools
import weakref

from hypothesis import given
from hypothesis import strategies as st

from manyhands.parallel.gradients.slice_tree import Stack, finish, nodes_of, root


def grouping(count: int, cuts: list[int]) -> str:
    """The sum written out with its brackets, for workers that hold the slices between consecutive cuts."""
    bounds = [0, *sorted(min(cut, count) for cut in cuts), count]
    partials: dict[tuple[int, int], str] = {}
    for low, high in itertools.pairwise(bounds):
        stack: Stack[str] = Stack(count, add=lambda a, b: f"({a}+{b})")
        for v in range(low, high):
            stack.push(v, str(v))
        assert stack.nodes == nodes_of(range(low, high), count)
        partials.update(stack)
    return finish(partials, count, add=lambda a, b: f"({a}+{b})")


@given(st.integers(1, 70), st.lists(st.integers(0, 70), max_size=9))
def test_the_grouping_does_not_depend_on_who_holds_which_slices(count: int, cuts: list[int]) -> None:
    assert grouping(count, cuts) == grouping(count, [])


def test_every_slice_is_added_once_and_in_order() -> None:
    assert grouping(6, [2, 5]) == "(((0+1)+(2+3))+(4+5))"
    assert grouping(5, [3]) == "(((0+1)+(2+3))+4)"


def test_a_worker_with_an_aligned_block_holds_one_partial_sum() -> None:
    assert nodes_of(range(4, 8), 16) == [(2, 1)]
    assert nodes_of(range(0), 16) == []
    assert len(nodes_of(range(1, 15), 16)) <= 2 * root(16)[0]


@given(st.integers(1, 300), st.integers(0, 299), st.integers(0, 299))
def test_partial_sums_stay_few(count: int, low: int, high: int) -> None:
    held = nodes_of(range(min(low, count), min(high, count)), count)
    assert len(held) <= max(1, 2 * root(count)[0])


class Gradient:
    """A value that is seen to be freed."""


def test_partial_sums_are_free_as_soon_as_they_are_added_up() -> None:
    partials = {(0, v): Gradient() for v in range(3)}
    alive = weakref.WeakSet(partials.values())
    gc.disable()  # as within a step
    try:
        finish(partials, 3, add=lambda a, b: b)
        del partials
        assert not alive, "a reference cycle keeps the gradients of a step until garbage is collected"
    finally:
        gc.enable()
