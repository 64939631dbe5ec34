"""What a worker is said to need is what it needs: its peak, from its start to its last save, in processes of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from manyhands.events import ResourcesUsed
from tests.layouts.measured_training import LAYOUTS

SCRIPT = Path(__file__).with_name("measured_training.py")
MARGIN = 0.15


def used(folder: Path, model: str, layout: str, timeout_s: float) -> dict[int, ResourcesUsed]:
    """The last word of each worker."""
    command = [sys.executable, "-m", "manyhands.cli.main", "run", "-n", "2", "--run-dir", "run", "--timeout", "300"]
    ended = subprocess.run(
        [*command, SCRIPT, model, layout], cwd=folder, capture_output=True, text=True, timeout=timeout_s
    )
    assert ended.returncode == 0, ended.stderr
    files = (folder / "run" / "events").glob("*.jsonl")
    lines = [line for file in files for line in file.read_bytes().splitlines() if b'"event":"ResourcesUsed"' in line]
    records = sorted((msgspec.json.decode(line, type=ResourcesUsed) for line in lines), key=lambda one: one.seconds)
    return {one.rank: one for one in records}


def assert_as_predicted(found: dict[int, ResourcesUsed]) -> None:
    assert set(found) == {0, 1}
    for one in found.values():
        assert one.predicted_bytes == pytest.approx(one.peak_rss_bytes, rel=MARGIN), found


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_peak_is_near_what_was_predicted(tmp_path: Path, layout: str) -> None:
    found = used(tmp_path, "wide", layout, 200)
    assert_as_predicted(found)
    assert found[0].predicted_phase == ("save" if layout == "mirrored" else "step")
    if layout != "mirrored":  # whose chief copies everything, so that it trains while it writes
        assert found[0].peak_rss_bytes < 1.25 * found[1].peak_rss_bytes


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_of_bert_base_is_predicted(tmp_path: Path, layout: str) -> None:
    pytest.importorskip("transformers")
    assert_as_predicted(used(tmp_path, "BERT-base", layout, 850))
