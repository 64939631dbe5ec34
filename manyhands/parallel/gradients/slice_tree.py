"""The binary tree over slices that every sum follows, as plain arithmetic.

Float addition is not associative, so a sum grouped by worker changes with the number of workers. Ours is grouped by
this tree, which depends on slices only: node (level, k) covers slices [k * 2**level, (k + 1) * 2**level), cut off at
the number of slices. A worker adds up the largest complete nodes of its slices; the rank that finishes the sum
continues along the same tree. No torch: values are anything that `add(left, right)` can add.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

__all__ = ["Node", "Stack", "finish", "most_held", "nodes_of", "program", "root"]

T = TypeVar("T")
Node = tuple[int, int]


def root(count: int) -> Node:
    return ((count - 1).bit_length(), 0)


def nodes_of(slices: range, count: int) -> list[Node]:
    """The nodes that a worker with these consecutive slices ends up holding, in slice order."""
    stack: Stack[None] = Stack(count, add=lambda left, right: None)
    for v in slices:
        stack.push(v, None)
    return stack.nodes


def most_held(slices: range, count: int) -> int:
    """The largest number of partial sums, including the next slice, that a worker with these slices holds at a time."""
    stack: Stack[None] = Stack(count, add=lambda left, right: None)
    most = 0
    for v in slices:
        most = max(most, len(stack) + 1)
        stack.push(v, None)
    return most


class Stack(dict[Node, T]):
    """Partial sums of consecutive slices, by node, in slice order. Pushing a slice merges the siblings it completes."""

    def __init__(self, count: int, add: Callable[[T, T], T]) -> None:
        super().__init__()
        self._count, self._add = count, add

    @property
    def nodes(self) -> list[Node]:
        return list(self)

    def push(self, v: int, value: T) -> None:
        """Add slice `v`; slices come in ascending order."""
        node: Node = (0, v)
        top = root(self._count)
        while node != top:
            level, k = node
            if k % 2 and (level, k - 1) in self:
                value = self._add(self.pop((level, k - 1)), value)
            elif k % 2 or (k + 1) << level < self._count:
                break  # the sibling belongs to another worker, or is not computed yet
            node = (level + 1, k // 2)
        self[node] = value


def finish(partials: Mapping[Node, T], count: int, add: Callable[[T, T], T], top: Node | None = None) -> T:
    """The sum over all slices, or those below `top`, from partial sums that cover each of them once."""
    node = root(count) if top is None else top
    if node in partials:
        return partials[node]
    level, k = node
    # Not a recursive function in here: it would refer to itself, and keep the gradients until garbage is collected.
    left = finish(partials, count, add, (level - 1, 2 * k))
    if (2 * k + 1) << (level - 1) >= count:
        return left
    return add(left, finish(partials, count, add, (level - 1, 2 * k + 1)))


def program(nodes: Sequence[Node], count: int, top: Node | None = None) -> bytes:
    """The additions of `finish` on values in this order, for `native`: postfix, a number pushes, -1 adds."""
    indices = {node: [i] for i, node in enumerate(nodes)}
    steps = finish(indices, count, add=lambda left, right: [*left, *right, -1], top=top)
    return struct.pack(f"{len(steps)}i", *steps)


ONE = program([root(1)], 1)
"""The program of a sum that is already complete."""
