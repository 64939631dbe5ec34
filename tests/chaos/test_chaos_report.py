"""What a report says of made-up histories."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from manyhands.chaos.chaos_report import ChaosReport, Weights, judge
from manyhands.chaos.fault_injection import Strike
from manyhands.chaos.fault_schedule import Fault
from manyhands.cli.start.chaos import _findings
from manyhands.events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    GenerationStarted,
    Resumed,
    RunEnded,
    RunStarted,
    ServerLost,
    ServerWentOn,
    StepDone,
    Warned,
    WorkerLost,
)

PID = 77


def step(number: int, time_s: float, generation: str = "1.1") -> StepDone:
    return StepDone(
        time_s=time_s, step=number, epoch=0, loss=1.0, rows=4, samples_per_s=1.0, phases={},
        start=(0, 4 * (number - 1)), generation=generation,
    )  # fmt: skip


def generation(name: str, time_s: float) -> GenerationStarted:
    return GenerationStarted(time_s=time_s, generation=name, workers=2, hosts=1)


def lost(time_s: float, pid: int = PID) -> WorkerLost:
    return WorkerLost(time_s=time_s, rank=1, host="h", pid=pid, reason="SIGKILL")


def strike(kind: Any = "kill", time_s: float = 103.5, **more: Any) -> Strike:
    lasts_s = 2.0 if kind in ("slow", "disk") else 0.0
    until_s = time_s + lasts_s if lasts_s else None
    facts = {"rank": 1, "slot": 1, "pid": PID, "until_s": until_s, **more}
    return Strike(fault=Fault(1, time_s - 101.0, kind, 1, lasts_s), time_s=time_s, **facts)


def steps(first: int, last: int, name: str = "1.1") -> list[Event]:
    """One a second, from second 101 on."""
    return [step(number, 100.0 + number, name) for number in range(first, last + 1)]


UNDISTURBED = [generation("1.1", 100.0), *steps(1, 9)]


def report(events: list[Event], *strikes: Strike, exit_code: int = 0, weights: Weights | None = None) -> ChaosReport:
    return judge(
        strikes, events, UNDISTURBED, exit_code=exit_code, scheduled=len(strikes), minutes=1.0, weights=weights
    )


def test_a_kill_is_recovered_from_with_the_first_step_of_a_later_generation() -> None:
    in_flight = step(4, 103.6)  # the others had all they needed of it
    after = [lost(103.7), generation("1.2", 103.8), *steps(5, 9, "1.2")]
    found = report([generation("1.1", 100.0), *steps(1, 3), in_flight, *after], strike())
    (one,) = found.outcomes
    assert (one.detected_s, one.recovered_s) == (pytest.approx(0.2), pytest.approx(1.5))
    assert (one.who, one.at_s, one.steps_lost, found.passed) == ("worker 1", 2.5, 0, True)
    assert found.recovering_s == pytest.approx(1.5)


def test_a_lost_worker_that_the_run_never_notices_counts_as_not_recovered() -> None:
    found = report([*UNDISTURBED, lost(105.0, pid=PID + 1), generation("1.2", 105.0)], strike())
    assert found.outcomes[0].is_bad and not found.passed


def test_steps_made_twice_are_put_down_to_the_fault_and_count_once() -> None:
    back = [lost(103.6), generation("2.1", 103.7), Resumed(step=2, epoch=0, path="c")]
    found = report(
        [generation("1.1", 100.0), *steps(1, 3), *back, step(3, 105.0, "2.1"), step(4, 106.0, "2.1")], strike()
    )
    assert (found.outcomes[0].steps_lost, found.ledger.steps_lost, found.steps) == (1, 1, 3)
    assert found.goodput == pytest.approx(3 / 5)
    assert found.passed


def test_the_loss_of_an_agent_is_noticed_when_a_generation_continues_without_its_workers() -> None:
    joined = GenerationStarted(time_s=103.6, generation="1.2", workers=2, hosts=1, why="1 joined")
    without = GenerationStarted(time_s=104.5, generation="1.3", workers=1, hosts=1, why="rank 1 on b (pid 78) lost")
    events = [generation("1.1", 100.0), *steps(1, 3), joined, *steps(4, 4, "1.2"), without, *steps(5, 6, "1.3")]
    [one] = report(events, strike("agent", others=[78, 79])).outcomes
    assert (one.who, one.detected_s, one.recovered_s) == ("and its 2 workers", 1.0, 1.5)


def test_a_server_is_recovered_from_with_the_first_update_of_its_successor() -> None:
    gone = ServerLost(time_s=103.6, server=1, host="h", pid=PID, reason="SIGKILL")
    of_another = ServerWentOn(time_s=104.0, server=0, pid=8, step=3)
    again = ServerWentOn(time_s=105.5, server=1, pid=9, step=4)
    found = report([*UNDISTURBED, gone, of_another, again], strike("kill-server"))
    (one,) = found.outcomes
    assert (one.who, one.detected_s, one.recovered_s) == ("server 1", pytest.approx(0.1), 2.0)
    assert found.passed and found.recovering_s == 2.0
    assert report([*UNDISTURBED, gone, of_another], strike("stop-server")).outcomes[0].is_bad
    assert report([*UNDISTURBED, again], strike("kill-server")).outcomes[0].is_bad, "the run never noticed its loss"


@pytest.mark.parametrize(("mode", "expected"), [("", True), ("sync", True), ("ssp", False), ("async", False)])
def test_servers_that_apply_gradients_as_they_come_need_not_end_with_equal_weights(mode: str, expected: bool) -> None:
    started = RunStarted(
        run="r", strategy="parameter_server", workers=2, slices=2, precision="fp32", threads=1, mode=mode
    )
    other = Weights(step=9, reference_step=9, tensors=3, different=["a"])
    found = report([started, *UNDISTURBED], weights=other)
    assert (found.expects_equal, found.passed) == (expected, not expected)
    text = "\n".join(_findings(found))
    assert ("1 of 3 tensors DIFFER" if expected else f"different at step 9; with mode={mode!r}") in text
    assert not report([started, *UNDISTURBED], weights=replace(other, step=8)).passed


def test_a_coordinator_is_back_when_steps_continue_after_its_loss_was_seen() -> None:
    seen = Warned(time_s=103.6, text="the coordinator (pid 5) was killed; restarting it, training continues")
    found = report([*UNDISTURBED, seen], strike("coordinator"))
    assert (found.outcomes[0].detected_s, found.outcomes[0].recovered_s) == (pytest.approx(0.1), pytest.approx(0.5))
    assert report(UNDISTURBED, strike("coordinator")).outcomes[0].is_bad


def test_a_full_disk_is_over_when_a_checkpoint_is_committed_after_it() -> None:
    failed = CheckpointFailed(time_s=104.0, step=4, reason="no space")
    saved = CheckpointSaved(time_s=107.0, step=6, path="c", num_bytes=1, seconds=0.1, blocked_s=0.0)
    (one,) = report([*UNDISTURBED, failed, saved], strike("disk")).outcomes
    assert (one.who, one.detected_s, one.recovered_s) == ("all workers", 0.5, 3.5)
    assert report([*UNDISTURBED, failed], strike("disk")).outcomes[0].is_bad
    later = CheckpointFailed(time_s=106.0, step=6, reason="no space")  # when this fault was over
    for events in (UNDISTURBED, [*UNDISTURBED, later]):
        (one,) = report(events, strike("disk")).outcomes
        assert (one.note, one.detected_s) == ("no checkpoint was due in the meantime", None)


def test_a_slow_worker_is_to_be_borne_and_its_steps_are_counted() -> None:
    assert report(UNDISTURBED, strike("slow")).outcomes[0].note == "2 steps in its 2 s"
    assert report([*UNDISTURBED, lost(104.0)], strike("slow")).outcomes[0].note == "the worker was lost in the meantime"


def test_a_run_that_ends_well_has_come_through_what_struck_it_last() -> None:
    end = RunEnded(time_s=110.0, exit_code=0, step=9, reason="")
    assert report([*UNDISTURBED, end], strike(time_s=109.5)).passed
    assert not report([*UNDISTURBED, RunEnded(time_s=110.0, exit_code=1, step=9, reason="")], strike()).passed


def test_a_fault_without_a_victim_says_so_and_is_no_failure() -> None:
    skipped = strike(skipped="there was no second healthy worker for 30 s")
    after = [lost(103.7), generation("1.2", 103.8), *steps(5, 9, "1.2")]
    found = report([generation("1.1", 100.0), *steps(1, 4), *after], strike(), skipped)
    assert found.outcomes[1].skipped and found.passed


def test_a_run_that_nothing_struck_has_shown_nothing() -> None:
    assert not report(UNDISTURBED, strike(skipped="there was no second healthy worker for 30 s")).passed
    assert not judge([], UNDISTURBED, UNDISTURBED, exit_code=0, scheduled=3, minutes=1.0).passed
    assert report(UNDISTURBED).passed  # nothing was to strike it


def test_weights_must_be_there_of_the_same_step_and_equal() -> None:
    def weights(**facts: Any) -> Weights:
        return Weights(**{"step": 9, "reference_step": 9, "tensors": 3, "different": [], **facts})

    assert report(UNDISTURBED, weights=weights()).passed
    for wrong in ({"different": ["a"]}, {"step": 8}, {"tensors": 0}):
        assert not report(UNDISTURBED, weights=weights(**wrong)).passed


def test_a_step_committed_twice_or_a_run_that_failed_does_not_pass() -> None:
    assert not report([*UNDISTURBED, generation("1.2", 110.0), step(9, 111.0, "1.2")]).passed
    assert not report(UNDISTURBED, exit_code=4).passed
    started = RunStarted(run="r", strategy="mirrored", workers=2, slices=2, precision="fp32", threads=1, exact=True)
    assert report([started, *UNDISTURBED]).exact and not report(UNDISTURBED).exact


def test_a_killed_template_is_recovered_from_with_a_step_after_it_was_replaced_and_a_stopped_one_at_once() -> None:
    died = Warned(time_s=105.5, text="the template process, which workers are forked from, died; it was restarted")
    killed, stopped = strike("kill-template", 103.5), strike("stop-template", 106.5)
    found = report([*UNDISTURBED, died], killed, stopped)
    one, other = found.outcomes
    assert (one.who, one.detected_s, one.recovered_s) == ("template", pytest.approx(2.0), pytest.approx(2.5))
    assert (other.who, other.detected_s, other.recovered_s) == ("template", None, pytest.approx(0.5))
    assert report(UNDISTURBED, killed).outcomes[0].is_bad, "no agent has noticed it"
