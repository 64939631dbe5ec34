"""Each benchmark runs and says what it measured. How fast anything is, is no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import report
from bench.compare import compare, divide

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("bench", "workload"), [("overhead", "mlp"), ("ddp", "small-tensors")])
def test_a_benchmark_writes_its_blocks_as_json_and_names_the_machine(bench: str, workload: str) -> None:
    few = ["--workload", workload, "--blocks", "2", "--launches", "1", "--seconds", "0.01", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "bench", bench, *few], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["machine"].keys() >= {"cpu", "cores", "torch", "python"}
    (result,) = found["results"]
    assert (result["bench"], result["workload"], result["blocks"]) == (bench, workload, 2)
    assert len(result["ms_per_step"]) == 3
    assert all(side["median"] > 0 for side in result["ms_per_step"].values())
    assert result["ratio"]["low"] <= result["ratio"]["median"] <= result["ratio"]["high"]
    assert workload in report.table(found["results"])
    assert workload in report.markdown(found)


def test_the_ratio_is_taken_within_a_round_and_the_control_widens_the_limit() -> None:
    slow_minute = [1.0, 1.0, 10.0]
    seconds = {"ours": [1.1 * s for s in slow_minute], "peer": slow_minute, "twin": [1.04 * s for s in slow_minute]}
    found = compare([seconds], "ours", "peer", "twin", allowed=0.02)
    assert found["ratio"]["median"] == pytest.approx(1.1 / 1.02)
    assert found["control"]["median"] == pytest.approx(1.04)
    assert found["limit"] == pytest.approx(1.06)
    assert not found["met"]


def test_the_interval_covers_what_differs_between_launches_however_many_blocks_each_has() -> None:
    def launch(ratio: float) -> dict[str, list[float]]:
        return {"ours": [ratio] * 50, "peer": [1.0] * 50, "twin": [1.0] * 50}

    one = compare([launch(1.0)], "ours", "peer", "twin", allowed=0.0)["ratio"]
    three = compare([launch(ratio) for ratio in (0.9, 1.0, 1.1)], "ours", "peer", "twin", allowed=0.0)
    assert one["low"] == one["high"] == 1.0, "blocks that agree leave no doubt about this launch"
    assert (three["ratio"]["low"], three["ratio"]["median"], three["ratio"]["high"]) == (0.9, 1.0, 1.1)
    assert (three["launches"], three["blocks"]) == (3, 150)


def test_blocks_are_divided_among_launches_that_each_have_some() -> None:
    assert divide(15, 3) == [5, 5, 5]
    assert divide(7, 3) == [2, 2, 3]
    assert divide(2, 3) == [1, 1]


def test_results_replace_what_stands_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write_into(page, "new")
    assert page.read_text() == f"before\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"


def test_the_page_of_results_has_a_place_for_them() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert page.index(report.BEGIN) < page.index(report.END)
