"""The recommender: its data, its settings, and what it reaches on any number of workers."""

from __future__ import annotations

import csv
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.errors import DataError, SpecError
from manyhands.native import why_not
from manyhands.recipes import recommender
from manyhands.recipes.recommender_data import Clicks, DataSpec, auc, load, make, read_settings
from manyhands.testing import RankPool

ROOT = Path(__file__).parents[2]
NAMES = ["user", "item", "price", "clicked"]


def write_clicks(path: Path, rows: int = 400) -> list[list[Any]]:
    """Every user either likes an item's first letter or does not."""
    draw = np.random.default_rng(0)
    users, items = draw.integers(0, 12, rows), draw.integers(0, 9, rows)
    table = [
        [f"u{user}", "ab"[item % 2] + str(item), f"{item * 0.5:.1f}" if item else "", int((user + item) % 2)]
        for user, item in zip(users, items, strict=True)
    ]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([NAMES, *table])
    return table


def as_parquet(table: list[list[Any]], path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="NOT SHOWN HERE: no pyarrow")
    from pyarrow import parquet

    columns = dict(zip(NAMES, map(list, zip(*table, strict=True)), strict=True))
    columns["price"] = [float(one) if one else None for one in columns["price"]]
    parquet.write_table(pyarrow.table(columns), path)


def test_the_auc_is_how_often_a_click_is_above_a_row_without() -> None:
    scores = torch.tensor([0.3, 0.1, 0.3, 0.9, -2.0, 0.3])
    clicked = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    pairs = list(itertools.product(scores[clicked == 1].tolist(), scores[clicked == 0].tolist()))
    expected = sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)
    assert auc(scores, clicked) == pytest.approx(expected)
    with pytest.raises(DataError, match="needs both"):
        auc(scores, torch.ones(6))


def test_made_clicks_are_the_same_in_every_process_and_partly_random() -> None:
    first, second = make(4000), make(4000)
    assert torch.equal(first.training[0][0], second.training[0][0])
    assert torch.equal(first.held_out[1], second.held_out[1])
    assert first.ceiling == second.ceiling and 0.75 < first.ceiling < 0.95
    assert (len(first.training[1]), len(first.held_out[1])) == (3600, 400)
    ids = first.training[0][0]
    assert len(set(ids[:, 0].tolist()) & set(ids[:, 1].tolist())) == 0, "fields have no id in common"


def test_csv_and_parquet_say_the_same(tmp_path: Path) -> None:
    table = write_clicks(tmp_path / "clicks.csv")
    found = load(spec(tmp_path / "*.csv"))
    assert (len(found.training[1]) + len(found.held_out[1]), found.fields) == (400, ["user", "item"])
    assert len(found.training[0][0][:, 0].unique()) == 12
    numbers = found.training[0][1]
    torch.testing.assert_close(numbers.mean(0), torch.zeros(1), atol=1e-5, rtol=0)
    as_parquet(table, tmp_path / "clicks.parquet")
    other = load(spec(tmp_path / "clicks.parquet"))
    for left, right in zip(flat(found), flat(other), strict=True):
        assert torch.equal(left, right)


def flat(clicks: Clicks) -> list[torch.Tensor]:
    return [*clicks.training[0], clicks.training[1], *clicks.held_out[0], clicks.held_out[1]]


def spec(files: Path, **settings: Any) -> DataSpec:
    return DataSpec(**{"files": str(files), "label": "clicked", "categories": ["user", "item"], **settings, **PRICE})


PRICE = {"numbers": ["price"]}


def test_what_cannot_be_read_is_refused_with_the_column(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.csv", 30)
    (tmp_path / "clicks.txt").touch()
    for wrong, message in [
        ({"files": tmp_path / "none.csv"}, "No file matches"),
        ({"files": tmp_path / "clicks.txt"}, r"neither .csv nor .parquet"),
        ({"files": tmp_path / "clicks.csv", "categories": ["users"]}, "no column 'users'; it has user, item"),
        ({"files": tmp_path / "clicks.csv", "label": "price"}, "other values than 0 and 1"),
        ({"files": tmp_path / "clicks.csv", "label": "user"}, "is not numeric"),
    ]:
        with pytest.raises(DataError, match=message):
            load(spec(**wrong))
    (tmp_path / "wrong.toml").write_text("dims = 3")
    with pytest.raises(SpecError, match="dims"):
        read_settings(tmp_path / "wrong.toml")
    with pytest.raises(SpecError, match="cannot be read"):
        read_settings(tmp_path / "none.toml")
    with pytest.raises(SpecError, match="the categories are user, item"):
        recommender._index(["user", "item"], "device")


def test_files_as_other_programs_write_them_are_read_or_refused_by_the_line(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.csv", 30)
    text, path = (tmp_path / "clicks.csv").read_text(), tmp_path / "other.csv"
    path.write_text("\ufeff" + text + "\n\n")
    for left, right in zip(flat(load(spec(tmp_path / "clicks.csv"))), flat(load(spec(path))), strict=True):
        assert torch.equal(left, right)
    for wrong, message in [
        ("", "has no column 'clicked'"),
        (text + "u1,a1\n", "Line 32 of .* has 2 values, but the first line 4 names"),
        (text + "u1,a1,nan,1\n", "'price' has a value that is not a finite number"),
        (text + "u1,a1,1.5,\n", "'clicked' has other values than 0 and 1, or none"),
    ]:
        path.write_text(wrong)
        with pytest.raises(DataError, match=message):
            load(spec(path))
    path.write_text("user,item,clicked\nu1,a1,1\n")
    with pytest.raises(DataError, match="do not have the same columns: see 'price'"):
        load(spec(tmp_path / "*.csv"))


def test_the_documented_settings_are_taken(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "embeddings.md").read_text(), re.S)
    (tmp_path / "clicks.toml").write_text(text)
    settings = read_settings(tmp_path / "clicks.toml")
    assert settings.data is not None and settings.data.categories == ["user", "item", "device"]
    named = set(re.findall(r"^(\w+) =", text, re.M))
    fields = {*settings.__struct_fields__, *settings.data.__struct_fields__} - {"data"}
    assert named == fields, "every setting is in the docs"


@pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")
def test_any_number_of_workers_reaches_the_same_auc_below_the_ceiling(ranks: RankPool) -> None:
    arguments = ["--rows", "6000", "--epochs", "3", "--batch-size", "256"]
    [(reached, ceiling)] = ranks(1, recommender.main, arguments)
    assert ceiling is not None and 0.65 < reached < ceiling + 0.01
    for other in ranks(2, recommender.main, arguments):
        assert other[0] == pytest.approx(reached, abs=1e-3)


@pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")
def test_it_learns_from_files(ranks: RankPool, tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.csv", 1500)
    text = (
        f'crosses = [["user", "item"]]\n[data]\nfiles = "{tmp_path}/clicks.csv"\nlabel = "clicked"\n'
        'categories = ["user", "item"]\nnumbers = ["price"]\n'
    )
    (tmp_path / "clicks.toml").write_text(text)
    arguments = ["--settings", str(tmp_path / "clicks.toml"), "--epochs", "6", "--batch-size", "64"]
    [(reached, ceiling)] = ranks(1, recommender.main, arguments)
    assert ceiling is None and reached > 0.9
