"""Every number survives a round trip through JSON, and the output is valid JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

import manyhands as mh
from manyhands import exact_json
from manyhands.errors import Preempted
from manyhands.events import EpochDone, Evaluated, StepDone, decode, encode
from manyhands.observe.recorder import parse_line
from manyhands.testing import RankPool
from manyhands.training.loop.recorded_calls import RecordedCalls
from tests.stopping import StopAt
from tests.training.workloads import MODELS, OPTIMIZERS, data, mean_loss

ODD = {"nothing": math.nan, "over": math.inf, "under": -math.inf, "fine": 0.1}


def strictly(raw: bytes) -> Any:
    def refuse(word: str) -> NoReturn:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(raw, parse_constant=refuse)


class Inner(msgspec.Struct):
    value: float
    text: str = "nan"


class Outer(msgspec.Struct):
    inner: Inner
    several: list[float]
    named: dict[str, float]
    perhaps: float | None = None


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 0.1, -0.0, 5e-324, 1.7976931348623157e308])
def test_every_number_of_a_struct_comes_back_as_it_was(number: float) -> None:
    value = Outer(Inner(number), [1.0, number], {"a": number}, number)
    raw = exact_json.encode(value, indent=2)
    strictly(raw)
    assert repr(exact_json.decode(raw, Outer)) == repr(value), "and the text that says nan is still text"


def test_results_of_calls_come_back_as_they_were(tmp_path: Path) -> None:
    warned: list[str] = []
    for result in ([{"epoch": 0, **ODD}], dict(ODD), None, {"dict": {"nan": {"tensor": 0}}}):
        calls = RecordedCalls(tmp_path / "calls", writes=lambda: True, warn=warned.append)
        calls.begin("evaluate")
        calls.finish(result)
        strictly((tmp_path / "calls" / "0001-evaluate.json").read_bytes())
        assert repr(calls.recorded()) == repr(result)
    assert not warned


def test_events_say_which_number_it_was_that_is_none() -> None:
    step = StepDone(
        step=1, epoch=0, loss=math.nan, rows=1, samples_per_s=math.inf, phases=dict(ODD), grad_norm=math.inf
    )
    for event in (step, EpochDone(epoch=0, step=1, results=dict(ODD)), Evaluated(step=1, results=dict(ODD), rows=3)):
        assert "nan" in str(strictly(encode(event)))
        assert repr(decode(encode(event))) == repr(event)
        assert repr(parse_line(encode(event))) == repr(event)
    assert strictly(encode(step))["lr"] is None


def test_events_of_earlier_versions_have_null_for_such_numbers() -> None:
    old = parse_line(b'{"event":"EpochDone","epoch":0,"step":1,"results":{"loss":null,"accuracy":0.5}}')
    assert isinstance(old, EpochDone)
    assert math.isnan(old.results["loss"])
    assert old.results["accuracy"] == 0.5


def odd_metric(value: float) -> Any:
    return lambda model, batch: batch[0].new_full((len(batch[0]),), value)


def odd_results(run_dir: str, stop_at: int | None) -> list[str]:
    trainer = mh.Trainer(
        MODELS["plain"],
        mean_loss,
        OPTIMIZERS["SGD"],
        metrics={name: odd_metric(value) for name, value in ODD.items()},
        slices=2,
        run_dir=run_dir,
        hooks=[StopAt(stop_at)],
    )
    found: list[str] = []
    try:
        found.append(repr(trainer.evaluate(data())))
        history = trainer.fit(data(), epochs=2, batch_size=30, validation=data(30))
        found.append(repr([{name: float(value) for name, value in row.items()} for row in history]))
    except Preempted:
        pass
    return found


def test_odd_results_come_back_to_every_worker_of_a_resumed_run(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks(2, odd_results, str(tmp_path / "whole"), None, run_dir=tmp_path / "whole")
    before = ranks(2, odd_results, str(tmp_path / "cut"), 4, run_dir=tmp_path / "cut")  # in the second epoch
    after = ranks(2, odd_results, str(tmp_path / "cut"), None, run_dir=tmp_path / "cut")
    assert "nan" in whole[0][1]
    assert "-inf" in whole[0][1]
    assert [one[0] for one in after] == [one[0] for one in before]
    assert after == whole
