"""Servers that write a log: a host is lost with all that its memory had, and they make again what they had made."""

from __future__ import annotations

import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.errors import EnvironmentProblem, SpecError
from manyhands.native import why_not
from manyhands.parameter_server.engine.leased_engine import LeasedEngine
from manyhands.parameter_server.log.log_storage import Backups
from manyhands.parameter_server.log.write_ahead_log import WriteAheadLog
from manyhands.parameter_server.protocol.leases import Lease
from manyhands.parameter_server.protocol.messages import UpdateApplied
from manyhands.testing import RankPool
from tests.parameter_server.direct import Direct, World, train
from tests.parameter_server.test_direct import OPTIMIZERS, in_one_process, values_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]

# Four answers a step and more: in the middle of the first epoch, and of the second.
EARLY, LATE = 17, 45


def without_backups(number: int) -> Backups:
    return Backups(number, list, NotImplemented)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of all that workers compute, as they do."""
    steps: list[int] = []
    original = LeasedEngine.compute

    def compute(self: LeasedEngine, step: Any, work: Lease, version: int) -> None:
        steps.append(work.step)
        original(self, step, work, version)

    monkeypatch.setattr(LeasedEngine, "compute", compute)
    return steps


@pytest.mark.parametrize(
    ("name", "answers", "durability"),
    [
        ("momentum", EARLY, "wal"),
        ("AdamW", LATE, "wal"),
        ("NAdam", LATE, "replica"),
        ("SGD", 10**9, "wal"),
    ],
)
def test_a_lost_host_takes_nothing_along(
    ranks: RankPool, tmp_path: Path, computed: list[int], name: str, answers: int, durability: str
) -> None:
    clip = 1.0 if name in ("AdamW", "NAdam") else None
    asked: dict[str, Any] = {"clip": clip, "servers": 2, "durability": durability, "logs": tmp_path}
    asked["backups"] = without_backups if durability == "replica" else None
    *_, before = train("sync", OPTIMIZERS[name], die_every=5, answers=answers, **asked)
    assert before, "no update was reported before the end"
    computed.clear()
    model, optimizer, updates = train("sync", OPTIMIZERS[name], again=True, **asked)
    assert set(computed).isdisjoint(done.step for done in before), "a reported update is computed again"
    (expected,) = ranks(1, in_one_process, name, clip)
    found = values_of(model, optimizer)
    assert [key for key in expected if not np.array_equal(expected[key], found[key])] == []
    assert [done.update for done in updates] == list(range(1, 15))
    assert updates[: len(before)] == before, "workers receive another update than before"


ASKED: dict[str, Any] = {"clip": None, "durability": "wal"}


def test_a_log_of_other_servers_is_refused(tmp_path: Path) -> None:
    train("async", OPTIMIZERS["SGD"], servers=2, answers=5, logs=tmp_path, **ASKED)
    with pytest.raises(SpecError, match="made with servers=2, but now servers=1"):
        train("async", OPTIMIZERS["SGD"], servers=1, again=True, logs=tmp_path, **ASKED)


def test_a_log_that_is_gone_for_one_server_is_missed(tmp_path: Path) -> None:
    train("sync", OPTIMIZERS["SGD"], servers=2, answers=EARLY, logs=tmp_path, **ASKED)
    shutil.rmtree(tmp_path / "server-1")
    with pytest.raises(EnvironmentProblem, match=r"The log of server 1 has updates to step 0, others to step \d"):
        train("sync", OPTIMIZERS["SGD"], servers=2, again=True, logs=tmp_path, **ASKED)


def test_a_run_that_begins_anew_has_no_use_for_a_log(tmp_path: Path, computed: list[int]) -> None:
    train("async", OPTIMIZERS["SGD"], servers=1, answers=5, logs=tmp_path, **ASKED)
    computed.clear()
    train("async", OPTIMIZERS["SGD"], servers=1, answers=2, logs=tmp_path, **ASKED)
    assert computed[0] == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_worker_receives_an_update_before_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    happened: list[str] = []

    def note(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            happened.append(what)
            return result

        monkeypatch.setattr(owner, name, noted)

    def deliver(self: Direct, outbox: Any) -> Any:
        reported = any(isinstance(message, UpdateApplied) or getattr(message, "done", ()) for _, message in outbox)
        happened.extend(["reported"] * reported)
        return original(self, outbox)

    original = Direct._deliver
    monkeypatch.setattr(Direct, "_deliver", deliver)
    note(WriteAheadLog, "write", "written")
    note(os, "fsync", "on disk")
    train(mode, OPTIMIZERS["SGD"], servers=1, answers=EARLY, logs=tmp_path, **ASKED)
    assert "reported" in happened
    assert ("written", "reported") not in pairwise(happened)


def test_a_server_that_never_had_an_interval_leaves_no_log(tmp_path: Path) -> None:
    world = World("sync", OPTIMIZERS["SGD"], None, 1, {"durability": "wal"}, logs=tmp_path / "updates")
    assert (tmp_path / "updates" / "server-0").is_dir()
    world.link.close_servers()
    assert list(tmp_path.iterdir()) == []
