"""Causes and consequences, and when a failure is worth another attempt."""

from __future__ import annotations

import msgspec
import pytest

from manyhands.control.membership.failure_policy import EndedWorker, RetryDecision, attribute, judge, signature
from manyhands.control.messages.failure import Failure, WorkerEnd, render, short


def end(rank: int, kind: str = "exception", **more) -> WorkerEnd:
    return WorkerEnd(rank=rank, host="h", pid=100 + rank, kind=kind, **more)


VALUE = {"error": "ValueError", "message": "no", "exit_code": 1, "step": 3}
PEER = {"error": "PeerTimeout", "message": "rank 1 did not come", "bases": ["PeerTimeout", "PeerLost"], "exit_code": 1}
GLOO = {"error": "RuntimeError", "message": "[enforce fail] Connection closed by peer [127.0.0.1]:4", "exit_code": 1}


@pytest.mark.parametrize("consequence", [PEER, GLOO, {"error": "BrokenPipeError", "bases": ["BrokenPipeError"]}])
def test_an_error_about_a_lost_peer_seen_first_is_still_the_consequence(consequence):
    first, others, certain = attribute(
        [EndedWorker(end(0, **consequence), 1.0), EndedWorker(end(1, "signal", signal=9), 1.1)]
    )
    assert first.rank == 1
    assert [other.rank for other in others] == [0]
    assert not certain, "judged by kind, and said so"


def test_among_equals_the_earliest_is_first_and_that_is_certain():
    first, _, certain = attribute(
        [EndedWorker(end(2, **VALUE), 5.0), EndedWorker(end(1, **VALUE), 4.0), EndedWorker(end(0, "stopped"), 1.0)]
    )
    assert (first.rank, certain) == (1, True)


def test_a_timeout_that_no_death_caused_is_itself_the_first_failure():
    first, _, certain = attribute([EndedWorker(end(0, **PEER), 1.0), EndedWorker(end(1, "stopped"), 1.5)])
    assert (first.rank, certain) == (0, True)


def verdict(first: WorkerEnd, times: int = 1, **more):
    settings = {"restarts": 0, "max_restarts": 3, "progressed": True, **more}
    return judge(first, [signature(first)] * times, **settings)


def test_the_policy_table():
    assert verdict(end(0, "signal", signal=9)).restart
    assert verdict(end(0, "lost")).restart
    assert verdict(end(0, **VALUE)).restart
    assert not verdict(end(0, **VALUE), progressed=False).restart
    assert verdict(end(0, **VALUE), progressed=False, always_restart=True).restart
    assert verdict(end(0, **PEER), progressed=False).restart, "a lost peer is no bug of the script in the first step"
    assert verdict(end(0, **VALUE), times=2).restart
    assert not verdict(end(0, **VALUE), times=3).restart
    assert not verdict(end(0, "signal", signal=9), restarts=3).restart
    assert verdict(end(0, "signal", signal=9), restarts=3).exit_code == 4
    assert verdict(end(0, "lost"), restarts=3).exit_code == 4
    assert verdict(end(0, **VALUE), restarts=3).exit_code == 1
    assert verdict(end(0, "exit", exit_code=5), restarts=3).exit_code == 1
    assert verdict(end(0, "exit", exit_code=70), restarts=3).exit_code == 70
    assert verdict(end(0, "exit", exit_code=2)).exit_code == 2
    assert verdict(end(0, **{**VALUE, "exit_code": 3})).exit_code == 3


def test_an_error_of_the_maths_is_not_tried_again_because_a_run_is_repeatable():
    nan = end(0, error="NonFinite", message="loss is nan", bases=["NonFinite", "TrainingFailed"], exit_code=1)
    assert verdict(nan) == RetryDecision(False, 1, "a run is repeatable, so this step would fail again")


def test_the_block_says_everything_a_person_needs_and_nothing_a_terminal_obeys():
    failure = Failure(
        run="r-7",
        exit_code=4,
        reason="the restart budget of 2 is spent",
        attempt=3,
        max_attempts=3,
        step=1842,
        first=end(
            3,
            "signal",
            signal=9,
            clock="14:02:11",
            memory="kernel OOM: rss 7.9 GiB of 8.0 GiB when last seen",
            stderr=["loading", "\x1b[2Jboom"],
            step=1842,
            phase="backward",
            log="runs/r-7/rank-3.err",
        ),
        certain=True,
        followers=[end(0, **GLOO), end(1, **GLOO), end(2, "stopped"), end(4, "signal", signal=9)],
        committed_step=1800,
        committed_path="checkpoints/step-1800",
        resume="mh run --run-dir runs/r-7 train.py",
    )
    text = render(failure)
    assert text.splitlines()[0] == "run r-7 failed at step 1842 (attempt 3 of 3): the restart budget of 2 is spent"
    for words in (
        "rank 3 on h (pid 103)  signal 9 (SIGKILL)  at 14:02:11",
        "step 1842, backward",
        "rss 7.9 GiB of 8.0 GiB when last seen (heuristic)",
        "ranks 0, 1 (RuntimeError",
        "rank 2 (stopped by its agent); rank 4 (the same)",
        "step 1800  checkpoints/step-1800",
        "mh run --run-dir runs/r-7 train.py",
        "runs/r-7/rank-3.err",
        "\\x1b[2Jboom",
    ):
        assert words in text
    assert "\x1b" not in text
    assert text.splitlines()[-1] == "  resume          mh run --run-dir runs/r-7 train.py", "what to type comes last"
    assert short(failure.first) == "rank 3 on h (pid 103) died: SIGKILL"


def test_an_error_with_its_traceback_is_said_once_and_doubt_about_who_was_first_is_said():
    raised = end(1, "exception", error="ValueError", message="no", traceback="Traceback ...:\n  line\nValueError: no")
    block = Failure(
        run="r", exit_code=1, reason="?", attempt=1, max_attempts=4, step=1, first=raised, certain=False,
        followers=[end(0, "exception", error="ValueError", message="no")],
    )  # fmt: skip
    text = render(block)
    assert text.count("ValueError") == 1, text
    assert "rank 0 (the same)" in text and "not by a clock alone" in text


def test_lines_of_standard_error_that_were_seen_are_not_shown_again():
    left = end(0, "exit", exit_code=2, stderr=["usage: train.py", "unknown flag"])
    block = Failure(run="r", exit_code=1, reason="?", attempt=1, max_attempts=1, step=None, first=left, certain=True)
    assert "unknown flag" in render(block) and "unknown flag" in render(block, seen=["unknown flag"])
    assert "unknown flag" not in render(block, seen=["before", "usage: train.py", "unknown flag"])


def test_what_was_asked_wrongly_from_the_first_is_not_to_be_resumed():
    wrong = Failure(
        run="r", exit_code=2, reason="?", attempt=1, max_attempts=4, step=None, first=end(0, "exception"), certain=True,
        resume="mh run train.py",
    )  # fmt: skip
    assert "resume" not in render(wrong)
    assert "mh run train.py" in render(msgspec.structs.replace(wrong, committed_step=3))
    assert "mh run train.py" in render(msgspec.structs.replace(wrong, exit_code=1))


def test_a_hung_worker_is_reported_as_hung_with_the_line_where_it_was():
    hung = end(1, "hung", message="no sign of life for 3.0 s, in step 7, train.py line 3, in forward", signal=9)
    assert short(hung) == (
        "rank 1 on h (pid 101) died: hung: no sign of life for 3.0 s, in step 7, train.py line 3, in forward"
    )
    first, _, _ = attribute([EndedWorker(end(0, **PEER), 1.0), EndedWorker(hung, 1.1)])
    assert first.rank == 1
    verdict = judge(hung, [signature(hung)], restarts=0, max_restarts=3, progressed=False)
    assert verdict.restart, "another process may not hang"
