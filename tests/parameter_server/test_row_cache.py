"""Rows that a worker caches: never older than its bound allows, never another id's."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import manyhands as mh
from manyhands.embedding.row_layer import TableGradient
from manyhands.embedding.row_optimizers import SGD, TableSpec
from manyhands.embedding.row_table import private_memory, unique
from manyhands.errors import SpecError
from manyhands.native import why_not
from manyhands.parameter_server.protocol.messages import Lookup, RowsReply
from manyhands.parameter_server.tables.server_tables import PARTS, ServerTables
from manyhands.parameter_server.worker.row_lookup import RowCache, ServedRows

IDS = torch.arange(300) * 7919 - 10**6
some_ids = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9), unique=True, max_size=12)


@given(
    num_rows=st.integers(1, 8),
    puts=st.lists(st.tuples(some_ids, st.integers(0, 9))),
    wanted=some_ids,
    bound=st.integers(-3, 12),
)
def test_the_cache_returns_the_row_that_was_put_for_an_id_if_it_is_new_enough(num_rows, puts, wanted, bound) -> None:
    cache = RowCache(num_rows, 2)
    put_rows = set()
    for ids, version in puts:
        put_rows |= {(one, version) for one in ids}
        cache.put(
            torch.tensor(ids, dtype=torch.int64),
            version,
            torch.tensor([[one % 1000, version] for one in ids]).float().view(-1, 2),
        )
    found = torch.full((len(wanted), 2), -1.0)
    missing, oldest = cache.find(torch.tensor(wanted, dtype=torch.int64), bound, found)
    here = set(range(len(wanted))) - set(missing.tolist())
    for place in here:
        low, version = found[place].tolist()
        assert (wanted[place], version) in put_rows and low == wanted[place] % 1000 and version >= bound
    assert oldest == min((int(found[place, 1]) for place in here), default=None) and len(here) <= num_rows
    cache.clear()
    assert len(cache.find(torch.tensor(wanted, dtype=torch.int64), 0, found)[0]) == len(wanted)


class Away:
    """Servers on another host: every update adds 1 to every row, so a row shows how many it has seen."""

    def __init__(self) -> None:
        self._tables = ServerTables(
            [TableSpec(name="t", dim=3, optimizer=SGD(lr=1.0), init="zeros")], private_memory, range(PARTS)
        )
        self.version, self.num_asked, self._ids = 0, 0, unique(IDS)[0]

    def update(self) -> None:
        self.version += 1
        self._tables.apply(self.version, [TableGradient("t", self._ids, torch.full((len(IDS), 3), -1.0))], 1.0)

    def ticket(self) -> int:
        return 1

    def look_up(self, asked: list[tuple[int, Lookup]]) -> list[RowsReply]:
        self.num_asked += sum(len(question.ids) // 8 for _, question in asked)
        found = [self._tables.look_up(question, self.version) for _, question in asked]
        return [one for one in found if one is not None]


@pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_row_lacks_more_updates_than_it_may(staleness) -> None:
    model = nn.Sequential(mh.nn.Embedding(3, name="t", optimizer=SGD(lr=1.0), init="zeros", cache=100, seed=0))
    servers, chance, num_wanted, lacked = Away(), random.Random(1), 0, set()
    rows = ServedRows(model, 0, servers, None, shares=False)  # type: ignore[arg-type]
    rows.enter((1, 1, 1), 2)
    for step in range(1, 60):
        while servers.version < chance.randint(max(0, step - 1 - staleness), step - 1):  # as leases are handed out
            servers.update()
        ids = IDS[torch.randint(0, chance.choice([20, 300]), (30,), generator=torch.Generator().manual_seed(step))]
        with rows.lacking_at_most(staleness, step - 1):
            seen = model(ids)[:, 0]
        num_wanted += len(ids.unique())
        assert seen.min() >= step - 1 - staleness and seen.max() <= servers.version
        assert seen.min() == (servers.version if rows.oldest is None else rows.oldest)
        lacked |= {step - 1 - int(one) for one in seen}
    assert max(lacked) == staleness, "the bound is used"
    assert (servers.num_asked < num_wanted) == (staleness > 0), "and saves messages"
    assert torch.equal(model(IDS)[:, 0], torch.full((len(IDS),), float(servers.version))), "evaluation asks for all"


def test_a_cache_without_rows_is_refused() -> None:
    with pytest.raises(SpecError, match="cache is 0"):
        mh.nn.Embedding(3, name="t", cache=0)
