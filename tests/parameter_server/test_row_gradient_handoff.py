"""Rows and their gradients in memory that workers and servers share: real tables, in memory of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.comm.host_memory import HostMemory, Segment
from manyhands.embedding.row_layer import TableGradient
from manyhands.embedding.row_optimizers import SGD, TableSpec
from manyhands.embedding.row_table import in_parts, unique
from manyhands.native import why_not
from manyhands.parameter_server.protocol.messages import Handed, Lookup, RowsReply
from manyhands.parameter_server.tables.row_gradient_handoff import RowGradientHandoff
from manyhands.parameter_server.tables.server_tables import PARTS, ServerTables, parts_of
from manyhands.parameter_server.worker.row_lookup import ServedRows, SharedRows

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")

SPEC = TableSpec(name="t", dim=3, optimizer=SGD(lr=0.5))
IDS = unique(torch.randperm(500) * 7919 - 10**6)[0]


@pytest.fixture
def memory():
    host = HostMemory()
    yield lambda name, num_bytes: Segment(host.fd, num_bytes, host.allot(name, num_bytes))
    host.close()


def filled(memory: Any) -> ServerTables:
    """All parts on one server, each with rows that have changed."""
    tables = ServerTables([SPEC], memory, range(PARTS))
    tables.apply(1, [TableGradient("t", IDS, torch.randn(len(IDS), SPEC.dim))], 1.0)
    return tables


@pytest.mark.parametrize("servers", [1, 3])
def test_each_server_takes_what_a_worker_has_put_there_for_it(memory, servers) -> None:
    worker, gradients = RowGradientHandoff(memory), torch.randn(len(IDS), SPEC.dim)
    for count in (0, 7, len(IDS)):  # the region grows
        handed = worker.put(2, [TableGradient("t", IDS[:count], gradients[:count]), TableGradient("u", IDS, gradients)])
        for server in range(servers):
            tables = ServerTables([SPEC, TableSpec(name="u", dim=3)], memory, parts_of(server, servers))
            assert tables.keep_handed(9, 2, handed)
            _, bounds = in_parts(IDS[:count])
            mine = [slice(*list(pairwise(bounds))[part]) for part in parts_of(server, servers)]
            t, u = tables.gather([9])
            assert torch.equal(t.ids, torch.cat([IDS[some] for some in mine]))
            assert torch.equal(t.gradients, torch.cat([gradients[some] for some in mine]))
            assert len(u.ids) == len(u.gradients) > 0
            tables.drop([9])
            assert tables.gather([9]) == []


BOUNDS = [0, *[5] * PARTS]


@pytest.mark.parametrize(
    "nonsense",
    [
        Handed("other", 2**16, 0, BOUNDS),
        Handed("t", 2**16, -64, BOUNDS),
        Handed("t", 2**16, 3, BOUNDS),
        Handed("t", 2**16, 2**16 - 64, BOUNDS),
        Handed("t", 2**16, 0, [0, *[2**40] * PARTS]),
        Handed("t", 2**16, 0, [5, *[5] * PARTS]),
        Handed("t", 2**16, 0, [0, 3, 2, *[5] * (PARTS - 2)]),
        Handed("t", 2**16, 0, [0, 5]),
        Handed("t", 2**35, 0, BOUNDS),
        Handed("t", 2**60, 0, BOUNDS),
    ],
)
def test_what_cannot_be_there_is_not_looked_for(memory, nonsense) -> None:
    tables = ServerTables([SPEC], memory, range(PARTS))
    assert not tables.keep_handed(1, 0, [nonsense])
    assert tables.gather([1]) == []


def test_rows_are_found_where_they_are_but_for_parts_that_are_being_changed(memory) -> None:
    tables = filled(memory)
    shared, found, (_, bounds) = SharedRows(SPEC, memory), torch.empty(len(IDS), SPEC.dim), in_parts(IDS)
    assert shared.look_up(IDS, bounds, found) == []
    assert torch.equal(found, looked_up(tables, IDS))
    with being_changed(tables, memory, 5):
        found.zero_()
        assert shared.look_up(IDS, bounds, found) == [5]
        others = torch.cat([found[: bounds[5]], found[bounds[6] :]])
        assert torch.equal(others, looked_up(tables, torch.cat([IDS[: bounds[5]], IDS[bounds[6] :]])))
    assert shared.look_up(IDS, bounds, found) == []


class Asked:
    """A link to servers that are here; it counts what it is asked for."""

    def __init__(self, tables: ServerTables) -> None:
        self._tables, self.num_ids, self.version = tables, 0, 1

    def ticket(self) -> int:
        return 1

    def look_up(self, asked: list[tuple[int, Lookup]]) -> list[RowsReply]:
        found = [self._tables.look_up(question, self.version) for _, question in asked]
        self.num_ids += sum(len(question.ids) // 8 for _, question in asked)
        return [one for one in found if one is not None]


def test_a_worker_asks_for_those_only_that_it_cannot_read(memory) -> None:
    model = nn.Sequential(mh.nn.Embedding(3, name="t", optimizer=SGD(lr=0.5), seed=0))
    tables, (_, bounds) = filled(memory), in_parts(IDS)
    link = Asked(tables)
    rows = ServedRows(model, 0, link, memory, shares=True)  # type: ignore[arg-type]
    rows.enter((1, 1, 1), 1)
    assert torch.equal(model(IDS), looked_up(tables, IDS)) and link.num_ids == 0
    with being_changed(tables, memory, 5):
        assert torch.equal(model(IDS), looked_up(tables, IDS))
    assert link.num_ids == bounds[6] - bounds[5]
    often = torch.randint(0, len(IDS), (7, len(IDS)), generator=torch.Generator().manual_seed(0))
    with being_changed(tables, memory, 3):
        assert torch.equal(model(IDS[often]), looked_up(tables, IDS)[often])
    link.num_ids = bounds[6] - bounds[5]
    away = ServedRows(model, 0, link, memory, shares=False)  # type: ignore[arg-type]
    away.enter((1, 1, 1), 1)
    assert torch.equal(model(IDS), looked_up(tables, IDS)) and link.num_ids == bounds[6] - bounds[5] + len(IDS)


CHANGES = 20  # in struct head of native/row_table.h


@contextmanager
def being_changed(tables: ServerTables, memory: Any, part: int) -> Iterator[None]:
    """Inside, a part is as a server leaves it that was killed in an update; then its successor opens it."""
    words = tables._tables["t", part]._segment.words()
    assert words[CHANGES] % 2 == 0
    words[CHANGES] |= 1
    yield
    assert words[CHANGES] % 2 == 1
    ServerTables([SPEC], memory, [part])
    assert words[CHANGES] % 2 == 0


def looked_up(tables: ServerTables, ids: Tensor) -> Tensor:
    _, bounds = in_parts(ids)
    return torch.cat(
        [tables._tables["t", part].lookup(ids[start:stop]) for part, (start, stop) in enumerate(pairwise(bounds))]
    )
