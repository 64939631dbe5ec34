"""Which servers have a step's rows, as all ranks see it: plain values."""

from __future__ import annotations

from manyhands.parameter_server.protocol.messages import OpenRows
from manyhands.parameter_server.worker.hybrid_rows import _Servers, agreed_servers


def opening(count: int, servers: int = 2) -> OpenRows:
    return OpenRows(number=(1, 1, count), servers=servers, step=4, base=0)


def test_a_proposal_counts_when_nothing_is_on_its_way() -> None:
    quiet, tried = _Servers(opening(1), None, False), _Servers(opening(1), None, True)
    proposes = _Servers(opening(1), opening(2, servers=3), False)
    assert agreed_servers([quiet, quiet]) == opening(1)
    assert agreed_servers([proposes, quiet]) == opening(2, servers=3)
    assert agreed_servers([proposes, tried]) == opening(1)


def test_those_who_lost_a_rank_in_the_middle_of_it_go_where_some_are_already() -> None:
    ahead, behind = _Servers(opening(2, servers=3), None, True), _Servers(opening(1), None, False)
    assert agreed_servers([behind, ahead]) == agreed_servers([ahead, behind]) == opening(2, servers=3)


def test_what_some_servers_may_have_begun_is_gone_on_with_though_a_share_may_be_on_its_way() -> None:
    informed = _Servers(opening(1), None, True, agreed=opening(2, servers=3))
    proposes = _Servers(opening(1), opening(3), True)
    assert agreed_servers([informed, proposes]) == opening(2, servers=3)


def test_servers_that_have_left_before_they_began_are_not_gone_on_with() -> None:
    void = _Servers(opening(1), opening(3), True, agreed=opening(2, servers=3), is_void=True)
    informed = _Servers(opening(1), None, True, agreed=opening(2, servers=3))
    assert agreed_servers([void, informed]) == opening(3)
