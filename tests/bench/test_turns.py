"""The trainer's hook that waits for its turn, and who is slow: a real socket, no trainer."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from bench.driver.turns import ADDRESS_VARIABLE, SETTLING_STEPS, SIDE_VARIABLE, TurnHook, Turns
from bench.servers.served_side import THINK_S, thinking


class Trainer:
    stops = 0

    def request_stop(self) -> None:
        self.stops += 1


@pytest.mark.parametrize("each", [1, 2])
def test_a_block_lasts_as_many_updates_as_its_steps_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: int
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "baton"))
        listener.listen()
        monkeypatch.setenv(ADDRESS_VARIABLE, str(tmp_path / "baton"))
        monkeypatch.setenv(SIDE_VARIABLE, "ours")
        monkeypatch.setenv("RANK", "0")
        turns = Turns()
        with listener.accept()[0] as driver, turns._socket, turns._lines:
            driver.sendall(b'{"run": 3}\n{"run": 0}\n')
            hook, trainer = TurnHook(lambda: turns, each), Trainer()
            hook.after_step(trainer, 1, None)  # up
            for update in range(each * (SETTLING_STEPS + 3)):
                assert trainer.stops == 0, update
                hook.after_step(trainer, update + 2, None)
            assert trainer.stops == 1
            said = [json.loads(line) for line in driver.recv(4096).splitlines()]
            assert said[0] == {"side": "ours", "rank": 0} and said[1]["seconds"] > 0 and len(said) == 2


def test_one_worker_is_always_slow_or_all_are_for_a_fifth_of_their_slices() -> None:
    assert [thinking("one-slow", rank)() for rank in (0, 1)] == [THINK_S, 5 * THINK_S]
    assert thinking("steady", 1)() == 0.0
    think = thinking("often-slow", 3)
    slow = sum(think() == 5 * THINK_S for _ in range(5000))
    assert 900 < slow < 1100
