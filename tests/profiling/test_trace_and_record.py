"""The trace of all workers, and what a run's record says: pure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.errors import UsageError
from manyhands.events import Event, ResourcesUsed, RunStarted, StepDone
from manyhands.profiling.layer_times import OUTSIDE, layer_ranges, layer_times, merge_layers
from manyhands.profiling.recorded_run import read_run_times, times_of
from manyhands.profiling.trace_file import PhaseSpan, WorkerTrace, merge


def test_workers_whose_files_begin_at_other_moments_are_put_on_one_clock() -> None:
    def worker(rank: int, base_ns: int, at_us: float) -> WorkerTrace:
        event = {"ph": "X", "name": "aten::mm", "pid": 100 + rank, "tid": 7, "ts": at_us, "dur": 5.0}
        listed = {"ph": "X", "name": "PyTorch Profiler", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 1.0}
        trace = {"baseTimeNanoseconds": base_ns, "traceEvents": [event, listed]}
        moment = base_ns + int(1000 * at_us)
        return WorkerTrace(rank, 100 + rank, trace, [PhaseSpan("forward", moment - 2000, moment + 8000)])

    # The same moment, 1000.5 s after the epoch, in files that count from different ones.
    merged = merge([worker(0, 1000 * 10**9, 500_000.0), worker(1, 900 * 10**9, 100_500_000.0)])
    events = merged["traceEvents"]
    assert [event["ts"] for event in events if event["name"] == "aten::mm"] == [2.0, 2.0]
    assert [event["ts"] for event in events if event["name"] == "forward"] == [0.0, 0.0]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {100: "worker 0", 101: "worker 1"}
    assert not any(event["pid"] == "Spans" for event in events)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 512), nn.Linear(512, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.relu(self.wide(x)))


def test_backward_counts_for_the_layer_that_ran_the_operation() -> None:
    model, x = Halves(), torch.randn(256, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded, layer_ranges(model):
        for _ in range(2):
            model(x).pow(2).mean().backward()
    layers = {layer.name: layer for layer in layer_times(recorded.events(), model, 2)}
    assert {"wide", "narrow", "Halves", OUTSIDE} <= set(layers)
    assert layers["wide"].calls == 1 and layers["wide"].kind == "Linear"
    for name in ("wide", "narrow", "Halves"):  # Halves itself has the relu
        assert layers[name].forward_s > 0 and layers[name].backward_s > 0, name
    assert not model._forward_hooks and not model.wide._forward_pre_hooks
    whole = sum(event.cpu_time_total for event in recorded.events() if event.cpu_parent is None) / 2e6
    assert sum(layer.seconds for layer in layers.values()) == pytest.approx(whole, rel=1e-3), (
        "nothing is left out, and nothing counted twice"
    )
    slower = [type(layers["wide"])("wide", "Linear", 1.0, 1.0, 1)]
    assert merge_layers([list(layers.values()), slower])[0].forward_s == 1.0


def step(number: int, **phases: float) -> StepDone:
    took = sum(phases.values()) + 0.01
    return StepDone(step=number, epoch=0, loss=1.0, rows=8, samples_per_s=1.0, phases=phases, took_s=took)


def used(rank: int, *, steps: int = 10, step: int = 10, **phases: float) -> ResourcesUsed:
    return ResourcesUsed(
        rank=rank, step=step, steps=steps, seconds=10.0, cpu_s=5.0, peak_rss_bytes=1, slices=steps, phases=phases
    )


def started() -> RunStarted:
    return RunStarted(run="r", strategy="mirrored", workers=2, slices=2, precision="fp32", threads=1)


def test_the_record_of_a_run_shows_where_the_time_went() -> None:
    steps: list[Event] = [step(n, load=0.06, forward=0.01, backward=0.01, reduce=0.01) for n in range(1, 11)]
    found = times_of([[started(), *steps]])
    assert found is not None and found.holds_back == "data" and found.steps == 7
    assert found.shares == pytest.approx({"data": 0.6, "exchange": 0.1, "computation": 0.2, "other": 0.1})
    # Worker 0 waits for worker 1, which computes all the time: that is no slow exchange.
    chief, other = used(0, forward=1.0, reduce=8.0), used(1, forward=8.5, reduce=0.5)
    for files in ([[started(), *steps, chief], [other]], [[other], [started(), *steps, chief]]):
        found = times_of(files)
        assert found is not None and found.holds_back == "computation" and len(found.each) == 2
    assert found is not None
    assert found.each[0].phases["reduce"] == pytest.approx(0.8) and found.each[0].cores == 0.5
    assert "worker 0, per slice (1 a step): load 0.0 ms, forward 100.0 ms" in found.text()
    assert "2 workers x 1 thread, mirrored" in found.text() and "mh profile" in found.text()


def test_only_reports_of_the_last_call_count_whichever_host_wrote_them() -> None:
    earlier, later = [step(n, forward=0.1) for n in range(1, 6)], [step(n, forward=0.1) for n in range(6, 11)]
    chief = [started(), *earlier, used(0, forward=9.0), started(), *later, used(0, forward=1.0, steps=5)]
    before_restart = used(1, forward=9.0, steps=12, step=12)  # of an attempt that counted from step 1, on another host
    of_first_call, of_last_call = used(2, forward=9.0, steps=5, step=5), used(1, forward=2.0, steps=5)
    for files in ([[of_first_call, before_restart], chief, [of_last_call]], [[of_last_call], chief, [before_restart]]):
        found = times_of(files)
        assert found is not None
        assert {one.rank: one.phases["forward"] for one in found.each} == pytest.approx({0: 0.2, 1: 0.4})


def test_a_run_without_a_step_on_record_is_refused(tmp_path: Path) -> None:
    assert times_of([[started()]]) is None
    assert times_of([[step(1, load=0.1)]]) is not None, "its beginning may be missing"
    assert times_of([[started()]]) is None, "and nothing of another record is kept"
    (tmp_path / "run.json").write_text('{"run": "r", "created": "2026-01-01T00:00:00+00:00", "status": "failed"}')
    with pytest.raises(UsageError, match="no step on record"):
        read_run_times(tmp_path)


def test_a_nested_layer_is_not_counted_twice() -> None:
    def event(name: str, total: float, parent: Any = None, number: int = -1, start: float = 0.0) -> Any:
        moment = SimpleNamespace(start=start)
        return SimpleNamespace(
            name=name, cpu_time_total=total, cpu_parent=parent, sequence_nr=number, time_range=moment
        )

    outer = event("layer Halves", 100.0)
    inner = event("layer wide", 70.0, outer)
    linear = event("aten::linear", 60.0, inner, number=4, start=10.0)
    unrelated = event("aten::eq", 1.0, outer, number=4, start=5.0)  # no gradient, and the number of the next one
    back = event("autograd::engine::evaluate_function: AddmmBackward0", 30.0, None, number=4)
    times = {one.name: one for one in layer_times([outer, inner, unrelated, linear, back], Halves(), 1)}
    assert times["Halves"].forward_s == pytest.approx(30e-6) and times["Halves"].backward_s == 0
    assert times["wide"].forward_s == pytest.approx(70e-6) and times["wide"].backward_s == pytest.approx(30e-6)
