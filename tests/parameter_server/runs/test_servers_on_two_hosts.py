"""Workers on another host than the servers: the bits of one process, and every gradient once, under kills."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.events import ServerStarted
from manyhands.native import why_not
from manyhands.observe.recorder import read_events
from tests.end_to_end import namespaces
from tests.parameter_server.runs.test_local_steps_runs import pushes_of
from tests.parameter_server.runs.test_served_runs import faults
from tests.parameter_server.runs.two_hosts import Prefixes, two_hosts_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]

ONE_AND_TWO = ("-n", "1", "--servers", "2")
# Worker 0 shares memory with the servers, worker 1 does not: when worker 0 dies the other one is chief.
A_SERVER_AND_THE_CHIEF = faults(("server 0", 2, "taking a frame"), ("worker 0", 3, "backward"))
ALL_PROCESSES = [
    *A_SERVER_AND_THE_CHIEF,
    *faults(("server 1", 8, "giving a frame"), ("worker 1", 40, "between frames"), ("server 0", 60, "after commit")),
]
# So that a killed process is back before the next one is killed.
LONGER = {"epochs": 5, "slow_s": {"worker 0": 0.05, "worker 1": 0.05}, "faults": ALL_PROCESSES}


def num_happened(folder: Path) -> int:
    return len(list(folder.glob("fault-*")))


@pytest.mark.long
def test_synchronous_training_over_two_hosts_gives_the_bits_of_one_process_under_kills(
    tmp_path: Path, mirrored: Any
) -> None:
    asked = {"mode": "sync", "exact": True, "clip": 5.0, "validate": True, "faults": A_SERVER_AND_THE_CHIEF}
    with two_hosts_run(tmp_path, asked, *ONE_AND_TWO) as run:
        result = run.wait()
    assert result == mirrored(exact=True, clip=5.0, validate=True)
    assert num_happened(tmp_path) == len(A_SERVER_AND_THE_CHIEF)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_every_gradient_counts_exactly_once_over_two_hosts(tmp_path: Path, mode: str) -> None:
    asked = {"mode": mode, "rows": True, "save_every": 20, **LONGER, "settings": {"spare": True}}
    asked["faults"] = [*ALL_PROCESSES[:-1], {**ALL_PROCESSES[-1], "spared": True}]
    with two_hosts_run(tmp_path, asked, *ONE_AND_TWO) as run:
        result = run.wait(240)
    assert (result["counter"], result["reached"]) == ([5.0], 80)
    assert num_happened(tmp_path) == len(ALL_PROCESSES)
    spare = int((tmp_path / f"fault-{len(ALL_PROCESSES) - 1}").read_text())
    events = read_events(run.directory / "events" / "agent-0.jsonl")
    assert spare in [event.pid for event in events if isinstance(event, ServerStarted)], "it has not taken over"


@pytest.mark.long
def test_local_step_ranges_count_once_and_rounds_close_over_two_hosts(tmp_path: Path) -> None:
    way, some = {"push_every": 3, "pull_every": 3}, {"epochs": 3, "save_every": 20}
    places = faults(("server 0", 2, "taking a frame"), ("worker 1", 12, "between frames"))
    with two_hosts_run(
        tmp_path / "1", {"mode": "async", "settings": way, "faults": places, **some}, *ONE_AND_TWO
    ) as run:
        assert run.wait(240)["counter"] == [3.0]
    assert num_happened(tmp_path / "1") == len(places)
    quorum = {"every": 2, "quorum": 2, "deadline_s": 60.0}
    asked = {"mode": "local_sgd", "settings": quorum, "record": True, **some}
    with two_hosts_run(tmp_path / "2", asked, "-n", "1", "--servers", "1") as run:
        result = run.wait(240)
    assert result["cells"] == pytest.approx([1.5] * 256, abs=1e-4), "in every round there were both"
    easgd = {"every": 2, "outer": "elastic", "asynchronous": True}
    with two_hosts_run(tmp_path / "3", {**asked, "settings": easgd}, "-n", "1", "--servers", "1") as run:
        result = run.wait(240)
    assert sum(result["cells"]) == pytest.approx(sum(pushes_of(run).values()), abs=0.01)


@pytest.fixture(scope="module")
def networks() -> Iterator[Prefixes]:
    with namespaces.two_hosts() as prefixes:
        yield prefixes


REASON = namespaces.why_not()


@pytest.mark.long
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_two_networks_train_one_model_under_kills(tmp_path: Path, networks: Prefixes, mirrored: Any, mode: str) -> None:
    asked = {"mode": mode, "exact": mode == "sync", **LONGER}
    address = namespaces.ADDRESSES[0]
    options = (*ONE_AND_TWO, "--insecure-data-plane")
    with two_hosts_run(tmp_path, asked, *options, address=address, prefixes=networks) as run:
        result = run.wait(240)
    if mode == "sync":
        assert result == mirrored(exact=True, epochs=5)
    assert result["counter"] == [5.0]
    assert num_happened(tmp_path) == len(ALL_PROCESSES)
