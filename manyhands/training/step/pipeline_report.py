"""What a pipeline's last step looked like on its stages, beside what its schedule promises: for people to look at."""

from __future__ import annotations

import time

import msgspec

from manyhands.comm.axis import Axis
from manyhands.events import PipelineTimed
from manyhands.parallel.pipeline.schedule import Op
from manyhands.parallel.pipeline.stage_runner import StageRunner
from manyhands.parallel.pipeline.timeline import Span, Timeline, draw, play
from manyhands.parallel.pipeline.timeline_svg import picture
from manyhands.private_files import write_private
from manyhands.training.worker.worker import Worker

__all__ = ["report_pipeline"]

PICTURE, TEXT = "pipeline.svg", "pipeline.txt"


class _Row(msgspec.Struct, array_like=True):
    began: float
    spans: list[tuple[tuple[str, int, int], float, float]]
    most_alive: int


def report_pipeline(worker: Worker, runner: StageRunner, step: int) -> None:
    """Bring the stages' times of the last step together, and tell of them. By all workers of the pipeline."""
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
    worker.emit(
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
    """From the begin of whichever stage began first; ranks of one host have one clock.

    None: a stage has taken no step, because its replica had no slice, or its worker was admitted after the last one.
    """
    spans = [((op.kind, op.stage, op.microbatch), start, stop) for op, start, stop in runner.spans]
    mine = _Row(runner.began, spans, runner.most_alive)
    told = line.all_gather_bytes("times of stages", msgspec.msgpack.encode(mine))
    rows = [msgspec.msgpack.decode(data, type=_Row) for data in told]
    if not all(row.spans for row in rows):
        return None
    first = min(row.began for row in rows)
    aligned = tuple(
        tuple(Span(Op(*op), start + row.began - first, stop + row.began - first) for op, start, stop in row.spans)
        for row in rows
    )
    return Timeline(aligned, tuple(row.most_alive for row in rows))
