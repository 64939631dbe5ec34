"""Backward of one stage for one microbatch: in one go, or in two halves, inputs' gradients first.

`Entrance` is where a value comes in from another stage and its gradient goes out. The second half needs no second way
through the stage: the first notes what flowed into every operation at which the way to weights leaves the way to
inputs, and the second goes on from there. Start reading at `backward` and `InputsFirst`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["Entrance", "InputsFirst", "Roots", "backward"]


class Entrance:
    """A tensor that came from another stage. After backward, `grad` is what goes back; None: nothing depends on it."""

    def __init__(self, tensor: Tensor) -> None:
        self.grad: Tensor | None = None
        self.tensor: Tensor = _Enter.apply(torch.empty(0, requires_grad=True), tensor, self)  # type: ignore[no-untyped-call]
        self.edge = get_gradient_edge(self.tensor)


class _Enter(torch.autograd.Function):
    """A beginning of a graph that, unlike a leaf, may be changed in place by whoever comes next."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, entrance: Entrance) -> Tensor:
        ctx.entrance = entrance
        ctx.set_materialize_grads(False)
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor)  # type: ignore[call-overload,no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        ctx.entrance.grad = grad
        return None, None, None


Roots = Sequence[tuple[GradientEdge, Tensor | None]]
"""Where backward begins: an output, and its gradient; None for a scalar."""


def backward(roots: Roots) -> None:
    """Both halves: gradients are added to the weights', and left at the entrances."""
    if roots:
        torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])


class InputsFirst:
    """Gradients of entrances at once; those of weights by `finish`, which may come much later."""

    def __init__(self, roots: Roots, entrances: Sequence[Entrance]) -> None:
        self._roots, self._groups = roots, list[_Group]()
        if not entrances or not roots:
            return  # nobody waits for anything: all of it is the second half
        nodes = [edge.node for edge, _ in roots]
        users = _users(nodes)
        trunk = _upwards((entrance.edge.node for entrance in entrances), users)
        self._groups = _grouped(trunk, users)
        hooks = [group.listen() for group in self._groups]
        try:
            grads = torch.autograd.grad(
                [edge for edge, _ in roots],
                [entrance.edge for entrance in entrances],
                [grad for _, grad in roots],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for handles in hooks:
                for handle in handles:
                    handle.remove()
        for entrance, grad in zip(entrances, grads, strict=True):
            entrance.grad = grad
        self._roots = [(edge, grad) for edge, grad in roots if edge.node not in trunk]

    def finish(self) -> None:
        # Between two junctions of one group lie operations of others, whose saved values must still be there.
        for group in sorted(self._groups, key=lambda group: len(group.junctions), reverse=True):
            group.finish(keep=bool(self._roots))
        backward(self._roots)  # outputs that do not depend on what came in
        self._groups, self._roots = [], []


class _Group:
    """Weights, and the operations on the way to inputs from which one comes to them and no others."""

    def __init__(self, junctions: set[Node], leaves: list[Node]) -> None:
        self.junctions, self.leaves = junctions, leaves
        self._flowed: dict[Node, tuple[Tensor | None, ...]] = {}

    def listen(self) -> list[Any]:
        """Note what flows into the junctions."""
        return [node.register_prehook(self._noting(node)) for node in self.junctions]

    def _noting(self, node: Node) -> Any:
        def note(grads: tuple[Tensor | None, ...]) -> None:
            self._flowed[node] = grads

        return note

    def finish(self, *, keep: bool) -> None:
        """With `keep`, others will pass the same operations."""
        flowed = [(node, i, g) for node, grads in self._flowed.items() for i, g in enumerate(grads) if g is not None]
        if not flowed:
            return
        # With several junctions one may lie behind another: what arrives there by that way has been noted already.
        several = len(self._flowed) > 1
        clamps = [node.register_prehook(_always(grads)) for node, grads in self._flowed.items() if several]
        try:
            torch.autograd.backward(
                [GradientEdge(node, i) for node, i, _ in flowed],
                [grad for _, _, grad in flowed],
                retain_graph=several or keep,
                inputs=[leaf.variable for leaf in self.leaves],  # type: ignore[attr-defined]
            )
        finally:
            for clamp in clamps:
                clamp.remove()


def _always(grads: tuple[Tensor | None, ...]) -> Any:
    return lambda _: grads


def _users(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """Every node of the graph, with those that pass gradients to it."""
    users: dict[Node, list[Node]] = {node: [] for node in roots}
    ahead = list(users)
    while ahead:
        node = ahead.pop()
        for source, _ in node.next_functions:
            if source is not None:
                if source not in users:
                    users[source] = []
                    ahead.append(source)
                users[source].append(node)
    return users


def _upwards(nodes: Iterable[Node], users: dict[Node, list[Node]]) -> set[Node]:
    """These and all that lead to them."""
    found: set[Node] = set()
    ahead = [node for node in nodes if node in users]
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead += users[node]
    return found


def _grouped(trunk: set[Node], users: dict[Node, list[Node]]) -> list[_Group]:
    """Weights by the junctions that lead to them; those that have one in common are together."""
    groups: list[_Group] = []
    for leaf in users:
        if not hasattr(leaf, "variable") or leaf in trunk:
            continue
        junctions = _junctions(leaf, trunk, users)
        if not junctions:
            continue
        joined = _Group(junctions, [leaf])
        for group in [group for group in groups if group.junctions & junctions]:
            joined.junctions |= group.junctions
            joined.leaves += group.leaves
            groups.remove(group)
        groups.append(joined)
    return groups


def _junctions(leaf: Node, trunk: set[Node], users: dict[Node, list[Node]]) -> set[Node]:
    found: set[Node] = set()
    ahead, seen = [leaf], {leaf}
    while ahead:
        for user in users[ahead.pop()]:
            if user in trunk:
                found.add(user)
            elif user not in seen:
                seen.add(user)
                ahead.append(user)
    return found
