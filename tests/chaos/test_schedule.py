"""The schedule of faults: the same for the same arguments, and as dense as it was asked to be."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from manyhands.chaos.fault_schedule import KINDS, ON_ONE_HOST, ON_SERVERS, ON_WORKERS, Fault, schedule
from manyhands.cli.main import cli
from manyhands.errors import UsageError


def test_the_same_arguments_give_the_same_schedule_wherever_it_is_made() -> None:
    faults = schedule(7, mtbf_s=5, minutes=2, workers=4)
    assert faults == schedule(7, mtbf_s=5.0, minutes=2.0, workers=4, kinds=tuple(reversed(ON_ONE_HOST)))
    assert faults[:2] == (Fault(1, 1.03, "stop-template"), Fault(2, 2.746, "coordinator"))


def test_every_argument_changes_it() -> None:
    changed = [
        schedule(8, mtbf_s=5, minutes=2, workers=4),
        schedule(7, mtbf_s=6, minutes=2, workers=4),
        schedule(7, mtbf_s=5, minutes=3, workers=4),
        schedule(7, mtbf_s=5, minutes=2, workers=3),
        schedule(7, mtbf_s=5, minutes=2, workers=4, kinds=["kill", "stop"]),
        schedule(7, mtbf_s=5, minutes=2, workers=4, servers=2),
    ]
    assert len({*changed, schedule(7, mtbf_s=5, minutes=2, workers=4)}) == 7


def test_faults_come_as_often_as_asked_and_strike_everyone_with_everything() -> None:
    faults = schedule(1, mtbf_s=5, minutes=500, workers=4, servers=2, kinds=KINDS)
    assert 5500 < len(faults) < 6500
    assert [one.number for one in faults] == list(range(1, len(faults) + 1))
    assert sorted(faults, key=lambda one: one.at_s) == list(faults) and faults[-1].at_s < 500 * 60
    for kind in KINDS:
        struck = [one.slot for one in faults if one.kind == kind]
        assert len(struck) > len(faults) / len(KINDS) * 0.8
        everyone = {0, 1} if kind in ON_SERVERS else {0, 1, 2, 3}
        assert set(struck) == (everyone if kind in (*ON_WORKERS, *ON_SERVERS, "agent") else {None})


def test_a_dry_run_prints_the_schedule_and_runs_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit(1)")
    words = ["chaos", "--seed", "7", "--mtbf", "5", "--minutes", "2", "--dry-run"]
    found = CliRunner().invoke(cli, [*words, "--json", "train.py"])
    assert json.loads(found.output)[1] == {
        "number": 2,
        "at_s": 2.746,
        "kind": "coordinator",
        "slot": None,
        "lasts_s": 0.0,
    }
    assert "stop         worker 0" in CliRunner().invoke(cli, [*words, "train.py"]).output
    served = CliRunner().invoke(cli, [*words, "--servers", "2", "--faults", "stop-server", "train.py"]).output
    assert "stop-server  server 0\n" in served and "stop-server  server 1\n" in served
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_what_cannot_be_played_is_refused_with_what_can(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def refused(*words: str) -> str:
        with pytest.raises(UsageError) as raised:
            cli.main(["chaos", *words, "train.py"], standalone_mode=False)
        return str(raised.value)

    assert "no fault meteor; faults are kill, stop, hang, slow, coordinator, disk, agent, " in refused(
        "--faults", "kill,meteor"
    )
    assert "The first agent of a run is its launcher" in refused("--faults", "agent")
    assert "--agents is 0" in refused("--agents", "0")
    assert "kill-server needs a server, but this run has none" in refused("--faults", "kill-server")
    assert "need a run with one agent" in refused("--agents", "2", "--servers", "2")
    assert "--faults names no fault" in refused("--faults", ",")
    assert "--mtbf is 0, but must be above 0" in refused("--mtbf", "0")
    assert "--minutes is nan" in refused("--minutes", "nan")
