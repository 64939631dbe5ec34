"""A pipeline over hosts: neighbours of one host talk through memory, the others over sockets; nothing else differs."""

from __future__ import annotations

from typing import Any

import pytest

import manyhands as mh
from manyhands.comm.shared_memory_messages import MixedPointToPoint
from manyhands.native import why_not
from manyhands.testing import RankPool
from tests.layouts.layout_cases import train
from tests.layouts.test_layouts import assert_close


class Ways:
    """Looks up how this rank reaches each other one."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        messages = trainer._run.ready().engine.spread.divided.passes.runner._messages
        assert isinstance(messages, MixedPointToPoint)
        self.names = [type(way).__name__ for way in messages._channels]


def train_over_hosts() -> tuple[dict[str, Any], list[str]]:
    ways = Ways()
    return train("MLP", mh.PipelineParallel(4), {"epochs": 1}, hooks=[ways]), ways.names


@pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")
def test_stages_on_two_hosts_end_where_one_process_ends(ranks: RankPool) -> None:
    [alone] = ranks(1, train, "MLP", mh.Single(), {"epochs": 1})
    found = ranks(4, train_over_hosts, hosts=2)
    assert_close(alone, found[0][0])
    near, far = "SharedMemoryPointToPoint", "PointToPoint"
    assert [names for _, names in found] == [[near, near, far, far]] * 2 + [[far, far, near, near]] * 2
