"""Files as data: every format, damaged ones, and files that no host holds whole."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from manyhands.data.evaluation import eval_pieces
from manyhands.data.row_exchange import decode, encode
from manyhands.data.sample_order import SliceDivision
from manyhands.data.sources import file_index
from manyhands.data.sources.as_source import as_source, split
from manyhands.errors import DataError, DataFetchFailed
from tests.data.data_cases import ThreadExchange, batches_of, context, take_all, together


def in_order(pattern, **settings):
    return take_all(batches_of(str(pattern), batch_size=3, shuffle=False, **settings))


def test_npy_files_are_one_array_in_the_order_of_their_names(tmp_path):
    np.save(tmp_path / "b.npy", np.arange(4, 7))
    np.save(tmp_path / "a.npy", np.arange(4))
    assert torch.cat(in_order(tmp_path / "*.npy")).tolist() == list(range(7))
    assert sorted(torch.cat(take_all(batches_of(tmp_path / "*.npy"))).tolist()) == list(range(7))


def test_patterns_may_go_through_directories(tmp_path):
    for name in ("x/1", "x/2", "y/1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.save(tmp_path / f"{name}.npy", np.array([int(name[-1]) + 10 * (name[0] == "y")]))
    assert torch.cat(in_order(tmp_path / "**" / "*.npy")).tolist() == [1, 2, 11]
    assert torch.cat(in_order(tmp_path / "*" / "1.npy")).tolist() == [1, 11]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_files_give_columns(tmp_path, save):
    save(tmp_path / "a.npz", x=np.arange(10.0).reshape(5, 2), y=np.arange(5))
    first, second = in_order(tmp_path / "*.npz")
    assert first["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert second["y"].tolist() == [3, 4]


def test_safetensors_files_give_columns_bfloat16_too(tmp_path):
    x = torch.randn(5, 2).bfloat16()
    save_file({"x": x, "y": torch.arange(5)}, tmp_path / "a.safetensors", metadata={"made": "here"})
    first, second = in_order(tmp_path / "*.safetensors")
    assert torch.equal(torch.cat([first["x"], second["x"]]), x)
    assert second["y"].tolist() == [3, 4]


def test_csv_with_names_gives_columns_and_without_gives_vectors(tmp_path):
    (tmp_path / "named.csv").write_text('"x",y\n1,2\n3,4.5\n')
    (batch,) = in_order(tmp_path / "named.csv")
    assert {name: column.tolist() for name, column in batch.items()} == {"x": [1, 3], "y": [2, 4.5]}
    (tmp_path / "plain.csv").write_text("1,2\n3,4.5\n")
    (batch,) = in_order(tmp_path / "plain.csv")
    assert batch.tolist() == [[1, 2], [3, 4.5]]


def test_jsonl_and_txt_give_a_row_per_line(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"n": n, "word": f"w{n}"}) for n in range(4)) + "\n\n")
    first, second = in_order(tmp_path / "*.jsonl")
    assert first["n"].tolist() == [0, 1, 2]
    assert second["word"] == ["w3"]
    (tmp_path / "a.txt").write_bytes("eins\r\n\nzw\u00f6lf".encode())
    assert in_order(tmp_path / "*.txt") == [["eins", "", "zw\u00f6lf"]]


def test_a_collate_function_gets_the_rows_of_a_file_one_by_one(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(3), y=np.arange(3))
    assert in_order(tmp_path / "*.npz", collate=lambda rows: [sorted(row) for row in rows]) == [[["x", "y"]] * 3]
    np.save(tmp_path / "a.npy", np.arange(3))
    assert in_order(tmp_path / "*.npy", collate=len) == [3]


def test_more_files_than_may_be_open_are_opened_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(file_index, "_MAX_OPEN", 2)
    for number in range(5):
        np.save(tmp_path / f"{number}.npy", np.array([number, number]))
    source = as_source(tmp_path / "*.npy")
    assert source.take(np.arange(10)).tolist() == [n for n in range(5) for _ in range(2)]
    assert len(source.reader._index) == 2


def test_a_split_of_files_numbers_its_rows_from_zero(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6))
    train, validation = split(tmp_path / "*.npy", 0.5)
    assert train.take(np.array([0])).tolist() == [0]
    assert validation.take(np.array([0])).tolist() == [3]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda d: None, "No file matches"),
        (lambda d: (d / "a.parquet").write_text(""), "not a known kind of file"),
        (lambda d: (d / "a.npy").write_bytes(b"\x93NUMPY"), "cannot be read as .npy"),
        (lambda d: np.save(d / "a.npy", np.array([{}]), allow_pickle=True), "cannot be read as .npy"),
        (lambda d: np.savez(d / "a.npz", x=np.array([{}])), "holds Python objects"),
        (lambda d: np.savez(d / "a.npz", x=np.arange(3), y=np.arange(2)), "same first dimension"),
        (lambda d: (d / "a.npz").write_bytes(b"PK"), "cannot be read as .npz"),
        (lambda d: (d / "a.safetensors").write_bytes(b"\xff" * 20), "header claims"),
        (lambda d: (d / "a.csv").write_text("a,b\n1,x\n"), "cannot be read as .csv"),
        (lambda d: [np.save(d / f"{n}.npy", np.zeros((2, n))) for n in (1, 2)], "Files differ in what a row is"),
        (lambda d: (d / "a.txt").write_text(""), "no rows"),
    ],
)
def test_files_that_cannot_be_used_are_refused_by_name(tmp_path, make, reason):
    make(tmp_path)
    with pytest.raises(DataError, match=reason):
        as_source(f"{tmp_path}/*")


def test_a_directory_is_not_a_pattern(tmp_path):
    with pytest.raises(DataError, match="is a directory") as caught:
        as_source(tmp_path)
    assert caught.value.fix == (f'"{tmp_path}/*.npy"',)


def test_a_line_that_is_not_json_fails_the_step_that_needs_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": \n')
    with pytest.raises(DataFetchFailed, match="slice 0 of step 1"):
        in_order(tmp_path / "a.jsonl")


def spread(tmp_path, kind="npy"):
    """Three hosts: file 0 everywhere, file 1 on the first two, file 2 on the last; host 1 has nothing else."""
    rows = {"0": range(5), "1": range(5, 12), "2": range(12, 23)}
    for host, names in enumerate((("0", "1"), ("0", "1"), ("0", "2"))):
        (tmp_path / str(host)).mkdir()
        for name in names:
            if kind == "npy":
                np.save(tmp_path / str(host) / f"{name}.npy", np.array(rows[name]))
            else:
                text = "".join(json.dumps({"n": row}) + "\n" for row in rows[name])
                (tmp_path / str(host) / f"{name}.jsonl").write_text(text)


@pytest.mark.parametrize("kind", ["npy", "jsonl"])
def test_rows_of_files_that_no_host_holds_whole_reach_the_workers_that_compute_them(tmp_path, kind):
    spread(tmp_path, kind)
    shared = ThreadExchange(3)

    def work(rank):
        batches = batches_of(
            f"{tmp_path}/{rank}/*",
            batch_size=5,
            slices=5,
            rank=rank,
            world_size=3,
            epochs=2,
            exchange=shared.of(rank),
        )
        taken = []
        for step in batches:
            pieces = [piece.batch if kind == "npy" else piece.batch["n"] for piece in step.mine()]
            taken += [(step.epoch, rows.tolist()) for rows in pieces]
            batches.divide(SliceDivision(3, (3, 1, 1) if step.number == 2 else (1, 1, 3)))
        return taken

    seen = [pair for pairs in together(3, work) for pair in pairs]
    for epoch in range(2):
        assert sorted(row for number, rows in seen if number == epoch for row in rows) == list(range(23))
    (tmp_path / "all").mkdir()
    for path in [*(tmp_path / "0").iterdir(), *(tmp_path / "2").iterdir()]:
        (tmp_path / "all" / path.name).write_bytes(path.read_bytes())
    whole = batches_of(f"{tmp_path}/all/*", batch_size=5, slices=5, epochs=2)
    alone = [
        (step.epoch, (piece.batch if kind == "npy" else piece.batch["n"]).tolist())
        for step in whole
        for piece in step.mine()
    ]
    assert sorted(alone) == sorted(seen)


def test_evaluation_works_with_a_host_without_files(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    np.save(tmp_path / "0" / "a.npy", np.arange(7))
    shared = ThreadExchange(2)

    def work(rank):
        exchange = shared.of(rank)
        source = as_source(f"{tmp_path}/{rank}/*.npy", context=context(rank, 2), exchange=exchange)
        pieces = eval_pieces(source, batch_size=2, rank=rank, world_size=2, exchange=exchange)
        return [(piece.index, piece.batch.tolist()) for piece in pieces]

    first, second = together(2, work)
    assert first + second == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5]), (3, [6])]


def test_nothing_is_sent_when_every_worker_has_every_file(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(9))
    shared = ThreadExchange(2)
    together(
        2,
        lambda rank: take_all(
            batches_of(f"{tmp_path}/*.npy", slices=2, rank=rank, world_size=2, exchange=shared.of(rank))
        ),
    )
    assert shared.calls == ["data/files", "data/agree"]


def test_a_file_that_differs_between_hosts_is_refused_by_name(tmp_path):
    for host in (0, 1):
        (tmp_path / str(host)).mkdir()
        np.save(tmp_path / str(host) / "a.npy", np.arange(3 + host))
    shared = ThreadExchange(2)
    with pytest.raises(DataError, match=r"a\.npy has 152 bytes and 3 rows on host 0, but 160 bytes"):
        together(
            2,
            lambda rank: as_source(f"{tmp_path}/{rank}/*.npy", context=context(rank, 2), exchange=shared.of(rank)),
        )


def test_rows_survive_the_way_and_nothing_else_gets_through():
    value = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": [b"x", "y", 1, 2.5, None, True]}
    back = decode(encode(value))
    np.testing.assert_array_equal(back["a"], value["a"])
    assert back["b"] == value["b"]
    assert back["a"].dtype == np.int16
    for bad in (b"\xc1", encode(value)[:-3], b"\xc7\x05\x02hello", b'\xc7\x0d\x01\x09\x00\x00\x00["|O",[]]'):
        with pytest.raises(DataError, match="cannot be read"):
            decode(bad)
    with pytest.raises(TypeError, match="cannot be sent"):
        encode({"a": object()})
