"""What the pages on profiling and on the graph show of the command's output is what the code prints."""

from __future__ import annotations

import re
from pathlib import Path

from manyhands.profiling.layer_times import LayerTime
from manyhands.profiling.profile_report import ProfileReport, WorkerTimes
from manyhands.profiling.step_records import WorkerFacts
from manyhands.profiling.verdict import Round, judge
from manyhands.trials.bottleneck_search import ways_for

ROOT = Path(__file__).parents[2]
PAGES = ("profiling.md", "data-flow-graph.md")


def blocks(page: Path) -> list[str]:
    """The code blocks without comments, which may be translated."""
    found = re.findall(r"^```\w*\n.*?^```$", page.read_text(), re.M | re.S)
    return [re.sub(r"\s*#.*", "", one) for one in found]


def test_the_chinese_pages_have_the_sections_and_the_code_of_the_english_ones() -> None:
    for name in PAGES:
        english, chinese = ROOT / "docs" / name, ROOT / "docs" / "zh" / name
        assert blocks(chinese) == blocks(english)
        levels = [re.findall(r"^(#+) ", page.read_text(), re.M) for page in (english, chinese)]
        assert levels[0] == levels[1]


def test_the_report_of_the_example_has_the_lines_that_the_page_shows() -> None:
    facts = WorkerFacts(rank=0, workers=2, strategy="mirrored", slices=2, threads=1, precision="fp32")
    ways, untried = ways_for(facts, 2)
    times = {"data for free": 0.019, "no exchange": 0.0459, "threads=2": 0.0462, "num_workers=1": 0.0382}
    report = ProfileReport(
        facts=facts,
        steps=18,
        rounds=1,
        verdict=judge(ways, [Round(0.0460, 0.0457, times)], untried),
        workers=[WorkerTimes(0, 0.0418, {"load": 0.0387, "reduce": 0.0011})],
        waiting=[(1, 0, 0.0019)],
        layers=[LayerTime("0", "Linear", 0.001, 0.002, 1)],
        seconds=286.0,
    )
    shown = (ROOT / "docs" / "profiling.md").read_text().partition("```\n2 workers")[2].partition("```")[0]
    printed = report.text().splitlines()
    forms = {re.sub(r"[+-]?[\d.]+", "N", line) for line in printed}
    for line in shown.splitlines()[1:10]:
        if line.startswith(("held", "try: read", "  with")):
            assert re.sub(r"[+-]?[\d.]+", "N", line) in forms, line
    assert "worker 1 waits for worker 0: 1.9 ms per step" in printed
    assert "0      Linear  1      1.0 ms   2.0 ms    100 %" in printed and printed[-1] == "measured in 4m46s"
