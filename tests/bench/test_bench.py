"""The benchmarks run and say what they measured. How fast anything is, is no test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.driver.baton import Process
from bench.driver.child import ScriptFailed
from bench.hosts import accuracy
from bench.results import report
from bench.results.table import ROWS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_rows_that_are_asked_for_are_measured_and_name_the_machine() -> None:
    few = ["--blocks", "2", "--launches", "1", "--seconds", "0.01", "--json"]
    command = [sys.executable, "-m", "bench", "ddp-small-tensors", *few]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["machine"].keys() >= {"cpu", "cores", "torch", "python"}
    assert [result["row"] for result in found["results"]] == ["ddp-small-tensors"]
    for result in found["results"]:
        assert (result["blocks"], result["threads"], result["workers"]) == (2, 1, 2)
        assert all(side["median"] > 0 for side in result["sides"].values())
        assert result["value"]["low"] <= result["value"]["middle"] <= result["value"]["high"]
        assert result["what"] in report.table(found["results"])
        assert result["what"] in report.markdown(found, "picture.svg")


def test_a_name_that_is_not_there_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dpp"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "dpp" in said and "ddp-mlp-10m" in said


def process(code: str, after: Path | None = None) -> Process:
    return Process([sys.executable, "-c", code], dict(os.environ), after=after)


def test_processes_that_wait_for_each_other_in_vain_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = tmp_path / "join"
    with pytest.raises(ScriptFailed, match="exit code 3\nwhy"):
        accuracy.run_to_end([process("print('why'); exit(3)"), process("", after=never)])
    monkeypatch.setattr(accuracy, "TIMEOUT_S", 0.5)
    with pytest.raises(ScriptFailed, match=r"join was not there after 0\.5 s"):
        accuracy.run_to_end([process("import time; time.sleep(60)"), process("", after=never)])
    with pytest.raises(ScriptFailed, match=r"no end after 0\.5 s"):
        accuracy.run_to_end([process("import time; time.sleep(60)")])


def test_results_replace_what_stands_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write_into(page, "new")
    assert page.read_text() == f"before\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"


def test_the_page_of_results_has_a_place_for_them_and_names_every_row() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert page.index(report.BEGIN) < page.index(report.END)
    promised = page[: page.index(report.BEGIN)]
    assert [row.name for row in ROWS if f"| {row.name} |" not in promised] == []
    assert [row.name for row in ROWS if f"| {report.wish(row.target)} |" not in promised] == []
