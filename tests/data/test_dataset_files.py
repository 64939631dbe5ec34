"""`mh.Dataset` over files and pictures: rows, dealing, augmentation in loader processes, errors."""

import colorsys
import functools
import json
import random
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

import manyhands as mh
from manyhands.data.pipeline import leaves
from manyhands.data.sources import file_formats
from manyhands.data.sources.as_source import as_source
from manyhands.errors import DataError
from tests.data.data_cases import ThreadExchange, augment, together
from tests.data.test_dataset_chains import Run, elements, plain

Image = pytest.importorskip("PIL.Image")
parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")


def numbered(image, label):
    return random.random(), float(torch.rand(())), label


@pytest.fixture
def pictures(tmp_path):
    """Two classes of JPEG files of several sizes."""
    random.seed(0)
    for number in range(10):
        folder = tmp_path / "pictures" / ("bees" if number % 2 else "ants")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.RandomState(number).randint(0, 255, (12 + number, 16, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return str(tmp_path / "pictures")


def test_every_kind_of_file_gives_its_rows_in_order(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\nthree\n")
    (tmp_path / "a.jsonl").write_text('{"n": 1, "t": "x"}\n\n{"n": 2, "t": "y"}\n')
    (tmp_path / "a.csv").write_text("n,m\n1,2\n3,4\n")
    np.save(tmp_path / "a.npy", np.arange(6).reshape(3, 2))
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    save_file({"x": torch.arange(3.0)}, tmp_path / "a.safetensors")
    rows = {"n": [1, 2, 3, 4, 5], "t": list("abcde")}
    parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet", row_group_size=2)
    shown = {
        "txt": ["one", "", "three"],
        "jsonl": [{"n": 1, "t": "x"}, {"n": 2, "t": "y"}],
        "csv": [{"n": 1.0, "m": 2.0}, {"n": 3.0, "m": 4.0}],
        "npy": [[0, 1], [2, 3], [4, 5]],
        "npz": [{"x": 0}, {"x": 1}, {"x": 2}],
        "safetensors": [{"x": 0.0}, {"x": 1.0}, {"x": 2.0}],
        "parquet": [{"n": n, "t": t} for n, t in zip(*rows.values(), strict=True)],
    }
    assert {f".{kind}" for kind in shown} == {*file_formats.ENDINGS, leaves.PARQUET}
    for kind, wanted in shown.items():
        data = mh.Dataset.from_files(str(tmp_path / f"*.{kind}"))
        assert [plain(value) for value in data] == wanted and len(data) == len(wanted)
        # As a batch of its own, read by the trainer's sources.
        taken = as_source(data.shuffle("full").batch(2), seed=1).take(np.arange(len(wanted)))
        assert sorted(map(str, unstacked(taken))) == sorted(map(str, wanted))
    path = str(tmp_path / "a.parquet")
    assert elements(mh.Dataset.from_files(path, columns=["n"]))[4] == {"n": 5}
    groups = mh.Dataset.list_files(path, shuffle=False, row_groups=True)
    assert len(groups) == 3 and elements(groups.interleave(mh.Dataset.from_files, cycle_length=3)) == [
        {"n": n, "t": "abcde"[n - 1]} for n in (1, 3, 5, 2, 4)
    ]


def unstacked(batch):
    if isinstance(batch, dict):
        return [dict(zip(batch, row, strict=True)) for row in zip(*(plain(one) for one in batch.values()), strict=True)]
    return plain(batch)


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x\n")
    (tmp_path / "a.what").write_text("x\n")
    (tmp_path / "torn.jpg").write_text("x\n")
    for make, what in [
        (lambda: mh.Dataset.from_files(str(tmp_path / "*.npy")), "No file matches"),
        (lambda: mh.Dataset.from_files(str(tmp_path / "*")), "several kinds: .jpg, .txt, .what"),
        (lambda: mh.Dataset.from_files(str(tmp_path / "a.what")), "not a known kind"),
        (lambda: mh.Dataset.from_files(str(tmp_path)), "no pictures in subfolders"),
        (lambda: mh.Dataset.from_files(str(tmp_path / "a.txt"), columns=["n"]), "for Parquet"),
        (lambda: mh.Dataset.list_files(str(tmp_path / "a.txt"), row_groups=True), "no row groups"),
        (lambda: list(mh.Dataset.from_files(str(tmp_path / "torn.jpg"))), "cannot be read as a picture"),
    ]:
        with pytest.raises(DataError, match=what):
            make()
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(DataError, match="pillow decodes pictures") as caught:
        as_source(mh.Dataset.from_files(str(tmp_path / "torn.jpg")).batch(1))
    assert caught.value.fix == ('pip install "manyhands[images]"',)


def test_list_files_has_another_order_in_each_epoch_and_interleave_follows(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number}{line}\n" for line in "abc"))
    files = mh.Dataset.list_files(str(tmp_path / "*.txt"))
    assert len({tuple(elements(files, epoch)) for epoch in range(5)}) > 1
    assert elements(mh.Dataset.list_files(str(tmp_path / "*.txt"), shuffle=False)) == sorted(elements(files))
    lines = files.interleave(mh.Dataset.from_files, cycle_length=2, block_length=1).batch(4)
    whole, _ = Run(lines).steps()
    assert Run(lines).steps(3)[0] == whole
    for epoch in range(2):
        order = [path[-5] for path in elements(files, epoch, seed=3)]
        a, b, c, d = order
        wanted = [x + line for pair in ((a, b), (c, d)) for line in "abc" for x in pair]
        assert [line for _, of, step in whole if of == epoch for part in step for line in part] == wanted


def test_a_worker_reads_its_own_pictures_and_no_others(pictures, monkeypatch):
    read = []
    monkeypatch.setattr(leaves, "picture", lambda path: read.append(path) or torch.zeros(3, 4, 4))
    run = Run(mh.Dataset.from_files(pictures).shuffle("full").batch(4))
    found = {}
    for rank in range(3):
        read.clear()
        batches = run.batches(rank, 3, epochs=1)
        rows = sum(piece.rows for step in batches for piece in step.mine())
        batches.close()
        assert len(read) == rows > 0
        found[rank] = set(read)
    assert len(found[0] | found[1] | found[2]) == 10 == sum(map(len, found.values()))


def test_row_groups_are_dealt_to_workers_by_an_interleave(tmp_path, monkeypatch):
    for number in range(4):
        table = pyarrow.table({"n": list(range(number * 16, number * 16 + 16))})
        parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=8)
    read = []
    decode = leaves.ParquetLeaf._table
    monkeypatch.setattr(leaves.ParquetLeaf, "_table", lambda leaf, n: read.append(leaf._groups[n]) or decode(leaf, n))
    # A slice of each batch of 16 is a block of 4 rows, and has a row group to itself.
    data = (
        mh.Dataset.list_files(str(tmp_path / "*.parquet"), row_groups=True)
        .interleave(lambda group: mh.Dataset.from_files(group).shuffle("full"), cycle_length=4, block_length=4)
        .batch(16)
    )
    seen, groups = [], {}
    for rank in range(2):
        read.clear()
        batches = Run(data).batches(rank, 2, epochs=1)
        seen += [n for step in batches for piece in step.mine() for n in piece.batch["n"].tolist()]
        batches.close()
        groups[rank] = set(read)
    assert sorted(seen) == list(range(64))
    assert len(groups[0]) == len(groups[1]) == 4 and not groups[0] & groups[1]


def test_pictures_are_decoded_and_labelled_as_pillow_and_the_folders_say(pictures):
    data = mh.Dataset.from_files(pictures)
    assert mh.images.class_names(pictures) == ["ants", "bees"]
    for (image, label), path in zip(data, sorted(elements(mh.Dataset.list_files(f"{pictures}/*/*"))), strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(Image.open(path).convert("RGB")))
        assert label == int("bees" in path) and image.dtype == torch.uint8


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_augmented_pictures_are_the_same_from_loader_processes(pictures, processes):
    """The one test here that starts a process, which imports torch."""
    data = mh.Dataset.from_files(pictures).shuffle("full").map(augment, num_parallel_calls=processes).batch(4)
    source = as_source(data, seed=3)
    assert source.num_workers == processes
    alone, _ = Run(data, num_workers=0).steps(epochs=2)
    batches = Run(source, batch_size=4).batches(0, 1, epochs=2)
    taken = [[plain(piece.batch) for piece in step.mine()] for step in batches]
    assert taken == [pieces for _, _, pieces in alone]
    assert alone[0][2] != alone[3][2]


class Folder(torch.utils.data.Dataset):
    """What a user of torch would write, with our draws: the oracle of the pictures."""

    def __init__(self, data, transform):
        self.data, self.transform = list(data), transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, row):
        return self.transform(*self.data[row])


def test_batches_of_pictures_are_those_of_torchs_data_loader(pictures):
    def fixed(image, label):
        image = mh.images.center_crop(mh.images.resize(image, 12), 8)
        return mh.images.normalize(image, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)), label

    data = mh.Dataset.from_files(pictures)
    wanted = [plain(batch) for batch in DataLoader(Folder(data, fixed), batch_size=4)]
    assert [plain(batch) for batch in data.map(fixed).batch(4)] == wanted


def test_autotune_asks_for_processes_only_where_the_function_can_be_sent(pictures):
    data = mh.Dataset.from_files(pictures)
    assert as_source(data.map(augment, num_parallel_calls=mh.Dataset.AUTOTUNE).batch(2)).num_workers >= 1
    with pytest.warns(UserWarning, match="<lambda> cannot be imported by a loader process"):
        source = as_source(data.map(lambda x, y: y, num_parallel_calls=mh.Dataset.AUTOTUNE).batch(2))
    assert source.num_workers == 0
    with pytest.warns(UserWarning, match="a stream is read by one loader process, not by 3"):
        stream = as_source(data.map(augment, 3).filter(numbered).batch(2))
    assert stream.num_workers == 1
    assert as_source(data.map(functools.partial(augment), 2).batch(2), num_workers=0).num_workers == 0


PICTURE = torch.arange(3 * 4 * 6, dtype=torch.uint8).reshape(3, 4, 6) * 3


def test_crops_and_flips_are_parts_of_the_picture():
    assert torch.equal(mh.images.center_crop(PICTURE, 2), PICTURE[:, 1:3, 2:4])
    parts = {tuple(mh.images.random_crop(PICTURE, (2, 3)).flatten().tolist()) for _ in range(200)}
    whole = {tuple(PICTURE[:, t : t + 2, l : l + 3].flatten().tolist()) for t in range(3) for l in range(4)}  # noqa: E741
    assert parts == whole
    assert mh.images.random_crop(PICTURE, 6, padding=1).shape == (3, 6, 6)
    assert torch.equal(mh.images.random_flip(PICTURE, 1.0), PICTURE.flip(-1))
    assert torch.equal(mh.images.random_flip(PICTURE, 0.0), PICTURE)
    assert mh.images.random_resized_crop(PICTURE, (3, 5)).shape == (3, 3, 5)
    assert mh.images.resize(PICTURE, 8).shape == (3, 8, 12) and mh.images.resize(PICTURE, (4, 6)) is PICTURE
    with pytest.raises(DataError, match="5 x 5 does not fit into a picture of 4 x 6"):
        mh.images.center_crop(PICTURE, 5)


def test_colours_turn_as_in_hsv_and_jitter_stays_in_range():
    from manyhands.data.pipeline.pictures import _turned

    image = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(1))
    image[:, 0, 0] = 0.5  # grey has no hue
    for turn in (0.0, 0.1, -0.3, 0.5):
        turned = _turned(image, turn)
        for row in range(5):
            for column in range(7):
                h, s, v = colorsys.rgb_to_hsv(*image[:, row, column].tolist())
                wanted = colorsys.hsv_to_rgb((h + turn) % 1, s, v)
                assert turned[:, row, column].tolist() == pytest.approx(wanted, abs=1e-5)
    for _ in range(20):
        jittered = mh.images.color_jitter(PICTURE, 0.9, 0.9, 0.9, 0.5)
        assert jittered.dtype == torch.float32 and jittered.min() >= 0 and jittered.max() <= 1
    assert torch.equal(mh.images.color_jitter(PICTURE), mh.images.to_float(PICTURE))
    with pytest.raises(DataError, match="needs 3 channels"):
        mh.images.color_jitter(PICTURE[:1])


def test_workers_divide_the_counting_of_lines(tmp_path, monkeypatch):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number} {line}\n" for line in range(number + 1)))
    data = mh.Dataset.list_files(str(tmp_path / "*.txt")).interleave(mh.Dataset.from_files, cycle_length=2)
    chains = [mh.Dataset.from_files(str(tmp_path / "*.txt")).shuffle("full").batch(3), data.batch(3)]
    opened = threading.local()
    find = file_formats._find_lines
    monkeypatch.setattr(file_formats, "_find_lines", lambda data: opened.count.append(1) or find(data))

    def ask(rank, exchange, chain):
        opened.count = []
        source = as_source(chain, seed=3, exchange=exchange.of(rank))
        counted = len(opened.count)
        return counted, [source.take(np.array([row])) for row in range(source.num_rows)]

    for chain in chains:
        exchange = ThreadExchange(2)
        (first, rows), (second, same) = together(2, functools.partial(ask, exchange=exchange, chain=chain))
        assert (first, second) == (3, 3) and rows == same
        opened.count = []
        assert [line for row in rows for line in row] == elements(mh.Dataset(chain.stage.child), seed=3)


def test_json_lines_of_one_file_are_dealt_row_by_row(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"n": n, "tokens": list(range(n % 4))}) + "\n" for n in range(20)))
    read = []
    line = file_formats.LineFile.read
    monkeypatch.setattr(
        file_formats.LineFile, "read", lambda file, rows: read.extend(rows.tolist()) or line(file, rows)
    )
    run = Run(mh.Dataset.from_files(str(path)).shuffle("full").padded_batch(4, {"n": [], "tokens": [3]}), slices=2)
    for rank in range(2):
        read.clear()
        batches = run.batches(rank, 2, epochs=1)
        mine = [n for step in batches for piece in step.mine() for n in piece.batch["n"].tolist()]
        batches.close()
        assert sorted(read) == sorted(mine) and len(mine) == 10
