"""Every program in docs/data.md runs unchanged, and what it calls `data` can be trained on."""

import re
from pathlib import Path

import pytest

from manyhands.data.sources import file_formats
from tests.data.data_cases import batches_of

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
PROGRAMS = [each for each in re.findall(r"```python\n(.*?)```", TEXT, re.S) if "mh.Trainer" not in each]


def test_there_is_something_to_run():
    assert len(PROGRAMS) == 8


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_the_programs_on_the_page_run(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "docs"}
    exec(compile(PROGRAMS[number], "data.md", "exec"), names)
    steps = [step for step in batches_of(names["data"], batch_size=8, slices=2, epochs=2) if list(step.mine())]
    assert {step.epoch for step in steps} == {0, 1}


def test_the_page_has_every_ending_of_a_file_that_can_be_read():
    table = re.findall(r"^\| (`\.[^|]*)\|", TEXT, re.M)
    assert {ending for cell in table for ending in re.findall(r"`(\.\w+)`", cell)} == set(file_formats._OPENERS)
