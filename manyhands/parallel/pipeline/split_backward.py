"""Backward of one stage for one microbatch: in one pass, or in two, gradients of inputs first.

`StageInput` is a value from another stage, to which its gradient is sent back. The weight-gradient pass does not repeat
the stage's backward: the input-gradient pass records the gradient at every operation where the path to the weights
branches off (a junction), and the second pass starts there. Start reading at `backward` and `InputGradientPass`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["InputGradientPass", "Roots", "StageInput", "backward"]


class StageInput:
    """A tensor from another stage. After backward, `grad` is sent back; None: the output does not depend on it."""

    def __init__(self, tensor: Tensor) -> None:
        self.grad: Tensor | None = None
        self.tensor: Tensor = _GraphInput.apply(torch.empty(0, requires_grad=True), tensor, self)  # type: ignore[no-untyped-call]
        self.edge = get_gradient_edge(self.tensor)


class _GraphInput(torch.autograd.Function):
    """The start of a graph that, unlike a leaf, the following operations may change in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, stage_input: StageInput) -> Tensor:
        ctx.stage_input = stage_input
        ctx.set_materialize_grads(False)
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor)  # type: ignore[call-overload,no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        ctx.stage_input.grad = grad
        return None, None, None


Roots = Sequence[tuple[GradientEdge, Tensor | None]]
"""Where backward starts: an output, and its gradient; None for a scalar."""


def backward(roots: Roots) -> None:
    """Both passes in one: accumulates the gradients of weights, and sets those of stage inputs."""
    if roots:
        torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])


class InputGradientPass:
    """Computes the gradients of stage inputs now, and those of weights in `finish`, which may run much later."""

    def __init__(self, roots: Roots, stage_inputs: Sequence[StageInput]) -> None:
        self._roots, self._groups = roots, list[_Group]()
        if not stage_inputs or not roots:
            return  # no other stage waits for a gradient: `finish` computes everything
        nodes = [edge.node for edge, _ in roots]
        users = _users(nodes)
        trunk = _with_users((stage_input.edge.node for stage_input in stage_inputs), users)
        self._groups = _grouped(trunk, users)
        hooks = [group.record_gradients() for group in self._groups]
        try:
            grads = torch.autograd.grad(
                [edge for edge, _ in roots],
                [stage_input.edge for stage_input in stage_inputs],
                [grad for _, grad in roots],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for handles in hooks:
                for handle in handles:
                    handle.remove()
        for stage_input, grad in zip(stage_inputs, grads, strict=True):
            stage_input.grad = grad
        self._roots = [(edge, grad) for edge, grad in roots if edge.node not in trunk]

    def finish(self) -> None:
        # Operations between two junctions of one group belong to other groups, and must still have their saved values.
        for group in sorted(self._groups, key=lambda group: len(group.junctions), reverse=True):
            group.finish(keep=bool(self._roots))
        backward(self._roots)  # outputs that do not depend on a stage input
        self._groups, self._roots = [], []


class _Group:
    """Weights, and all junctions from which paths lead to them."""

    def __init__(self, junctions: set[Node], leaves: list[Node]) -> None:
        self.junctions, self.leaves = junctions, leaves
        self._recorded: dict[Node, tuple[Tensor | None, ...]] = {}

    def record_gradients(self) -> list[Any]:
        """Record the gradients that arrive at the junctions."""
        return [node.register_prehook(self._recording(node)) for node in self.junctions]

    def _recording(self, node: Node) -> Any:
        def record(grads: tuple[Tensor | None, ...]) -> None:
            self._recorded[node] = grads

        return record

    def finish(self, *, keep: bool) -> None:
        """With `keep`, a later backward uses the same operations."""
        edges = [(node, i, g) for node, grads in self._recorded.items() for i, g in enumerate(grads) if g is not None]
        if not edges:
            return
        # One junction may be behind another: its recorded gradient already contains what arrives there that way.
        several = len(self._recorded) > 1
        overrides = [node.register_prehook(_always(grads)) for node, grads in self._recorded.items() if several]
        try:
            torch.autograd.backward(
                [GradientEdge(node, i) for node, i, _ in edges],
                [grad for _, _, grad in edges],
                retain_graph=several or keep,
                inputs=[leaf.variable for leaf in self.leaves],  # type: ignore[attr-defined]
            )
        finally:
            for override in overrides:
                override.remove()


def _always(grads: tuple[Tensor | None, ...]) -> Any:
    return lambda _: grads


def _users(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """Every node of the graph, with the nodes that pass gradients to it."""
    users: dict[Node, list[Node]] = {node: [] for node in roots}
    pending = list(users)
    while pending:
        node = pending.pop()
        for source, _ in node.next_functions:
            if source is not None:
                if source not in users:
                    users[source] = []
                    pending.append(source)
                users[source].append(node)
    return users


def _with_users(nodes: Iterable[Node], users: dict[Node, list[Node]]) -> set[Node]:
    """These nodes and all nodes from which a path leads to them."""
    found: set[Node] = set()
    pending = [node for node in nodes if node in users]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += users[node]
    return found


def _grouped(trunk: set[Node], users: dict[Node, list[Node]]) -> list[_Group]:
    """Weights grouped by the junctions that lead to them; weights with a common junction are in one group."""
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
    pending, seen = [leaf], {leaf}
    while pending:
        for user in users[pending.pop()]:
            if user in trunk:
                found.add(user)
            elif user not in seen:
                seen.add(user)
                pending.append(user)
    return found
