"""A server of rows alone: what it answers, what counts, and what its successor finds. Messages, and no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.comm.host_memory import Segment
from manyhands.embedding.row_layer import TableGradient
from manyhands.embedding.row_table import private_memory, unique
from manyhands.native import why_not
from manyhands.parameter_server.protocol.messages import (
    ApplyRows,
    Handed,
    Lookup,
    Opened,
    OpenRows,
    Refused,
    RowGradients,
    RowsReply,
    UpdateApplied,
)
from manyhands.parameter_server.tables.row_gradient_handoff import RowGradientHandoff
from manyhands.parameter_server.tables.row_server import RowServer
from manyhands.parameter_server.tables.server_tables import by_part, parts_of, rows_from, to_bytes
from manyhands.parameter_server.worker.hybrid_rows import in_slices

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")

NUMBER = (1, 1, 1)
IDS = torch.arange(40) * 2**40 - 7


class Regions:
    """Memory by name, which outlives servers."""

    def __init__(self) -> None:
        self._known: dict[str, Segment] = {}

    def __call__(self, name: str, num_bytes: int) -> Segment:
        if name not in self._known:
            self._known[name] = private_memory(name, num_bytes)
        return self._known[name]


def model(**settings: Any) -> nn.Module:
    return nn.Sequential(mh.nn.Embedding(2, name="t", optimizer=mh.optim.rows.SGD(lr=1.0), init="zeros", **settings))


def opening(*, number: tuple[int, int, int] = NUMBER, step: int = 0, base: int = 0, servers: int = 1) -> OpenRows:
    return OpenRows(number=number, servers=servers, step=step, base=base)


def made(memory: Regions, server: int = 0, opened: OpenRows | None = None, **settings: Any) -> RowServer:
    found = RowServer(server, model(**settings), memory, seed=0)
    message = opened or opening()
    assert found.take(b"w", message) == [(b"w", Opened(number=message.number, server=server))]
    return found


def push(server: RowServer, step: int, ids: Tensor, value: float = -1.0, pieces: int = 1, **more: Any) -> Any:
    """A step's gradients, all the same, in one piece, and the word to apply them."""
    gradients = to_bytes(torch.full((len(ids), 2), value))
    piece = RowGradients(number=NUMBER, filling=step, order=0, table="t", ids=to_bytes(ids), gradients=gradients)
    assert server.take(b"w", piece) == []
    order = {"number": NUMBER, "step": step, "pieces": pieces, "tables": ["t"], "factor": 1.0, **more}
    return server.take(b"w", ApplyRows(**order))


def look_up(server: RowServer, ids: Tensor) -> Tensor | None:
    answers: Sequence[Any] = server.take(b"w", Lookup(number=NUMBER, ticket=3, table="t", ids=to_bytes(ids)))
    if not answers:
        return None
    [(receiver, rows)] = answers
    assert receiver == b"w" and isinstance(rows, RowsReply) and rows.ticket == 3
    return rows_from(rows.rows, 2)


def counts(server: RowServer, ids: Tensor = IDS) -> list[float]:
    rows = look_up(server, ids)
    assert rows is not None
    return sorted(set(rows.flatten().tolist()))


def hand_over(memory: Regions, step: int) -> list[tuple[int, Handed]]:
    """Two ranks' slices, both with all ids, and rank 1 with the first slice: the sums are -1 - 2."""
    shelf, ids = RowGradientHandoff(memory), unique(IDS)[0]
    handed: list[list[tuple[int, Handed]]] = []
    for rank, value in enumerate((-1.0, -2.0)):
        shelf.mark(rank, step)
        (where,) = shelf.put(rank, [TableGradient("t", ids, torch.full((len(ids), 2), value))])
        handed.append([(1 - rank, where)])
    return in_slices(handed)


def test_a_step_is_taken_from_where_ranks_have_put_it_if_it_is_still_there() -> None:
    memory = Regions()
    servers = [made(memory, server, opening(servers=2)) for server in range(2)]
    handed = hand_over(memory, step=1)
    assert [row for row, _ in handed] == [1, 0], "in the order of slices"
    order = {"number": NUMBER, "pieces": 0, "tables": ["t"], "factor": 1.0, "handed": handed}
    late = ApplyRows(step=2, **order)  # type: ignore[arg-type]
    assert servers[0].take(b"w", late) == [], "what lies there is of another step"
    nonsense = [(row, Handed("ghost", one.region, one.at, one.bounds)) for row, one in handed]
    assert servers[0].take(b"w", ApplyRows(step=1, **{**order, "handed": nonsense})) == []  # type: ignore[arg-type]
    for number, server in enumerate(servers):
        own = IDS[torch.cat([by_part(IDS)[part] for part in parts_of(number, 2)])]
        for _ in range(2):
            answer = server.take(b"w", ApplyRows(step=1, **order))  # type: ignore[arg-type]
            assert answer == [(b"w", UpdateApplied(number=NUMBER, server=number, step=1))]
        assert counts(server, own) == [3.0]


def test_a_step_counts_once_however_often_it_is_sent() -> None:
    server = made(Regions())
    applied = [(b"w", UpdateApplied(number=NUMBER, server=0, step=1))]
    assert push(server, 1, IDS) == applied
    assert push(server, 1, IDS) == applied
    assert counts(server) == [1.0]
    assert push(server, 2, IDS, factor=0.5) == [(b"w", UpdateApplied(number=NUMBER, server=0, step=2))]
    assert counts(server) == [1.5]


def test_a_successor_finds_rows_and_opening_and_a_step_that_is_sent_again_changes_nothing() -> None:
    memory = Regions()
    push(made(memory), 1, IDS)
    successor = RowServer(0, model(), memory, seed=0)
    assert counts(successor) == [1.0]
    assert push(successor, 1, IDS) == [(b"w", UpdateApplied(number=NUMBER, server=0, step=1))]
    assert counts(successor) == [1.0]


def test_a_step_waits_for_all_of_its_pieces() -> None:
    server = made(Regions())
    assert push(server, 1, IDS, pieces=2) == []
    assert counts(server) == [0.0]


def test_servers_share_out_the_ids_and_answer_for_no_others() -> None:
    places = by_part(IDS)
    mine, others = (torch.cat([IDS[places[part]] for part in parts_of(server, 2)]) for server in (0, 1))
    server = made(Regions(), opened=opening(servers=2))
    push(server, 1, mine)
    assert counts(server, mine) == [1.0]
    assert look_up(server, others) is None
    push(server, 2, others)  # nonsense, and no harm
    assert counts(server, mine) == [1.0]


def test_what_belongs_to_an_earlier_opening_is_ignored() -> None:
    server = made(Regions(), opened=opening(number=(1, 2, 1)))
    assert server.take(b"w", opening()) == []
    assert push(server, 1, IDS) == []
    assert server.refused["late"] == 3


def test_updates_count_from_those_that_rows_have_seen_elsewhere() -> None:
    memory = Regions()
    push(made(memory, opened=opening(step=9)), 10, IDS)
    again = made(memory, opened=opening(number=(1, 1, 2), step=0, base=10))
    piece = RowGradients(
        number=(1, 1, 2), filling=1, order=0, table="t", ids=to_bytes(IDS), gradients=to_bytes(-torch.ones(40, 2))
    )
    again.take(b"w", piece)
    again.take(b"w", ApplyRows(number=(1, 1, 2), step=1, pieces=1, tables=["t"], factor=1.0))
    [(_, rows)] = again.take(b"w", Lookup(number=(1, 1, 2), ticket=3, table="t", ids=to_bytes(IDS)))
    assert set(rows_from(rows.rows, 2).flatten().tolist()) == {2.0}


def test_rows_grow_old_by_steps_that_touch_others() -> None:
    server = made(Regions(), keep_steps=2)
    first, other = IDS[:1], IDS[1:2]
    push(server, 1, first)
    for step in range(2, 6):
        push(server, step, other)
    assert counts(server, first) == [0.0]
    assert counts(server, other) == [4.0]


@pytest.mark.parametrize("servers", [1, 3])
def test_a_server_that_is_not_asked_for_any_more_is_released_by_the_next_opening(servers: int) -> None:
    memory = Regions()
    made(memory, opened=opening(servers=3))
    last = made(memory, 2, opened=opening(servers=3))
    assert not last.is_released()
    made(memory, opened=opening(number=(1, 1, 2), servers=servers))
    assert last.is_released() == (servers == 1)


def test_rows_of_another_sharding_are_refused_and_the_server_keeps_serving() -> None:
    server = made(Regions())
    (answer,) = server.take(b"w", opening(number=(2, 1, 1), servers=0))
    assert isinstance(answer[1], Refused) and server.refused == {"misfit": 1}
    assert push(server, 1, IDS) == [(b"w", UpdateApplied(number=NUMBER, server=0, step=1))]
