"""Tables of rows against a dict, optimizers against torch's and against formulas, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands.embedding.row_optimizers import FTRL, SGD, Adagrad, Adam, RowOptimizer, RowwiseAdagrad, TableSpec
from manyhands.embedding.row_table import (
    TURNS,
    RowTable,
    TableCapacity,
    add_rows,
    first_places,
    in_parts,
    larger,
    most_room,
    repeat_rows_,
    unique,
)
from manyhands.errors import CheckpointMismatch, DataError, EnvironmentProblem, SpecError
from manyhands.native import why_not
from manyhands.parameter_server.tables.server_tables import PARTS, part_of
from tests.embedding.rows_reference import DictTable, listing
from tests.ftrl_formulas import FORMULAS, weight_after

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")

DIM = 3
BOUND = 2_000  # about two dozen rows, or a dozen and as many candidates
EXTREMES = [0, -1, 2**63 - 1, -(2**63)]
IDS = st.lists(st.sampled_from([*EXTREMES, *range(10, 90)]), unique=True, max_size=8)


def spec(**settings: Any) -> TableSpec:
    return TableSpec(**{"name": "items", "dim": DIM, "optimizer": SGD(lr=0.5), **settings})


def gradients_of(ids: list[int], number: int) -> Any:
    return np.sin(np.outer([one % 97 + number for one in ids], np.arange(1, DIM + 1))).astype(np.float32)


def apply(table: RowTable, number: int, ids: list[int]) -> None:
    table.update(number, torch.tensor(ids, dtype=torch.int64), torch.from_numpy(gradients_of(ids, number)))


@settings(max_examples=60, deadline=None)
@given(
    updates=st.lists(st.tuples(st.integers(1, 4), IDS), max_size=30),
    admit_after=st.integers(1, 3),
    keep_steps=st.sampled_from([None, 1, 5, 16]),
    max_bytes=st.sampled_from([None, BOUND]),
    restored_at=st.integers(0, 30),
)
def test_a_table_has_the_rows_that_a_dict_would_have(updates, admit_after, keep_steps, max_bytes, restored_at) -> None:
    about = spec(admit_after=admit_after, keep_steps=keep_steps, max_bytes=max_bytes)
    table, reference, number = RowTable(about, num_rows=4), DictTable(about), 0
    for place, (later, ids) in enumerate(updates):
        number += later
        before = [*ids, 5, *EXTREMES, *range(10, 90)]
        rows = table.lookup(torch.tensor(before))
        apply(table, number, ids)
        assert torch.equal(table.lookup(torch.tensor(before), number - 1), rows), "not as it was before the update"
        reference.update(number, ids, gradients_of(ids, number))
        assert listing(table) == reference.listing()
        looked_up = [*ids, 5, *EXTREMES]
        found = table.lookup(torch.tensor(looked_up))
        assert found.numpy().tobytes() == reference.lookup(looked_up).astype(np.float32).tobytes()
        if place == restored_at:
            other = copy.deepcopy(table)
            assert [other.digest(turn) for turn in range(TURNS)] == [table.digest(turn) for turn in range(TURNS)]
            table = other


def test_memory_stays_within_its_bound_and_holds_what_was_touched_last() -> None:
    about = spec(max_bytes=50_000)
    most = most_room(about)
    table = RowTable(about, num_rows=8)
    for number in range(1, 400):
        apply(table, number, list(range(number * 7, number * 7 + 9)))
    journal = TableCapacity(*most[:4], 4096).num_bytes - most.num_bytes
    assert table.num_bytes <= 50_000 + journal + 4096
    saved = table.snapshot()
    assert most.rows * 14 // 16 <= len(table) <= most.rows
    assert saved["ids"].tolist() == list(range(399 * 7 + 9 - len(table), 399 * 7 + 9))


def test_a_row_starts_with_a_function_of_seed_name_and_id() -> None:
    ids = torch.tensor([*EXTREMES, *range(3000)])
    first = {init: RowTable(spec(dim=8, init=init, scale=0.5)).lookup(ids) for init in ("uniform", "normal", "zeros")}
    assert torch.equal(RowTable(spec(dim=8, init="uniform", scale=0.5)).lookup(ids.flip(0)).flip(0), first["uniform"])
    for other in ({"seed": 1}, {"name": "users"}):
        assert not torch.isin(RowTable(spec(dim=8, scale=0.5, **other)).lookup(ids[:9]), first["uniform"]).any()
    assert not first["zeros"].any()
    uniform, normal = first["uniform"].double(), first["normal"].double()
    assert -0.5 <= uniform.min() < -0.499 and 0.499 < uniform.max() < 0.5
    assert abs(uniform.mean()) < 0.01 and abs(uniform.std() - 0.5 / 3**0.5) < 0.005
    assert abs(normal.mean()) < 0.01 and abs(normal.std() - 0.5) < 0.01
    assert abs((normal.abs() < 0.5).double().mean() - 0.6827) < 0.01, "as a normal distribution has it"


def test_the_start_is_the_same_on_every_machine() -> None:
    """Numbers that were written down: a table that moves to another machine must continue with the same ones."""
    found = RowTable(spec(dim=2, scale=1.0)).lookup(torch.tensor([7, -7])).flatten().tolist()
    assert [one.hex() for one in found] == [
        *("-0x1.fca0e00000000p-4", "-0x1.2c12980000000p-1", "0x1.d439680000000p-2", "0x1.dee3e80000000p-2")
    ]


def trained(optimizer: RowOptimizer, gradients: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The first weights of one row, and the last."""
    table = RowTable(TableSpec(name="one", dim=gradients.shape[1], optimizer=optimizer, scale=1.0, **settings))
    one = torch.tensor([42])
    start = table.lookup(one)[0]
    for number, gradient in enumerate(gradients, 1):
        table.update(number, one, gradient[None] * 4, factor=0.25)
    return start, table.lookup(one)[0]


@pytest.mark.parametrize(
    ("rule", "torchs"),
    [
        (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
        (Adagrad(0.1, initial_accumulator=0.2), lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.2)),
        (Adam(0.1, betas=(0.8, 0.99)), lambda p: torch.optim.Adam(p, 0.1, betas=(0.8, 0.99))),
    ],
    ids=["SGD", "Adagrad", "Adam"],
)
def test_a_row_goes_where_torchs_optimizer_goes(rule, torchs) -> None:
    gradients = torch.randn(60, 21, generator=torch.Generator().manual_seed(0))
    start, end = trained(rule, gradients)
    param = nn.Parameter(start.double())
    optimizer = torchs([param])
    for gradient in gradients:
        param.grad = gradient.double()
        optimizer.step()
    torch.testing.assert_close(end.double(), param.detach(), rtol=2e-5, atol=2e-6)


def test_rowwise_adagrad_has_one_rate_for_the_row() -> None:
    gradients = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    start, end = trained(RowwiseAdagrad(0.1), gradients)
    w, n = start.double(), 0.0
    for gradient in gradients.double():
        n += float(gradient.pow(2).mean())
        w -= 0.1 * gradient / (n**0.5 + 1e-10)
    torch.testing.assert_close(end.double(), w, rtol=2e-5, atol=2e-6)


FTRL_SETTINGS = {
    "plain": {},
    "l1 and l2": {"l1": 0.5, "l2": 0.3},
    "shrinkage": {"l1": 0.1, "l2": 0.1, "l2_shrinkage": 0.05},
    "another power": {"l1": 0.2, "lr_power": -0.7, "beta": 0.4, "initial_accumulator": 0.2},
}


@pytest.mark.parametrize("init", ["uniform", "zeros"])
@pytest.mark.parametrize("convention", FORMULAS)
@pytest.mark.parametrize("settings", FTRL_SETTINGS.values(), ids=FTRL_SETTINGS)
def test_ftrl_follows_the_formulas_of_the_dense_one(settings, convention, init) -> None:
    gradients = torch.randn(80, 33, generator=torch.Generator().manual_seed(2)) + 0.2
    gradients[:, ::7] *= 0.01
    start, end = trained(FTRL(0.3, convention=convention, **settings), gradients, init=init)
    expected = [
        weight_after(convention, float(w), gradients[:, j].double().tolist(), 0.3, settings)
        for j, w in enumerate(start)
    ]
    torch.testing.assert_close(end.double(), torch.tensor(expected, dtype=torch.float64), rtol=2e-3, atol=2e-5)
    if settings.get("l1", 0) >= 0.5:
        assert 0 < int((end == 0).sum()) < 33, "exact zeros, and not only zeros"


@given(ids=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5), max_size=50))
def test_unique_ids_come_in_the_order_of_parts_and_of_their_first_appearance(ids) -> None:
    different, inverse = unique(torch.tensor(ids, dtype=torch.int64))
    assert different.tolist() == sorted(dict.fromkeys(ids), key=lambda one: one * 0x9E3779B97F4A7C15 % 2**64 >> 60)
    is_ordered, bounds = in_parts(different)
    parts = part_of(different).tolist()
    assert is_ordered and [parts.index(p) if p in parts else bounds[p + 1] for p in range(PARTS)] == bounds[:-1]
    assert different[inverse].tolist() == ids
    first = first_places(inverse, len(different))
    assert first.tolist() == [ids.index(one) for one in different.tolist()]
    rows = torch.full((len(ids), 1), torch.nan)
    rows[first, 0] = torch.arange(1.0 * len(different))
    repeat_rows_(rows, inverse, first)
    assert torch.equal(rows[:, 0], inverse.float())
    values = torch.arange(2.0 * len(ids)).view(-1, 2)
    sums = add_rows(values, inverse, len(different))
    expected = torch.zeros(len(different), 2).index_add_(0, inverse, values)
    assert torch.equal(sums, expected)


def test_growing_is_arithmetic() -> None:
    room, most = TableCapacity(DIM, 0, 100, 0, 50), TableCapacity(DIM, 0, 1000, 1000, 0)
    assert larger(room, room._replace(rows=101), most) == room._replace(rows=200)
    assert larger(room, room._replace(rows=700), most) == room._replace(rows=700)
    assert larger(room, room._replace(touched=60), most) == room._replace(touched=120)
    assert larger(room, room._replace(rows=1001), most) == most._replace(touched=50)
    assert larger(room, room._replace(candidates=3), most).candidates == 1000


def test_what_cannot_be_is_refused_with_what_to_do() -> None:
    table = RowTable(spec(max_bytes=2_000))
    apply(table, 4, [1, 2])
    before = listing(table)
    with pytest.raises(DataError, match="numbers must ascend"):
        apply(table, 4, [3])
    with pytest.raises(DataError, match="twice"):
        apply(table, 5, [2, 3, 4, 2])
    with pytest.raises(DataError, match="twice"):
        apply(table, 5, [9, 3, 9])
    with pytest.raises(SpecError, match="touches 200 ids"):
        apply(table, 5, list(range(200)))
    assert listing(table) == before
    with pytest.raises(DataError, match="gradients of shape"):
        table.update(6, torch.tensor([1]), torch.zeros(1, DIM + 1))
    with pytest.raises(CheckpointMismatch, match="Adagrad"):
        RowTable(spec(optimizer=Adagrad())).restore(table.snapshot())
    with pytest.raises(SpecError, match="less than one row"):
        RowTable(spec(max_bytes=100))


def test_without_the_extension_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.embedding.row_table.why_not", lambda: "the C extension is not built (no gcc)")
    with pytest.raises(EnvironmentProblem, match="computed in C, and the C extension is not built"):
        RowTable(spec())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(lr=0.0), "lr is 0"),
        (lambda: Adagrad(initial_accumulator=-1.0), "initial_accumulator is -1"),
        (lambda: Adam(betas=(0.9, 1.0)), "betas are"),
        (lambda: FTRL(l1=-1.0), "l1 is -1"),
        (lambda: FTRL(convention="keras"), "there are paper and tensorflow"),
        (lambda: SGD(lr="0.1"), "lr is '0.1', but must be a number above 0"),
        (lambda: spec(name=""), "name is ''"),
        (lambda: spec(name=7), "name is 7"),
        (lambda: spec(dim=0), "dim is 0"),
        (lambda: spec(dim=8.0), "dim is 8.0, but must be a whole number"),
        (lambda: spec(max_bytes="1GB"), "max_bytes is '1GB'"),
        (lambda: spec(init="ones"), "init is 'ones'"),
        (lambda: spec(scale=-1.0), "scale is -1"),
        (lambda: spec(admit_after=0), "admit_after is 0"),
        (lambda: spec(keep_steps=-2), "keep_steps is -2"),
        (lambda: spec(optimizer=torch.optim.SGD), "cannot run on rows"),
    ],
)
def test_settings_without_a_meaning_are_refused(make, message) -> None:
    with pytest.raises(SpecError, match=message):
        make()
