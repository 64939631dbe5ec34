"""Measured timeline of a pipeline's last step beside the ideal one of its schedule, as text, SVG and an event."""

from __future__ import annotations

import time

import msgspec

from manyhands.comm.axis import Axis
from manyhands.events import PipelineTimed
from manyhands.parallel.pipeline.schedule import Op
from manyhands.parallel.pipeline.stage_runner import StageRunner
from manyhands.parallel.pipeline.timeline import Timeline, TimelineSpan, draw, play
from manyhands.parallel.pipeline.timeline_svg import picture
from manyhands.private_files import write_private
from manyhands.training.worker.worker import Worker

__all__ = ["report_pipeline"]

PICTURE, TEXT = "pipeline.svg", "pipeline.txt"


class _StageTimes(msgspec.Struct, array_like=True):
    began: float
    spans: list[tuple[tuple[str, int, int], float, float]]
    most_alive: int


def report_pipeline(worker: Worker, runner: StageRunner, step: int) -> None:
    """Gather the stages' times of the last step; the chief writes the report. Collective over the pipeline."""
    timeline = _measured(worker.line("pipeline"), runner)
    if not worker.is_chief or timeline is None:
        return
    schedule = runner.schedule(runner.microbatches)
    theory = play(schedule)
    text = f"{draw(schedule)}\n\nmeasured in step {step}: bubble {timeline.bubble:.1%}\n"
    write_private(worker.home / TEXT, text.encode())
    titles = (
        (f"{schedule.name}, {schedule.microbatches} microbatches, in theory: bubble {theory.bubble:.1%}", theory),
        (f"measured in step {step}: bubble {timeline.bubble:.1%} of {1000 * timeline.makespan:.1f} ms", timeline),
    )
    write_private(worker.home / PICTURE, picture(titles).encode())
    worker.events.emit(
        PipelineTimed(
            time_s=time.time(),
            step=step,
            schedule=schedule.name,
            microbatches=schedule.microbatches,
            theory=theory.bubble,
            measured=timeline.bubble,
            path=str(worker.home / PICTURE),
        )
    )


def _measured(line: Axis, runner: StageRunner) -> Timeline | None:
    """Times count from when the first stage began; comparable because ranks of one host have one clock.

    None: a stage has no times, because its replica had no slice, or its worker was admitted after the last step.
    """
    spans = [((op.kind, op.stage, op.microbatch), start, stop) for op, start, stop in runner.spans]
    mine = _StageTimes(runner.began, spans, runner.most_alive)
    gathered = line.all_gather_bytes("times of stages", msgspec.msgpack.encode(mine))
    stages = [msgspec.msgpack.decode(data, type=_StageTimes) for data in gathered]
    if not all(stage.spans for stage in stages):
        return None
    first = min(stage.began for stage in stages)
    aligned = tuple(
        tuple(
            TimelineSpan(Op(*op), start + stage.began - first, stop + stage.began - first)
            for op, start, stop in stage.spans
        )
        for stage in stages
    )
    return Timeline(aligned, tuple(stage.most_alive for stage in stages))
