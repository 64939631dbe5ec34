"""When a worker is taken for hung, as a pure rule; and what is read out of its stack."""

from __future__ import annotations

import faulthandler
import threading

import pytest
from torch.distributed import distributed_c10d

from manyhands.control.membership.hang_detection import (
    HangLimits,
    WorkerActivity,
    judge,
    main_stack,
    pace_of,
    place_in,
    waits_for_others,
)

LIMITS = HangLimits(heartbeat_s=3.0, hang_s=10.0)
QUICK = (0.1,) * 5


def activity(**known) -> WorkerActivity:
    usual = {"judged": True, "training": True, "heard_at": 100.0, "moved_at": 100.0, "step_s": QUICK}
    return WorkerActivity(**{"joined": True, **usual, **known})


@pytest.mark.parametrize(("now", "verdict"), [(102.9, "fine"), (103.1, "silent"), (200.0, "silent")])
def test_a_member_without_a_sign_of_life_is_silent(now, verdict):
    assert judge(activity(), LIMITS, now) == verdict
    assert judge(activity(training=False, step_s=()), LIMITS, now) == verdict


def test_a_worker_that_has_not_reported_a_step_may_take_its_time_unless_it_is_stopped():
    assert judge(activity(judged=False), LIMITS, 129.9) == "fine"
    assert judge(activity(judged=False), LIMITS, 130.1) == "silent so far", (
        "then the agent checks whether it is stopped"
    )
    assert judge(activity(judged=False, joined=False), LIMITS, 1000.0) == "fine"
    assert judge(activity(judged=False), HangLimits(heartbeat_s=60.0), 159.9) == "fine"


@pytest.mark.parametrize(("now", "verdict"), [(109.9, "fine"), (110.1, "slow"), (119.9, "slow"), (120.1, "stuck")])
def test_a_live_worker_without_progress_is_slow_and_then_stuck(now, verdict):
    assert judge(activity(heard_at=now), LIMITS, now) == verdict


def test_ten_of_its_slowest_steps_are_waited_for():
    slow = activity(heard_at=180.0, step_s=(8.0,) * 20)
    assert judge(slow, LIMITS, 179.0) == "fine"
    assert judge(slow, LIMITS, 181.0) == "slow"


def test_progress_is_expected_while_training_and_once_the_pace_is_known():
    assert judge(activity(heard_at=500.0, training=False), LIMITS, 500.0) == "fine"
    assert judge(activity(heard_at=500.0, step_s=(0.1, 0.1)), LIMITS, 500.0) == "fine"


def test_what_was_missed_while_the_agent_itself_stood_still_does_not_count():
    assert judge(activity(), LIMITS, 150.0, since=149.0) == "fine"
    assert judge(activity(), LIMITS, 152.1, since=149.0) == "silent"
    assert judge(activity(heard_at=200.0), LIMITS, 158.0, since=149.0) == "fine"


def test_one_slow_step_in_a_hundred_does_not_set_the_pace():
    assert pace_of((0.1,) * 99 + (50.0,)) == 0.1
    assert pace_of((0.1, 0.1)) is None


def _stuck_in_user_code(ready: threading.Event, end: threading.Event) -> None:
    ready.set()
    end.wait(60)


def test_the_stack_that_python_writes_is_understood(tmp_path):
    """The oracle is faulthandler itself, with another thread in it that must not be taken for the main one."""
    ready, end = threading.Event(), threading.Event()
    other = threading.Thread(target=_stuck_in_user_code, args=(ready, end))
    other.start()
    assert ready.wait(60)
    with (tmp_path / "dump").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    end.set()
    other.join()
    frames = main_stack(text)
    assert "_stuck_in_user_code" in text
    assert not any("_stuck_in_user_code" in frame for frame in frames)
    assert place_in(frames).startswith("test_hang.py line ")
    assert place_in(frames).endswith("in test_the_stack_that_python_writes_is_understood")
    assert not waits_for_others(frames)


def test_a_worker_in_a_collective_of_torch_waits_for_others() -> None:
    """Of torch's own, as a plain script calls them; our functions that wait are in test_waits.py."""
    frames = [f'  File "{distributed_c10d.__file__}", line 2800 in all_reduce', '  File "/x/train.py", line 9 in main']
    assert waits_for_others(frames)
    assert not waits_for_others(frames[1:])
    assert place_in([]) == ""
