"""Embeddings by id: as layers of torch, and trained by any number of workers to the same bits."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.embedding.row_layer import Sparse, TableGradient, encode, merge
from manyhands.embedding.row_layer import decode as unpacked
from manyhands.errors import CheckpointMismatch, DataError, SpecError, UsageError
from manyhands.native import why_not
from manyhands.testing import RankPool
from tests.embedding.row_workloads import (
    Clicks,
    clicks,
    contents,
    loss,
    make_trainer,
    own_loop,
    save_and_load,
    train,
    train_evaluate_and_predict,
    train_with_an_odd_one,
    warnings_of_a_run,
    with_lbfgs,
)

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")


def as_dense(layer: mh.nn.Embedding, size: int) -> nn.Embedding:
    """torch's own layer with the same rows, for ids from 0."""
    with torch.no_grad():
        return nn.Embedding.from_pretrained(layer(torch.arange(size)), freeze=False)


def test_a_plain_loop_trains_rows_as_torch_trains_a_dense_table() -> None:
    layer = mh.nn.Embedding(6, name="items", optimizer=mh.optim.rows.Adagrad(lr=0.3), scale=1.0)
    dense = as_dense(layer, 20)
    optimizer = torch.optim.Adagrad(dense.parameters(), lr=0.3)
    for step in range(15):
        ids = torch.randint(0, 20, (4, 7), generator=torch.Generator().manual_seed(step))
        for model in (layer, dense):
            found = model(ids)
            assert found.shape == (4, 7, 6)
            (found.pow(3).sum() + model(ids[0]).sum()).backward()
        mh.optim.rows.step(layer)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(layer(torch.arange(20)), dense.weight)
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("combiner", ["sum", "mean", "max"])
def test_bags_are_those_of_torch_with_padding_or_with_offsets(combiner) -> None:
    layer = mh.nn.EmbeddingBag(
        3, name="bags", combiner=combiner, padding=-1, optimizer=mh.optim.rows.SGD(lr=1.0), scale=1.0
    )
    with torch.no_grad():
        rows = layer(torch.arange(9)[:, None])
    dense = nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode=combiner)
    padded = torch.tensor([[4, 4, -1], [-1, -1, -1], [8, 0, 1], [-1, 2, -1]])
    flat, offsets = torch.tensor([4, 4, 8, 0, 1, 2]), torch.tensor([0, 2, 2, 5])
    found, same, expected = layer(padded), layer(flat, offsets), dense(flat, offsets)
    assert torch.equal(found, expected) and torch.equal(same, expected)
    (found * torch.arange(12.0).view(4, 3)).sum().backward()
    (expected * torch.arange(12.0).view(4, 3)).sum().backward()
    mh.optim.rows.step(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(torch.arange(9)[:, None]), dense.weight - dense.weight.grad)
        assert not layer(torch.empty(2, 0, dtype=torch.int64)).any()
        assert not layer(torch.full((2, 4), -1)).any()
    layer(torch.full((2, 4), -1)).sum().backward()  # a slice may have nothing but empty bags


def test_only_what_backward_has_reached_changes_and_is_counted() -> None:
    layer = mh.nn.Embedding(2, name="items", admit_after=2, optimizer=mh.optim.rows.SGD(lr=1.0))
    ids = torch.tensor([5])
    first = layer(ids).detach()
    layer(torch.tensor([6])).sum()  # never differentiated
    layer(ids).sum().backward()
    mh.optim.rows.step(layer)
    assert torch.equal(layer(ids), first), "seen once: the gradient was dropped"
    layer(ids).sum().backward()
    mh.optim.rows.step(layer)
    assert torch.equal(layer(ids), first - 1)
    assert layer.state_dict()["_extra_state"]["ids"].tolist() == [5]
    assert not layer.state_dict()["_extra_state"]["candidates"].tolist()


def test_rows_go_through_a_state_dict_and_a_copy() -> None:
    model = Clicks()
    for _ in range(3):
        loss(model, clicks(60)).backward()
        mh.optim.rows.step(model)
    other, clone = Clicks(), copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    assert contents(other) == contents(clone) == contents(model) != contents(Clicks())
    loss(clone, clicks(60)).backward()
    mh.optim.rows.step(clone)
    assert contents(clone) != contents(other) == contents(model)


def test_contributions_travel_as_bytes_and_are_summed_in_the_order_given() -> None:
    one = TableGradient("a", torch.tensor([3, -4]), torch.tensor([[1e8, 1.0], [2.0, 2.0]]))
    two = TableGradient("b", torch.tensor([9]), torch.ones(1, 3))
    three = TableGradient("a", torch.tensor([7, 3]), torch.tensor([[5.0, 5.0], [-1e8, 1.0]]))
    four = TableGradient("a", torch.tensor([3]), torch.tensor([[1.0, 1.0]]))
    empty = TableGradient("b", torch.empty(0, dtype=torch.int64), torch.empty(0, 3))
    found = unpacked(encode({4: [one, two], 7: [three, empty], 9: []}))
    assert sorted(found) == [4, 7]
    a, b = merge([*found[4], *found[7], four])
    assert (a.table, a.ids.tolist(), b.ids.tolist()) == ("a", [7, -4, 3], [9])
    assert a.gradients.tolist() == [[5.0, 5.0], [2.0, 2.0], [1.0, 3.0]], "1e8 - 1e8 + 1, in this order"


def test_any_number_of_workers_ends_with_the_same_rows_to_the_bit(ranks: RankPool) -> None:
    table = {"admit_after": 2, "keep_steps": 6}
    (alone,) = ranks(1, train, None, table)
    assert alone[1][-1] < alone[1][0]
    assert len(alone[0]["users._extra_state/ids"]) > 8 * 20
    for workers in (2, 3):
        for found in ranks(workers, train, None, table):
            assert found == alone


def test_an_odd_copy_is_healed_and_audited_slices_count_once(ranks: RankPool) -> None:
    (alone,) = ranks(1, train)
    assert ranks(3, train_with_an_odd_one, flags={"train.check_every": 1}) == [alone] * 3
    assert ranks(2, train, flags={"train.audit": True}) == [alone] * 2


def test_gloo_clipping_and_a_loop_of_ones_own_agree_too(ranks: RankPool) -> None:
    (alone,) = ranks(1, own_loop)
    for found in ranks(2, own_loop, flags={"comm.plane": "gloo", "train.clip_norm": 0.01}):
        assert found["users._extra_state/ids"] == alone["users._extra_state/ids"] and found != alone
    for found in ranks(2, own_loop, flags={"comm.plane": "gloo"}):
        assert found == alone


def test_a_run_resumes_with_its_rows_on_another_number_of_workers(ranks: RankPool, tmp_path: Path) -> None:
    (whole,) = ranks(1, train, {"epochs": 4})
    ranks(2, train, {"epochs": 2}, run_dir=tmp_path / "run")
    found = ranks(3, train_on, run_dir=tmp_path / "run")
    assert all(one == whole[0] for one in found)


def train_on() -> dict[str, bytes]:
    """The run's second call, after a first one that is done."""
    trainer = make_trainer()
    trainer.fit(clicks(), epochs=2, batch_size=33)
    trainer.fit(clicks(), epochs=2, batch_size=33)
    return contents(trainer.model)


def test_evaluation_makes_no_rows_and_counts_nothing(ranks: RankPool) -> None:
    (left_alone, results, outputs), *_ = ranks(1, train_evaluate_and_predict)
    assert left_alone and math.isfinite(results["loss"])
    for other in ranks(2, train_evaluate_and_predict):
        assert other[0] and other[1] == results and np.array_equal(other[2], outputs)


def test_saved_weights_have_the_rows_and_every_worker_loads_them(ranks: RankPool, tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.pt"):
        for saved, loaded in ranks(2, save_and_load, str(tmp_path / name)):
            assert saved == loaded


def test_a_strategy_without_servers_says_that_workers_keep_the_rows(ranks: RankPool) -> None:
    warnings = ranks(2, warnings_of_a_run)
    assert [sum("every worker keeps all rows" in text for text in one) for one in warnings] == [1, 0]


def test_an_optimizer_that_evaluates_the_loss_several_times_is_refused(ranks: RankPool) -> None:
    assert "LBFGS evaluates the loss several times" in ranks(1, with_lbfgs)[0]


@pytest.mark.parametrize("ids", [torch.ones(3), torch.ones(3, dtype=torch.bool), [1, 2]])
def test_ids_that_are_not_integers_are_refused(ids: Any) -> None:
    with pytest.raises(DataError, match="not integers"):
        mh.nn.Embedding(2, name="items")(ids)
    with pytest.raises(DataError, match="not integers"):
        mh.nn.EmbeddingBag(2, name="items")(ids)


def test_what_cannot_work_is_refused_with_what_to_do() -> None:
    with pytest.raises(SpecError, match="combiner is 'min'"):
        mh.nn.EmbeddingBag(2, name="items", combiner="min")
    with pytest.raises(DataError, match="without offsets"):
        mh.nn.EmbeddingBag(2, name="items")(torch.tensor([1, 2]))
    with pytest.raises(DataError, match="offsets from -1 to 0"):
        mh.nn.EmbeddingBag(2, name="items", padding=0)(torch.tensor([1, 2]), torch.tensor([0, -1]))
    with pytest.raises(SpecError, match="Two layers have a table of the name 'items'"):
        Sparse(nn.ModuleList([mh.nn.Embedding(2, name="items"), mh.nn.Embedding(3, name="items")]))
    with pytest.raises(UsageError, match=r"has no mh\.nn\.Embedding"):
        mh.optim.rows.step(nn.Linear(1, 1))
    with pytest.raises(CheckpointMismatch, match="dimension 2"):
        mh.nn.Embedding(3, name="items").load_state_dict(mh.nn.Embedding(2, name="items").state_dict())
