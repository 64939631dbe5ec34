"""Folding, layout and pictures of a data-flow graph: pure."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import pytest

from manyhands.dataflow.capture import with_places, without_constants
from manyhands.dataflow.folding import Box, boxes_of, depth_for, leaves
from manyhands.dataflow.graph import INPUT, OUTPUT, DataflowGraph, ModuleCall, Operation, TensorSpec, amount, cost_of
from manyhands.dataflow.layered_layout import arrange, in_order, rows_of
from manyhands.dataflow.picture import picture_of
from manyhands.dataflow.svg_picture import Placed, place

SPEC = TensorSpec((4, 8), "float32", 128)


def operation(name: str, scope: tuple[str, ...], *inputs: str, **more: object) -> Operation:
    return Operation(name=name, kind=name.rstrip("0123456789"), scope=scope, inputs=inputs, outputs=(SPEC,), **more)  # type: ignore[arg-type]


def residual() -> DataflowGraph:
    """x -> block (norm -> two linears, plus x) -> head -> output."""
    return DataflowGraph(
        model="Net",
        captured_by="torch.export",
        operations=[
            Operation(name="x", kind=INPUT, outputs=(SPEC,)),
            operation("norm", ("block",), "x"),
            operation("linear1", ("block", "block.ff", "block.ff.0"), "norm", flops=100, parameters=("a",)),
            operation("relu", ("block", "block.ff"), "linear1"),
            operation("linear2", ("block", "block.ff", "block.ff.1"), "relu", flops=100, parameters=("b",)),
            operation("add", ("block",), "linear2", "x"),
            operation("linear3", ("head",), "add", flops=50, parameters=("c",)),
            Operation(name=OUTPUT, kind=OUTPUT, inputs=("linear3",)),
        ],
        modules={
            "block": ModuleCall("block", "Block"),
            "block.ff": ModuleCall("block.ff", "Sequential"),
            "block.ff.0": ModuleCall("block.ff.0", "Linear"),
            "block.ff.1": ModuleCall("block.ff.1", "Linear"),
            "head": ModuleCall("head", "Linear"),
        },
    )


def edges_in(box: Box) -> list[tuple[str, str]]:
    return sorted((box.children[edge.source].title, box.children[edge.target].title) for edge in box.edges)


def test_edges_between_modules_are_edges_of_the_boxes_around_them_and_go_on_inside_from_ports() -> None:
    root = boxes_of(residual())
    assert edges_in(root) == [("block", "head"), ("head", "output"), ("x", "block")]
    [block] = [child for child in root.children if child.title == "block"]
    assert edges_in(block) == [("add", "out"), ("ff", "add"), ("in", "add"), ("in", "norm"), ("norm", "ff")]
    [ff] = [child for child in block.children if child.title == "ff"]
    assert edges_in(ff) == [("0", "relu"), ("1", "out"), ("in", "0"), ("relu", "1")]
    assert block.cost == "200 FLOP" and block.count == 5


def test_a_folded_module_is_one_box_with_the_sums() -> None:
    folded = boxes_of(residual(), 0)
    assert [child.title for child in folded.children] == ["x", "block", "head", "output"]
    assert [child.count for child in folded.children] == [1, 5, 1, 1] and not folded.children[1].children
    assert len(list(leaves(boxes_of(residual(), 1)))) == 6
    assert depth_for(residual(), 4) == 1 and depth_for(residual(), 8) > 1


def test_a_module_that_is_called_twice_is_two_boxes() -> None:
    graph = residual()
    graph.modules["head@1"] = ModuleCall("head", "Linear")
    again = operation("linear4", ("head@1",), "linear3")
    graph.operations[-1:] = [again, Operation(name=OUTPUT, kind=OUTPUT, inputs=("linear4",))]
    assert [child.title for child in boxes_of(graph, 0).children] == ["x", "block", "head", "head (call 2)", "output"]


@pytest.mark.parametrize("seed", range(12))
def test_boxes_do_not_overlap_and_edges_go_down(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(2, 30)
    edges = [(draw.randrange(b), b) for b in range(1, count) for _ in range(draw.randrange(3))]
    edges = list(dict.fromkeys(edges))
    sizes = [(draw.uniform(10, 200), draw.uniform(10, 60)) for _ in range(count)]
    found = arrange(sizes, edges, gap=10.0, row_gap=20.0)
    boxes = [(x, y, x + w, y + h) for (x, y), (w, h) in zip(found.corners, sizes, strict=True)]
    for i, a in enumerate(boxes):
        assert a[0] >= -1e-6 and a[2] <= found.width + 1e-6 and a[3] <= found.height + 1e-6
        for b in boxes[i + 1 :]:
            assert a[2] <= b[0] + 1e-6 or b[2] <= a[0] + 1e-6 or a[3] <= b[1] or b[3] <= a[1]
    for (a, b), route in zip(edges, found.routes, strict=True):
        assert route[0][1] == pytest.approx(boxes[a][3]) and route[-1][1] == pytest.approx(boxes[b][1])
        heights = [y for _, y in route]
        assert heights == sorted(heights)


def test_long_edges_pass_each_row_and_an_edge_back_goes_up() -> None:
    rows, chains, _ = rows_of(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    assert len(rows) == 4 and len(chains[3]) == 4
    found = arrange([(10.0, 10.0)] * 2, [(0, 1), (1, 0)])
    assert found.routes[0][0][1] < found.routes[0][-1][1] and found.routes[1][0][1] > found.routes[1][-1][1]


def test_positions_keep_their_order_and_are_as_near_as_that_allows() -> None:
    assert in_order([0.0, 50.0], [0.0, 10.0]) == [0.0, 50.0]
    assert in_order([20.0, 0.0], [0.0, 10.0]) == [5.0, 15.0]
    assert in_order([0.0, 0.0, 100.0], [0.0, 10.0, 10.0]) == [-5.0, 5.0, 100.0]


def placed_boxes(one: Placed, x: float = 0.0, y: float = 0.0) -> Iterator[tuple[Placed, float, float]]:
    yield one, x + one.x, y + one.y
    for child in one.children:
        yield from placed_boxes(child, x + one.x, y + one.y)


def test_what_is_inside_a_module_is_drawn_inside_it() -> None:
    root = place(boxes_of(residual()))
    for parent, x, y in placed_boxes(root):
        for child in parent.children:
            assert child.x >= 0 and child.x + child.width <= parent.width
            assert child.y >= 20 and child.y + child.height <= parent.height, "below the head"
        assert x >= 0 and y >= 0


def test_places_follow_modules_and_then_the_data() -> None:
    graph = with_places(residual(), {"block.ff.1": "stage 1", "head": "stage 1"}, "pipeline", 2, "stage 0")
    found = {one.name: one.place for one in graph.operations}
    assert found["x"] == "" and found["norm"] == "stage 0" and found["linear2"] == "stage 1"
    assert found["add"] == "stage 1", "no weights: where its input comes from"
    assert graph.places == ["stage 1", "stage 0"]
    root = boxes_of(graph, 0)
    assert [child.place for child in root.children] == ["", "", "stage 1", ""]


def test_what_depends_on_no_input_and_no_weight_is_left_out() -> None:
    mask = [operation("arange", ()), operation("expand", (), "arange")]
    table = operation("embedding", (), "arange", parameters=("w",))
    first, *others = residual().operations
    norm = operation("norm", ("block",), "x", "expand", "embedding")
    kept = without_constants([first, *mask, table, norm, *others[1:]])
    assert [one.name for one in kept][:3] == ["x", "embedding", "norm"]
    assert kept[1].inputs == () and kept[2].inputs == ("x", "embedding")


def test_a_picture_is_valid_and_names_cannot_break_it() -> None:
    graph = with_places(residual(), {"head": 'stage "1" <b>'}, "pipeline", 2, "stage 0")
    graph.modules["head"] = ModuleCall("head", '</script><script>alert("&")')
    svg = ElementTree.fromstring(picture_of(graph, ".svg", 9))
    texts = [element.text or "" for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert any("alert" in text for text in texts) and 'stage "1" <b>' in texts
    assert len([text for text in texts if text == "4x8 float32, 128 B"]) >= 8, "each edge has its tensor"
    page = picture_of(graph, ".html")
    assert page.count("<script") == 2 and not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)", page)
    edges = json.loads(re.findall(r'id="edges">(.*?)</script>', page, re.S)[0])
    ids = set(re.findall(r'id="(b\d+)"', page))
    assert edges and all(name in ids for chain, _, _ in edges for name in chain)
    dot = picture_of(graph, ".dot")
    assert dot.count("{") == dot.count("}") and '"block/in" -> "norm"' in dot and "->" in dot


def test_amounts_have_three_digits_or_so() -> None:
    assert [amount(one, "B", 1024) for one in (0, 1023, 1024, 5 * 2**20)] == ["0 B", "1023 B", "1.0 KiB", "5.0 MiB"]
    assert cost_of(2_000_000, 0.0014, 2048) == "2.0 MFLOP · 1.40 ms · 2.0 KiB weights"
    assert cost_of(0, 1e-6) == ""
