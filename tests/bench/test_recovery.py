"""What is made of noted commits, and of targets in absolute numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.recovery.commits import Commit, commits_between, first_in_later, read_commits, stall, step_times
from bench.recovery.soak import Held, _leaks
from bench.results.compare import Measured, judge
from bench.results.report import outcome, table, wish
from bench.results.table import Row, Target
from bench.servers.served_kills import first_after


def test_commits_of_all_workers_are_read_by_time_and_a_torn_line_waits(tmp_path: Path) -> None:
    (tmp_path / "commits-1").write_text("1000000000 1 7.1\n3000000000 2 7.10\n40000")
    (tmp_path / "commits-2").write_text("2000000000 1 7.1\n")
    found = read_commits(tmp_path)
    assert found == [Commit(1.0, 1, (7, 1)), Commit(2.0, 1, (7, 1)), Commit(3.0, 2, (7, 10))]
    assert step_times(found) == [1.0, 3.0]
    assert first_in_later(found, (7, 2)) == found[2] and first_in_later(found, (7, 10)) is None
    assert commits_between(found, 1.5, 3.5) == 1


def test_a_stall_is_the_longest_gap_beyond_the_usual_one() -> None:
    times = [0.0, 0.1, 0.2, 0.5, 0.6, 0.7, 9.0]
    commits = [Commit(at_s, step, (1, 1)) for step, at_s in enumerate(times)]
    assert stall(commits, 0.4) == pytest.approx(0.2)


def absolute(of: str, limit: float, **found: list[float]) -> dict[str, object]:
    row = Row("r", "recovery", "w", "what", "torchrun", Target(of, limit), unit="s")  # type: ignore[arg-type]
    return judge(row, Measured([{"manyhands": found["ours"], **found}], {"threads": 1}))


def test_a_target_in_seconds_needs_no_peer_and_shows_one_beside_it() -> None:
    times = [0.1] * 18 + [0.5, 2.0]
    middle, most = absolute("median", 0.3, ours=times), absolute("p95", 0.4, ours=times, torchrun=[9.0])
    assert (middle["value"]["middle"], middle["met"]) == (0.1, True)  # type: ignore[index]
    assert (most["value"]["middle"], most["met"], outcome(most)) == (0.5, False, "no, by 25%, within the noise")  # type: ignore[index]
    assert list(most["sides"]) == ["manyhands", "torchrun"]  # type: ignore[call-overload]
    assert "at most 0.4 s" in table([most])


def test_a_share_is_to_be_reached() -> None:
    assert wish(Target("share", 0.85)) == "at least 85 %"
    assert absolute("share", 0.85, ours=[0.9])["met"] and not absolute("share", 0.85, ours=[0.8])["met"]


def test_what_kills_leave_behind_is_named() -> None:
    assert _leaks(Held(40, 10**8), Held(45, 10**8), 290) == []
    assert "more descriptors" in _leaks(Held(40, 10**8), Held(340, 10**8), 290)[0]
    assert "MB more" in _leaks(Held(40, 10**8), Held(40, 3 * 10**8), 290)[0]


def test_the_first_update_that_a_dead_server_cannot_have_made_is_found_by_time() -> None:
    commits = [Commit(1.0, 7, (1, 1)), Commit(2.0, 11, (1, 1)), Commit(2.1, 13, (1, 1)), Commit(2.2, 12, (1, 1))]
    assert first_after(commits, 11) == commits[2]
    assert first_after(commits, 13) is None
