"""`python -m bench modes`: what is read from a record, and the tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.driver.child import ScriptFailed
from bench.modes.mode_runs import next_step
from bench.modes.modes_report import CHINESE, ENGLISH, markdown, text
from bench.results.report import BEGIN, END
from manyhands.events import StepDone
from manyhands.recipes.every_mode import MODES

ROOT = Path(__file__).resolve().parents[2]
ROW = {
    "mode": "servers_async", "workers": 2, "servers": 1, "rows_per_s": 1234.5, "memory_bytes": 26_000_000,
    "bytes_per_step": 4_955_200.0, "staleness": 0.31, "loss_after_steps": 0.1934, "steps": 160,
    "loss_after_time": 0.149, "steps_in_time": 283, "kill_s": 0.314, "kill_steps_lost": 0,
}  # fmt: skip
FOUND = {
    "date": "2026-11-19", "blocks": 3, "block_s": 0.3, "launches": 1,
    "machine": {"cpu": "c", "cores": 2, "memory_gb": 1, "system": "s", "python": "3", "torch": "2", "manyhands": "0",
                "load_before": 1.0},
    "results": {
        "small": [ROW, {**ROW, "mode": "mesh", "failed": "no room"}],
        "link": [{"mode": "tensor", "rows_per_s": 12.0, "link_bytes_per_step": 5e5}],
    },
}  # fmt: skip


def step(at_s: float, generation: str) -> StepDone:
    return StepDone(step=1, epoch=0, loss=1.0, rows=1, samples_per_s=1.0, phases={}, time_s=at_s, generation=generation)


def test_a_kill_lasts_until_the_first_step_of_a_later_generation() -> None:
    steps = [step(1.0, "1.1"), step(2.0, "1.1"), step(2.6, "1.1"), step(4.5, "1.2"), step(4.6, "1.2")]
    assert next_step(steps, 2.5) == 2.0


def test_without_a_new_generation_it_lasts_until_the_end_of_the_longest_gap() -> None:
    steps = [step(1.0, "1.1"), step(2.1, "1.1"), step(5.0, "1.1"), step(5.1, "1.1")]
    assert next_step(steps, 2.0) == 3.0
    with pytest.raises(ScriptFailed, match="no step after the kill"):
        next_step(steps, 6.0)


def test_the_tables_have_every_figure_in_both_languages() -> None:
    for shown in (text(FOUND), markdown(FOUND), markdown(FOUND, CHINESE)):
        for figure in ("1,234", "26", "4,955.2", "0.31", "0.193", "0.149", "283", "no room", "12", "500"):
            assert figure in shown
    lengths = {len(line.split("|")) for line in markdown(FOUND, CHINESE).splitlines() if line.startswith("| ")}
    assert lengths == {len(words) + 2 for words in (ENGLISH.headings, CHINESE.link_headings)}


def test_both_pages_are_written_from_one_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.__main__.modes.measure", lambda *size: FOUND["results"])
    pages = [tmp_path / "choosing.md", tmp_path / "zh" / "choosing.md"]
    pages[1].parent.mkdir()
    for page in pages:
        page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert main(["modes", "small", "--blocks", "3", "--write", *map(str, pages)]) == 1, "a mode has failed"
    english, chinese = (page.read_text() for page in pages)
    assert "rows/s" in english and "行/秒" in chinese and "1,234" in english and "1,234" in chinese
    assert all(
        text.startswith("before") and text.endswith("after\n") and "old" not in text for text in (english, chinese)
    )


def test_a_page_without_a_results_section_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.__main__.modes.measure", lambda *size: pytest.fail("measured"))
    (tmp_path / "page.md").write_text("no marks")
    for name in ("page.md", "none.md"):
        with pytest.raises(SystemExit):
            main(["modes", "--write", str(tmp_path / name)])
        assert "is no page with a results section" in capsys.readouterr().err


def test_a_part_that_is_not_there_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["modes", "huge"])
    assert "modes has no huge; it has small, wide, deep, link" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.faults
def test_every_mode_is_measured_on_the_small_network() -> None:
    command = [sys.executable, "-m", "bench", "modes", "small", "--blocks", "1", "--seconds", "0.05", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["mode"]: row for row in json.loads(done.stdout)["results"]["small"]}
    assert list(rows) == [mode.name for mode in MODES]
    single = rows["single"]
    for mode in MODES:
        row = rows[mode.name]
        assert row["rows_per_s"] > 0 and row["memory_bytes"] > 0 and row["kill_s"] > 0
        assert (row["bytes_per_step"] > 0) == (mode.name != "single")
        assert row["loss_after_steps"] == pytest.approx(single["loss_after_steps"], rel=1e-3 if mode.is_alike else 0.5)
        assert (row["staleness"] is not None) == (mode.strategy == "parameter_server")
    assert rows["mirrored"]["kill_steps_lost"] == 0
