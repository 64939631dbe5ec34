"""From blocks to verdicts, tables and the picture: plain values."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from bench.results import report
from bench.results.compare import Measured, Size, divide, judge
from bench.results.picture import achieved, draw
from bench.results.table import BENCHES, OURS, ROWS, Row, Target, chosen, verdict

SPEED = Row("row", "ddp", "some", "a step", "DDP", Target("speed", 1.3))
TIME = Row("row", "overhead", "some", "a step", "by hand", Target("time", 1.02, noise_counts=True))


def judged(row: Row, *launches: dict[str, list[float]]) -> dict[str, Any]:
    return judge(row, Measured(launches, {"threads": 1, "batch": 8}))


def blocks(ours: list[float], peer: list[float], again: list[float], name: str = "DDP") -> dict[str, list[float]]:
    return {OURS: ours, name: peer, f"{name} again": again}


def test_the_ratio_is_taken_within_a_round_and_the_control_widens_the_limit_where_it_counts() -> None:
    slow_minute = [1.0, 1.0, 10.0]
    found = judged(
        TIME, blocks([1.1 * s for s in slow_minute], slow_minute, [1.04 * s for s in slow_minute], "by hand")
    )
    assert found["value"]["middle"] == pytest.approx(1.1 / 1.02)
    assert found["control"]["middle"] == pytest.approx(1.04)
    assert found["limit"] == pytest.approx(1.06)
    assert not found["met"]
    assert found["missed_by"] == pytest.approx(1.1 / 1.02 / 1.06 - 1.0)


def test_speed_is_how_many_times_as_fast_and_the_control_does_not_move_its_limit() -> None:
    found = judged(SPEED, blocks([1.0, 1.0, 1.0], [1.2, 1.2, 1.2], [1.24, 1.24, 1.24]))
    assert found["value"]["middle"] == pytest.approx(1.22)
    assert (found["limit"], found["met"], found["clear"]) == (1.3, False, True)
    assert found["missed_by"] == pytest.approx(0.08 / 1.3)
    assert report.outcome(found) == "no, by 6.2%"


def test_the_interval_covers_what_differs_between_launches_however_many_blocks_each_has() -> None:
    def launch(speed: float) -> dict[str, list[float]]:
        return blocks([1.0] * 50, [speed] * 50, [speed] * 50)

    one = judged(SPEED, launch(1.4))
    three = judged(SPEED, *map(launch, (1.2, 1.4, 1.6)))
    assert one["value"]["low"] == one["value"]["high"] == 1.4, "blocks that agree leave no doubt about this launch"
    assert (three["value"]["low"], three["value"]["middle"], three["value"]["high"]) == (1.2, 1.4, 1.6)
    assert (three["launches"], three["blocks"]) == (3, 150)
    assert (one["met"], one["clear"], three["met"], three["clear"]) == (True, True, True, False)
    assert report.outcome(three) == "yes, within the noise"


def test_blocks_are_divided_among_launches_that_each_have_some() -> None:
    assert divide(Size(15, 1.0, 3)) == [5, 5, 5]
    assert divide(Size(7, 1.0, 3)) == [2, 2, 3]
    assert divide(Size(2, 1.0, 3)) == [1, 1]


def test_accuracy_is_a_mean_over_seeds_of_points_lost_and_has_no_twin() -> None:
    row = next(row for row in ROWS if row.name == "accuracy-int8")
    found = judged(row, {"exact": [0.99, 0.98, 0.98], "int8": [0.98, 0.98, 0.96]})
    assert found["value"]["middle"] == pytest.approx(1.0)
    assert found["control"] is None
    assert found["missed_by"] == pytest.approx(0.5)
    assert report.outcome(found) == "no, by 0.50 points, within the noise"


@pytest.mark.parametrize(
    ("target", "value", "met", "missed_by"),
    [
        (Target("speed", 4.0), 4.0, True, None),
        (Target("speed", 4.0), 3.0, False, 0.25),
        (Target("memory", 0.5), 0.4, True, None),
        (Target("memory", 0.5), 0.6, False, 0.2),
    ],
)
def test_a_target_is_reached_from_its_own_side(target: Target, value: float, met: bool, missed_by: float) -> None:
    found = verdict(target, dict.fromkeys(("low", "middle", "high"), value), None)
    assert found["met"] is met
    assert found["missed_by"] == (None if met else pytest.approx(missed_by))


def test_rows_are_chosen_by_their_name_or_their_benchmarks() -> None:
    assert chosen([]) == list(ROWS)
    assert [row.name for row in chosen(["memory"])] == ["memory", "memory-system"]
    assert {row.bench for row in chosen(["hosts", "two-loops"])} == {"hosts", "peers"}
    assert {row.bench for row in ROWS} == BENCHES.keys()
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_a_row_that_could_not_be_measured_stands_in_the_report_with_the_reason() -> None:
    skipped = report.unmeasured(SPEED, {"skipped": "no link"})
    assert "skipped: no link" in report.table([skipped])
    assert "skipped: no link" in report.markdown({"date": "today", "machine": MACHINE, "results": [skipped]}, "x.svg")
    assert draw([skipped]).count("<rect") == 1, "only the background"


def test_the_report_names_the_versions_of_peers_once() -> None:
    told = {"DDP": {"versions": {"torch": "2.13.0"}, "how": "Gloo"}, "DDP again": {"versions": {"torch": "2.13.0"}}}
    found = {**judged(SPEED, blocks([1.0], [2.0], [2.0])), "of_sides": told}
    assert report.table([found]).count("torch 2.13.0; Gloo") == 1


def test_the_picture_is_sound_and_its_bars_end_at_the_target_that_is_just_reached() -> None:
    reached = judged(SPEED, blocks([1.0], [1.3], [1.3]))
    over = judged(TIME, blocks([2.04], [1.0], [1.0], "by hand"))
    assert (achieved(reached), achieved(over)) == (1.0, 0.5)
    drawing = ElementTree.fromstring(draw([reached, over]))
    name = "{http://www.w3.org/2000/svg}"
    _, first, second = drawing.findall(f"{name}rect")
    target = drawing.findall(f"{name}line")[-1]
    assert float(first.attrib["x"]) + float(first.attrib["width"]) == pytest.approx(float(target.attrib["x1"]))
    assert float(second.attrib["width"]) == pytest.approx(float(first.attrib["width"]) / 2, abs=0.1)
    assert "a step / by hand" in "".join(drawing.itertext())


MACHINE = {
    "cpu": "a CPU", "cores": 2, "memory_gb": 1, "system": "Linux", "python": "3", "torch": "2",
    "manyhands": "0", "load_before": 0.0,
}  # fmt: skip
