"""Pipeline schedules as data, against torch's own where both define the same, and against the formulas of theory."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torchs

from manyhands.errors import ManyhandsError, SpecError
from manyhands.parallel.pipeline.schedule import SCHEDULES, Op, Schedule, make_schedule
from manyhands.parallel.pipeline.timeline import Durations, draw, needs, play

asked = st.one_of(
    st.tuples(st.sampled_from(("gpipe", "1f1b")), st.integers(1, 6), st.integers(1, 14), st.just(1)),
    st.tuples(st.just("interleaved"), st.integers(1, 6), st.integers(1, 14), st.integers(1, 3)),
    st.tuples(st.just("zero_bubble"), st.integers(1, 6), st.integers(1, 14), st.integers(1, 2)),
)
times = st.floats(0.01, 10.0)


@settings(deadline=None, max_examples=40)
@given(asked)
def test_every_stage_does_everything_once_on_its_own_rank(asked: tuple[str, int, int, int]) -> None:
    schedule = make_schedule(*asked)
    kinds = "FBW" if schedule.splits_backward else "FB"
    everything = {Op(k, s, m) for k in kinds for s in range(schedule.stages) for m in range(schedule.microbatches)}
    assert sorted(chain(*schedule.rows)) == sorted(everything)
    for rank, row in enumerate(schedule.rows):
        assert {op.stage for op in row} == set(schedule.stages_of(rank))
        assert len(schedule.stages_of(rank)) == schedule.chunks


@settings(deadline=None, max_examples=40)
@given(asked, st.data())
def test_nothing_starts_before_what_it_needs_with_any_durations(
    asked: tuple[str, int, int, int], data: st.DataObject
) -> None:
    schedule = make_schedule(*asked)
    lengths = st.lists(times, min_size=schedule.stages, max_size=schedule.stages).map(tuple)
    durations = Durations(data.draw(lengths), data.draw(lengths), 0.3, data.draw(st.floats(0.0, 3.0)))
    timeline = play(schedule, durations)
    spans = {span.op: span for row in timeline.spans for span in row}
    for span in spans.values():
        for needed in needs(span.op, schedule):
            assert spans[needed].stop <= span.start
    for row in timeline.spans:
        assert all(before.stop <= after.start for before, after in pairwise(row))
    assert 0.0 <= timeline.bubble < 1.0


@settings(deadline=None, max_examples=40)
@given(asked)
def test_microbatches_are_done_in_ascending_order_on_every_rank(asked: tuple[str, int, int, int]) -> None:
    schedule = make_schedule(*asked)
    last = "W" if schedule.splits_backward else "B"
    for row in schedule.rows:
        left = [schedule.chunks] * schedule.microbatches
        done = []
        for op in row:
            if op.kind == last:
                left[op.microbatch] -= 1
                if not left[op.microbatch]:
                    done.append(op.microbatch)
        assert done == list(range(schedule.microbatches))


def torch_rows(kind: Any, ranks: int, microbatches: int, chunks: int) -> list[list[Op]]:
    """The rows of a torch schedule, from its definition alone: no stage, no process group."""
    found = []
    for rank in range(ranks):
        schedule = object.__new__(kind)
        schedule._num_stages = schedule.num_stages = ranks * chunks
        schedule._n_microbatches, schedule.pp_group_size, schedule.rank = microbatches, ranks, rank
        schedule.n_local_stages, schedule.number_of_rounds = chunks, max(1, microbatches // ranks)
        schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
        single = issubclass(kind, torchs.PipelineScheduleSingle)
        order = schedule._get_pipeline_order()[rank] if single else schedule._calculate_single_rank_operations(rank)
        actions = [action for action in order if action is not None and action.computation_type.name in TORCH_KINDS]
        found.append([Op(TORCH_KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in actions])
    return found


TORCH_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}


@pytest.mark.parametrize(
    ("name", "kind", "chunks"),
    [
        ("gpipe", torchs.ScheduleGPipe, 1),
        ("1f1b", torchs.Schedule1F1B, 1),
        ("interleaved", torchs.ScheduleInterleaved1F1B, 2),
        ("interleaved", torchs.ScheduleInterleaved1F1B, 3),
        ("zero_bubble", torchs.ScheduleInterleavedZeroBubble, 1),
        ("zero_bubble", torchs.ScheduleZBVZeroBubble, 2),
    ],
)
@pytest.mark.parametrize(("ranks", "rounds"), [(2, 1), (2, 3), (3, 2), (4, 1), (4, 4)])
def test_rows_are_torchs_where_torch_defines_them(name: str, kind: Any, chunks: int, ranks: int, rounds: int) -> None:
    ours = make_schedule(name, ranks, ranks * rounds, chunks)
    # Torch's listing of 1f1b leaves out the last rank's first forward, and has one too many at its end.
    compared = slice(ranks - 1) if name == "1f1b" else slice(ranks)
    assert [list(row) for row in ours.rows][compared] == torch_rows(kind, ranks, ranks * rounds, chunks)[compared]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rounds", [2, 4])
def test_bubbles_are_those_of_theory(ranks: int, rounds: int) -> None:
    """With a backward of two forwards, whose halves are even: waiting over all time, in units of a forward."""
    m = ranks * rounds
    waiting = {("gpipe", 1): 3 * (ranks - 1), ("1f1b", 1): 3 * (ranks - 1), ("zero_bubble", 1): ranks - 1}
    for (name, chunks), units in waiting.items():
        bubble = play(make_schedule(name, ranks, m, chunks)).bubble
        assert bubble == pytest.approx(units / (3 * m + units)), name
    interleaved = play(make_schedule("interleaved", ranks, m)).bubble
    assert interleaved == pytest.approx(3 * (ranks - 1) / (6 * m + 3 * (ranks - 1)))
    assert play(make_schedule("zero_bubble", ranks, m)).bubble == pytest.approx((ranks - 1) / (6 * m + ranks - 1))


def test_1f1b_keeps_fewer_activations_than_gpipe() -> None:
    assert play(make_schedule("gpipe", 4, 8)).most_alive == (8, 8, 8, 8)
    assert play(make_schedule("1f1b", 4, 8)).most_alive == (4, 3, 2, 1)
    assert play(make_schedule("zero_bubble", 4, 8, 1)).most_alive == (4, 4, 4, 4)
    # Of half the size each: a rank has two stages.
    assert play(make_schedule("zero_bubble", 4, 8)).most_alive == (8, 8, 8, 8)


def test_a_schedule_prints_as_a_grid_with_its_bubble() -> None:
    assert draw(make_schedule("1f1b", 2, 3)).splitlines() == [
        "1f1b: 2 ranks x 1 stages, 3 microbatches, bubble 25.0%, activations kept 2 1",
        "rank 0 │F0 F1       B0····F2 B1····   B2····",
        "rank 1 │   F0 B0····F1 B1····F2 B2····",
    ]


def test_rows_that_wait_for_each_other_are_reported() -> None:
    good = make_schedule("1f1b", 2, 1)
    bad = msgspec.structs.replace(good, rows=(good.rows[0][::-1], good.rows[1]))
    with pytest.raises(ManyhandsError, match="rank 0 at B0 of stage 0, rank 1 at F0 of stage 1"):
        play(bad)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("zigzag", 2, 2, None), "no pipeline schedule 'zigzag'"),
        (("1f1b", 2, 0, None), "microbatches above 0, not 0"),
        (("1f1b", 2, 2, 2), "one stage per rank, not chunks=2"),
        (("zero_bubble", 2, 2, 3), "one or two stages per rank, not chunks=3"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_with_a_choice_that_works(asked: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words) as refused:
        make_schedule(*asked)
    assert refused.value.fix


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_survives_the_wire(name: str) -> None:
    schedule = make_schedule(name, 2, 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(schedule), type=Schedule) == schedule
