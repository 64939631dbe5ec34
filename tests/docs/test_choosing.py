"""docs/choosing.md and its Chinese twin: the same sections, code, figures and links; every strategy and example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from manyhands.recipes.every_mode import MODES

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = ROOT / "docs" / "choosing.md", ROOT / "docs" / "zh" / "choosing.md"


def code(page: Path) -> list[str]:
    """The code blocks without comments, which are translated."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.S)
    return [re.sub(r"\s*# .*$", "", block, flags=re.M) for block in blocks]


def headings(page: Path) -> list[int]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    return [len(mark) for mark in re.findall(r"^(#+) ", text, re.M)]


def figures(page: Path) -> list[list[str]]:
    """The numbers of every row that was measured."""
    results = page.read_text().partition("<!-- results: begin")[2].partition("<!-- results: end")[0]
    return [re.findall(r"\d[\d.,]*", line) for line in results.splitlines() if re.match(r"\| [a-z]", line)]


def test_both_pages_have_the_same_sections_code_and_figures() -> None:
    assert headings(ENGLISH) == headings(CHINESE)
    assert code(ENGLISH) == code(CHINESE)
    measured = [row for row in figures(ENGLISH) if row]
    assert measured == [row for row in figures(CHINESE) if row]
    assert len(measured) >= 3 * len(MODES)


def test_every_strategy_is_described_in_both() -> None:
    for page in (ENGLISH, CHINESE):
        text = page.read_text()
        for name in ("Single", "Mirrored", "CentralStorage", "ParameterServer", "LocalSGD"):
            assert f"`mh.{name}(" in text
        for name in ("TensorParallel", "PipelineParallel", "Sharded", "Mesh"):
            assert f"`mh.{name}(" in text


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["English", "Chinese"])
def test_every_workload_has_a_program_that_is_there(page: Path) -> None:
    links = dict(re.findall(r"^\[(\w+)\]: (\S+)$", page.read_text(), re.M))
    programs = [(page.parent / link).resolve() for link in links.values()]
    assert len(programs) == 10 and all(program.parent == ROOT / "examples" for program in programs)
    assert all(f"][{name}]" in page.read_text() for name in links)
    if (ROOT / "examples").is_dir():
        assert [program for program in programs if not program.is_file()] == []
