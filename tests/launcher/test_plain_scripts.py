"""Watching a script that is not ours: it sees the first batches, says at most one line, and never does harm."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.launcher.worker_process import foreign_scripts
from manyhands.launcher.worker_process.foreign_scripts import watched
from manyhands.spec.worker_identity import WorkerIdentity

LOADER = """
class _BaseDataLoaderIter:
    def __next__(self):
        return 1
"""


def identity(rank: int = 0, world_size: int = 2) -> WorkerIdentity:
    return WorkerIdentity(
        agent="none",
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        generation="1.1",
        incarnation=1,
    )


@pytest.fixture
def load_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a substitute for torch's loader, in a process that seems to use nothing of ours."""
    (tmp_path / "substitute_loader.py").write_text(LOADER)
    monkeypatch.setattr(foreign_scripts, "LOADER_MODULE", "substitute_loader")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (
        "manyhands.training.worker.worker",
        "manyhands.control.session.session",
        *foreign_scripts.OTHER_MEETINGS,
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield lambda: importlib.import_module("substitute_loader")._BaseDataLoaderIter
    sys.modules.pop("substitute_loader", None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if "manyhands" not in type(finder).__module__]


def test_the_second_batch_without_joining_is_reported_and_then_watching_ends(load_loader: Any, capsys: Any) -> None:
    with watched(identity()):
        kind = load_loader()
        hooked = kind.__next__
        assert [next_of(kind), next_of(kind)] == [1, 1]
        assert kind.__next__ is not hooked
        assert next_of(kind) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "nothing joins the 2 workers" in said[0]


def test_evaluation_and_other_ranks_are_silent(load_loader: Any, capsys: Any) -> None:
    with torch.no_grad(), watched(identity(rank=1)):
        kind = load_loader()
        assert [next_of(kind) for _ in range(3)] == [1, 1, 1]
    assert capsys.readouterr().err == ""


def test_trouble_inside_is_kept_from_the_script(load_loader: Any, monkeypatch: Any, capsys: Any) -> None:
    with watched(identity()):
        kind = load_loader()
        hooked = kind.__next__
        monkeypatch.setattr(torch, "is_grad_enabled", lambda: 1 / 0)
        assert next_of(kind) == 1
        assert kind.__next__ is not hooked
    assert "never joined" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "lines"), [(None, 1), (0, 1), (3, 0)])
def test_only_a_script_that_ends_well_gets_the_warning_at_its_end(
    load_loader: Any, capsys: Any, code: Any, lines: int
) -> None:
    with pytest.raises(SystemExit), watched(identity()):
        raise SystemExit(code)
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_one_worker_is_not_watched(load_loader: Any, capsys: Any) -> None:
    before = list(sys.meta_path)
    with watched(identity(world_size=1)), watched(None):
        assert sys.meta_path == before
    assert capsys.readouterr().err == ""


def next_of(kind: Any) -> Any:
    return next(kind())
