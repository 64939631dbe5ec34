"""What goes in comes out: every type and shape, nested state, shards of several processes, old formats, exports."""

from __future__ import annotations

import math
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from manyhands.checkpoint import Snapshot, check_model, export, load, newest_valid, save_tensors
from manyhands.checkpoint.format import decode_state, encode_state, parse_step_name, plan_shards
from manyhands.errors import CheckpointMismatch, UsageError
from tests.checkpoint.checkpoint_cases import must_save, snapshot, whole_step, writer

HERE = Path(__file__).parent
ALL_TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
]  # fmt: skip


def round_trip(root, tensors, state=None, **changes):
    hand = writer(root, **changes)
    hand.save(Snapshot(step=1, epoch=0, tensors=tensors, state=state or {}, world_size=1, slices=1), wait=True)
    (result,) = hand.poll()
    assert result.error is None, result.error
    hand.close(1.0)
    return load(result.path)


def same_bits(left, right):
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    flat = [t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*flat) if left.numel() else True


def test_every_type_and_shape_comes_back_bit_for_bit(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in ALL_TYPES:
        values = torch.randint(0, 2, (3, 5), generator=generator).to(dtype)
        tensors |= {f"{dtype}/matrix": values, f"{dtype}/transposed": values.t(), f"{dtype}/strided": values[:, ::2]}
        tensors |= {f"{dtype}/scalar": values[0, 0], f"{dtype}/empty": values[:0]}
    tensors["conjugated"] = torch.tensor([1 + 2j, 3 - 4j]).conj()
    tensors["special values"] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    tensors["channels last"] = torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)
    tensors["../../x"] = torch.ones(1)  # a name is never a path
    tensors["Dense/kernel:0 é \n"] = torch.ones(2)
    tensors[""] = torch.ones(3)
    loaded = round_trip(tmp_path / "root", tensors).tensors
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(loaded[name], tensor), name
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_checkpoint_without_tensors_loads(tmp_path):
    assert round_trip(tmp_path, {}, {"a": 1}).state == {"a": 1}


scalars = some.none() | some.booleans() | some.integers() | some.floats() | some.text()
nested = some.recursive(
    scalars,
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(), inner, max_size=4),
    max_leaves=20,
)


@given(some.dictionaries(some.text(), nested, max_size=5))
@settings(max_examples=50, deadline=None, database=None)
def test_nested_state_comes_back_equal(state):
    assert repr(decode_state(encode_state(state))) == repr(state)  # repr: nan equals nan, 1 is not 1.0 or True


@pytest.mark.parametrize("value", [{1: 2}, {"a": {1, 2}}, {"a": [torch.ones(1)]}, {"a": b"bytes"}])
def test_state_that_json_would_change_is_refused_by_place(tmp_path, value):
    hand = writer(tmp_path)
    hand.save(snapshot(1, state={"hooks": value}), wait=True)
    (result,) = hand.poll()
    assert "state['hooks']" in result.error.what
    assert newest_valid(tmp_path) is None


def test_a_state_too_large_to_be_read_back_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("manyhands.checkpoint.format.MAX_STATE_BYTES", 1000)
    hand = writer(tmp_path)
    hand.save(snapshot(1, state={"hooks": "x" * 1000}), wait=True)
    assert "the limit is 1000" in hand.poll()[0].error.what


def test_a_shard_whose_header_is_too_large_to_be_read_back_is_not_committed(tmp_path, monkeypatch):
    monkeypatch.setattr("manyhands.checkpoint.tensor_file.MAX_HEADER_BYTES", 50)
    hand = writer(tmp_path)
    hand.save(snapshot(1), wait=True)
    assert "does not read back" in hand.poll()[0].error.what
    assert newest_valid(tmp_path) is None


def test_shards_are_split_by_size_and_a_bigger_tensor_is_alone():
    assert plan_shards({"a": 4, "b": 4, "big": 100, "c": 4}, max_bytes=8) == [["a", "b"], ["big"], ["c"]]
    assert plan_shards({}, max_bytes=8) == []


def test_shards_written_by_four_processes_load_as_one(tmp_path):
    done = subprocess.run(
        [sys.executable, HERE / "four_writers.py", tmp_path], cwd=HERE, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = newest_valid(tmp_path)
    assert [entry.name for entry in found.manifest.files[1:]] == [
        f"shard-{n:05d}-of-00004.safetensors" for n in (1, 2, 3, 4)
    ]
    loaded = load(found.path)
    assert {name: tensor.tolist() for name, tensor in loaded.tensors.items()} == {
        f"model/part-{rank}": [float(rank)] * 8 for rank in (1, 2, 3, 4)
    }
    assert loaded.state == {"written by": 4}
    # Any number of readers may take any parts of it: names lead to shards, not ranks.
    for readers in (1, 2, 3, 8):
        parts = [name for reader in range(readers) for name in sorted(loaded.tensors)[reader::readers]]
        assert sorted(parts) == sorted(loaded.tensors)


def test_the_checkpoint_of_format_1_in_tests_data_still_loads():
    root = HERE.parent / "fixtures" / "checkpoint-format-1"
    assert whole_step(root) == 3
    manifest = newest_valid(root).manifest
    assert (manifest.format, manifest.run, manifest.generation, manifest.slices) == (1, "tiny", (1, 1), 4)


def test_files_are_private_and_a_shard_is_plain_safetensors(tmp_path):
    path = must_save(tmp_path, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    read = safetensors.torch.load_file(path / "shard-00001-of-00002.safetensors")
    assert torch.equal(read["model/layer/weight"], torch.full((4, 4), 1.0))
    assert (tmp_path / "LATEST").read_text().split()[0] == path.name


def test_writing_to_a_loaded_tensor_does_not_touch_the_checkpoint(tmp_path):
    path = must_save(tmp_path, 1)
    load(path).tensors["model/layer/weight"].zero_()
    assert whole_step(tmp_path) == 1


def test_another_model_is_refused_naming_what_differs(tmp_path):
    manifest = load(must_save(tmp_path, 1)).manifest
    check_model(manifest, {"layer/weight": torch.zeros(4, 4, dtype=torch.bfloat16)})
    with pytest.raises(
        CheckpointMismatch, match=r"'layer/weight' is \[4, 4\] in the checkpoint and \[4, 5\] in the model"
    ):
        check_model(manifest, {"layer/weight": torch.zeros(4, 5)})
    with pytest.raises(CheckpointMismatch, match="'bias' is missing in the checkpoint; 'layer/weight' is only in the"):
        check_model(manifest, {"bias": torch.zeros(1)})


@pytest.mark.parametrize("file_format", ["safetensors", "pt"])
def test_an_export_holds_the_models_tensors_under_their_own_names(tmp_path, file_format):
    path = must_save(tmp_path / "root", 5)
    out = tmp_path / f"model.{file_format}"
    export(path, out, file_format)
    read = safetensors.torch.load_file(out) if file_format == "safetensors" else torch.load(out, weights_only=True)
    assert read.keys() == {"layer/weight"}
    assert torch.equal(read["layer/weight"], torch.full((4, 4), 5.0))
    with pytest.raises(UsageError, match="already exists"):
        export(path, out, file_format)
    export(path, out, file_format, only_model=False, force=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"model.{file_format}", "root"]


def test_a_failed_export_leaves_the_old_file(tmp_path):
    out = tmp_path / "model.safetensors"
    save_tensors(out, {"a": torch.ones(2)})
    before = out.read_bytes()
    with pytest.raises(Exception, match="complex128"):
        save_tensors(out, {"a": torch.ones(2, dtype=torch.complex128)}, force=True)
    assert out.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize(
    "name", ["step-1", "step-000000001", "step-00000001.1", "step-00000001.02", "step-00000001 ", "x"]
)
def test_only_names_we_would_write_are_steps(name):
    assert parse_step_name(name) is None
