"""docs/architecture.md names what is there, as does the page in Chinese, and the walk of a batch names the files that a
step really enters.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands import native
from manyhands.testing import RankPool
from tools.architecture_links import (
    CHINESE_PAGE,
    LINK,
    PAGE,
    Counts,
    counts,
    files_in,
    line_of,
    renewed,
    section,
    unresolved,
    walks,
)

PACKAGE = Path(mh.__file__).parent
TEXT, CHINESE = PAGE.read_text(), CHINESE_PAGE.read_text()
BATCH = "### Walk: a batch"
# Ranks of a pool have no agent, so nothing is sent to its display.
WITH_AN_AGENT = {"control/session/session.py", "control/session/request_line.py"}
# Its loop was entered before the step.
LOOP = {"training/loop/fit.py"}


@pytest.mark.parametrize("text", [TEXT, CHINESE], ids=["English", "Chinese"])
def test_every_name_is_defined_where_its_link_points(text: str) -> None:
    assert len(LINK.findall(text)) > 100
    assert not unresolved(text)
    assert renewed(text) == text, "python -m tools.architecture_links"


def test_a_link_whose_name_or_line_has_changed_is_found() -> None:
    link = LINK.search(TEXT)
    assert link is not None
    moved = TEXT.replace(link[0], link[0].replace(f"#L{link['line']}", "#L1"))
    assert renewed(moved) == TEXT
    assert unresolved(TEXT.replace(f"`{link['name']}`", "`Absent.name`"))
    assert line_of("../manyhands/native/plane.c", "mh_meet") is not None


def in_chinese(figures: Counts) -> str:
    return f"{figures.files} 个文件，换文件夹 {figures.folders} 次，换包 {figures.packages} 次。"


@pytest.mark.parametrize("heading", [*walks(TEXT), *walks(CHINESE)])
def test_the_figures_below_a_walk_are_those_of_its_links(heading: str) -> None:
    text = TEXT if heading in walks(TEXT) else CHINESE
    found = counts(files_in(walks(text)[heading]))
    assert f"\n{found}.\n" in section(text, heading) or f"\n{in_chinese(found)}\n" in section(text, heading)


def test_the_walk_of_a_batch_has_few_files_and_changes_of_folder() -> None:
    named = counts(files_in(walks(TEXT)[BATCH]))
    assert named.files <= 25
    assert named.folders <= 15


def test_every_package_is_in_the_picture() -> None:
    picture = section(TEXT, "## Two towers")
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"testing"}
    assert not {name for name in packages if not re.search(rf"\b{name}\b", picture)}


def test_twenty_changes_have_files_and_a_test() -> None:
    rows = re.findall(r"^\| (?!change |---)(.*) \| (.*) \| (.*) \|$", section(TEXT, "## Twenty changes"), re.M)
    assert len(rows) == 20
    for _, files, test in rows:
        paths = re.findall(r"`([\w/]+\.\w+)`", f"{files} {test}")
        assert len(paths) > 1
        assert not [one for one in paths if not (PACKAGE / one).exists() and not (PACKAGE.parent / one).exists()]


class Trace:
    """A hook that notes which files of manyhands a step enters, for each step in the middle of a call of `fit`."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        if step in (4, 5):
            self.steps.append([])
            sys.setprofile(self._note)
        elif step == 6:
            sys.setprofile(None)

    def _note(self, frame: FrameType, what: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if what == "call" and file.startswith(f"{PACKAGE}/"):
            self.steps[-1].append(file.removeprefix(f"{PACKAGE}/"))


def mean_loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))


def traced_steps() -> list[list[str]]:
    torch.manual_seed(0)
    x, trace = torch.randn(160, 8), Trace()
    trainer = mh.Trainer(
        make_model,
        mean_loss,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        slices=4,
        hooks=[trace],
        strategy="mirrored",
    )
    trainer.fit((x, x[:, :3].argmax(1)), epochs=1, batch_size=16)
    return trace.steps


@pytest.mark.skipif(native.library is None, reason="without the C extension workers do not share memory")
def test_the_walk_of_a_batch_names_the_files_that_a_step_enters(ranks: RankPool) -> None:
    """What one step enters and not the next, such as a report every ten seconds, is no part of the walk."""
    first, second = (set(files) for files in ranks(2, traced_steps)[0])
    named = {file for file in files_in(section(TEXT, BATCH)) if file.endswith(".py")}
    entered = {file for file in first & second if not file.startswith("testing/")} - {"__init__.py"}
    assert entered | LOOP == named - WITH_AN_AGENT
    assert f"enters {len(named)} Python files" in section(TEXT, BATCH)
