"""Parts of tables on servers: plain values, in memory of this process."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from manyhands.embedding.row_layer import TableGradient
from manyhands.embedding.row_optimizers import SGD, TableSpec
from manyhands.embedding.row_table import RowTable, private_memory
from manyhands.errors import SpecError
from manyhands.native import why_not
from manyhands.parameter_server.protocol.messages import Lookup, RowGradients
from manyhands.parameter_server.tables.server_tables import (
    PARTS,
    ServerTables,
    by_part,
    in_order,
    part_of,
    rows_from,
    to_bytes,
)

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")

SPEC = TableSpec(name="t", dim=3, optimizer=SGD(lr=0.5))
IDS = torch.randperm(500) * 7919 - 10**6


def sorted_ids() -> Tensor:
    return IDS[part_of(IDS).argsort(stable=True)]


def look_up(tables: ServerTables, ids: Tensor, at_most: int | None = None) -> Tensor:
    found = tables.look_up(Lookup(number=(1, 1, 1), ticket=1, table="t", ids=to_bytes(ids), at_most=at_most))
    assert found is not None
    return rows_from(found.rows, SPEC.dim)


def test_every_id_is_in_its_part_and_those_of_a_part_keep_their_order() -> None:
    places = by_part(IDS)
    assert sorted(torch.cat(places).tolist()) == list(range(len(IDS)))
    for part, some in enumerate(places):
        assert (part_of(IDS[some]) == part).all() and some.tolist() == sorted(some.tolist())
    assert [len(some) for some in by_part(IDS[:0])] == [0] * PARTS


def test_ids_that_come_in_the_order_of_parts_stay_where_they_are() -> None:
    order, bounds = in_order(sorted_ids())
    assert order == slice(None) and (bounds[0], bounds[-1], len(bounds)) == (0, len(IDS), PARTS + 1)
    assert isinstance(in_order(IDS)[0], Tensor)


@pytest.mark.parametrize("ids", [IDS, sorted_ids()], ids=["in any order", "by part"])
def test_rows_are_those_of_one_table_in_the_order_asked_for(ids: Tensor) -> None:
    tables, whole = ServerTables([SPEC], private_memory, range(PARTS)), RowTable(SPEC)
    gradients = torch.randn(len(ids), SPEC.dim)
    piece = RowGradients(
        number=(1, 1, 1), filling=4, order=0, table="t", ids=to_bytes(ids), gradients=to_bytes(gradients)
    )
    tables.keep(piece)
    before = look_up(tables, IDS)
    tables.apply(1, tables.gather([4]), 2.0)
    tables.apply(1, tables.gather([4]), 2.0)  # done again, nothing
    assert torch.equal(look_up(tables, IDS, at_most=0), before)
    whole.update(1, ids, gradients, factor=2.0)
    assert torch.equal(look_up(tables, IDS), whole.lookup(IDS))
    assert torch.equal(look_up(tables, ids.flip(0)), whole.lookup(ids.flip(0)))


def test_ids_of_another_servers_parts_are_not_answered() -> None:
    tables = ServerTables([SPEC], private_memory, [0])
    assert tables.look_up(Lookup(number=(1, 1, 1), ticket=1, table="t", ids=to_bytes(IDS))) is None


def test_a_bound_is_the_whole_tables_and_is_reported_as_such() -> None:
    spec = msgspec.structs.replace(SPEC, max_bytes=2000)
    with pytest.raises(SpecError, match=r"max_bytes is 2000, .* one row in each of its 16 parts") as refused:
        ServerTables([spec], private_memory, range(PARTS))
    least = int(refused.value.fix[0].removeprefix("max_bytes=").removesuffix(" or more"))
    tables = ServerTables([msgspec.structs.replace(SPEC, max_bytes=least)], private_memory, range(PARTS))
    with pytest.raises(SpecError, match=f"max_bytes={least} has space for 3 rows in each of its 16 parts"):
        tables.apply(1, [TableGradient("t", IDS, torch.zeros(len(IDS), SPEC.dim))], 1.0)


def test_more_rows_than_an_answer_can_carry_are_not_even_looked_up() -> None:
    wide = ServerTables([msgspec.structs.replace(SPEC, dim=2**20)], private_memory, range(PARTS))
    assert wide.look_up(Lookup(number=(1, 1, 1), ticket=1, table="t", ids=to_bytes(torch.arange(100)))) is None


def test_rows_of_more_updates_than_their_training_has_made_are_updated_and_are_as_old_as_before() -> None:
    spec = msgspec.structs.replace(SPEC, keep_steps=3)
    longer, shorter, gradients = (
        RowTable(spec),
        ServerTables([spec], private_memory, range(PARTS)),
        torch.ones(1, SPEC.dim),
    )
    for number in range(1, 9):
        longer.update(number, torch.tensor([number]), gradients)
    assert longer.snapshot()["ids"].tolist() == [5, 6, 7, 8]
    shorter.restore("t", 4, longer.snapshot())
    shorter.apply(5, [TableGradient("t", torch.tensor([8]), gradients)], 1.0, ["t"])
    longer.update(9, torch.tensor([8]), gradients)
    found, wanted = shorter.snapshot("t"), longer.snapshot()
    assert found["ids"].tolist() == wanted["ids"].tolist() == [6, 7, 8]
    assert torch.equal(found["rows"], wanted["rows"])
