"""`mh.Dataset` over files that are broken, unusual or change: read as they are meant, or refused by name and line."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.data.sources.as_source import as_source
from manyhands.errors import DataError
from tests.data.test_dataset_chains import elements

Image = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize("through", ["rows", "batch", "map"])
def test_a_line_that_cannot_be_read_is_named_as_editors_count(tmp_path, through):
    for name, content, kind in [
        ("a.jsonl", b'{"a": 1}\n\n{"a": 2}\n{"a": oops}\n', "JSON"),
        ("a.txt", "\n\nfine\ncaf\xe9\n".encode("latin-1"), "UTF-8"),
    ]:
        (tmp_path / name).write_bytes(content)
        data = mh.Dataset.from_files(str(tmp_path / name)).skip(1)
        chain = {"rows": data, "batch": data.batch(4), "map": data.map(lambda row: row)}[through]
        with pytest.raises(DataError, match=rf"{name}, line 4, cannot be read as {kind}"):
            list(chain)
        source = as_source(chain)
        with pytest.raises(DataError, match=rf"{name}, line 4,"):
            source.take(np.arange(source.num_rows))


def test_the_mark_at_the_beginning_of_a_file_is_no_data(tmp_path):
    mark = b"\xef\xbb\xbf"
    for name, content, wanted in [
        ("a.csv", b"1,2\n3,4\n", [[1, 2], [3, 4]]),
        ("b.csv", b"x,y\n1,2\n", [{"x": 1, "y": 2}]),
        ("a.txt", b"one\ntwo\n", ["one", "two"]),
        ("a.jsonl", b'{"x": 1}\n', [{"x": 1}]),
    ]:
        (tmp_path / name).write_bytes(mark + content)
        found = elements(mh.Dataset.from_files(str(tmp_path / name)))
        assert [row.tolist() if isinstance(row, np.ndarray) else row for row in found] == wanted


def test_numbers_of_a_csv_file_may_have_quotes_and_no_two_columns_one_name(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('"a","b, c"\n"1","2.5"\n3,4\n')
    data = mh.Dataset.from_files(str(path))
    assert elements(data) == [{"a": 1.0, "b, c": 2.5}, {"a": 3.0, "b, c": 4.0}]
    path.write_text("a, a\n1,2\n")
    with pytest.raises(DataError, match="several columns have one name"):
        list(mh.Dataset.from_files(str(path)))


def test_identifiers_that_float32_would_change_are_warned_of(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,y\n16777216,0.1\n16777217,0.2\n")
    with pytest.warns(UserWarning, match="column id has 16777217, which becomes 16777216"):
        assert len(mh.Dataset.from_files(str(path))) == 2


@pytest.mark.parametrize("ending", ["txt", "jsonl", "npy"])
def test_a_file_that_changes_while_it_is_read_is_an_error_and_not_a_signal(tmp_path, ending):
    path = tmp_path / f"a.{ending}"

    def write(rows):
        if ending == "npy":
            np.save(path, np.arange(rows))
        else:
            path.write_text("".join(f"{1000 + row}\n" for row in range(rows)))

    write(5000)
    source = as_source(mh.Dataset.from_files(str(path)).batch(2))
    assert len(source.take(np.array([0, 1]))) == 2
    sent = pickle.loads(pickle.dumps(source))  # as to a loader process, which opens the file later
    with open(path, "r+b") as file:
        file.truncate(100 if ending != "npy" else 128 + 8 * 10)
    with pytest.raises(DataError, match="has changed since the run began"):
        source.take(np.array([4998, 4999]))
    write(10)
    with pytest.raises(DataError, match="has changed since the run began"):
        sent.take(np.array([8, 9]))


def test_pictures_have_8_bits_whatever_their_file_has(tmp_path):
    deep = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4096
    Image.fromarray(deep).save(tmp_path / "a.png")
    Image.fromarray(np.full((4, 4), 128, np.uint8)).save(tmp_path / "b.png")
    see_through = np.full((4, 4, 4), 7, np.uint8)
    Image.fromarray(see_through, "RGBA").save(tmp_path / "c.png")
    Image.fromarray(np.full((4, 4, 3), (200, 30, 60), np.uint8)).convert("CMYK").save(tmp_path / "d.jpg")
    pictures = [image for name in ("*.png", "*.jpg") for image in mh.Dataset.from_files(str(tmp_path / name))]
    assert all(image.shape == (3, 4, 4) for image in pictures)
    assert np.array_equal(pictures[0][1].numpy(), (deep >> 8).astype(np.uint8))
    assert pictures[1].unique().tolist() == [128] and pictures[2].unique().tolist() == [7]
    assert abs(pictures[3][:, 0, 0].numpy().astype(int) - (200, 30, 60)).max() <= 3


def test_pictures_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    Image.fromarray(np.zeros((40, 40), np.uint8)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match=r"a\.png cannot be read as a picture: Image size") as caught:
        list(mh.Dataset.from_files(str(path)))
    assert "MAX_IMAGE_PIXELS" in str(caught.value)
    monkeypatch.undo()
    whole = path.read_bytes()
    for broken in (b"", whole[:20], whole[: len(whole) // 2], whole.replace(b"IDAT", b"XDAT")):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"a\.png cannot be read"):
            list(mh.Dataset.from_files(str(path)))


def test_a_class_without_pictures_keeps_its_label(tmp_path):
    for name, classes in {"train": ("ants", "bees", "cats"), "test": ("ants", "cats")}.items():
        for one in (*classes, ".hidden"):
            (tmp_path / name / one).mkdir(parents=True)
            Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(tmp_path / name / one / "0.png")
    train, test = str(tmp_path / "train"), str(tmp_path / "test")

    def labels(folder, **names):
        return [label for _, label in mh.Dataset.from_files(folder, **names)]

    assert labels(train) == [0, 1, 2] and mh.images.class_names(train) == ["ants", "bees", "cats"]
    assert labels(test, class_names=mh.images.class_names(train)) == [0, 2]
    (tmp_path / "test" / "bees").mkdir()
    with pytest.warns(UserWarning, match="no pictures in bees"):
        assert labels(test) == [0, 2]
    with pytest.raises(DataError, match="has the class bees, which is not in class_names"):
        mh.Dataset.from_files(train, class_names=["ants", "cats"])
    with pytest.raises(DataError, match="for a folder of pictures"):
        mh.Dataset.from_files(f"{train}/ants/*.png", class_names=["ants"])


def test_a_picture_is_normalised_by_deviations_above_0():
    image = torch.zeros(3, 2, 2, dtype=torch.uint8)
    for mean, std in [((0.5,) * 3, (0.0,) * 3), ((0.5, 0.5), (1.0, 1.0))]:
        with pytest.raises(DataError, match="above 0, for each channel"):
            mh.images.normalize(image, mean, std)
    assert mh.images.normalize(image, (0.5,), (0.5,)).unique().tolist() == [-1.0]
