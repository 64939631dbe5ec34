"""Damaged and hostile files: always refused by name, never loaded in silence, and the one before is used instead."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import time

import msgspec
import pytest
import torch

from manyhands.checkpoint import load, newest_valid, read_tensors
from manyhands.checkpoint.format import FORMAT, MANIFEST, STATE, FileEntry, TensorEntry, fingerprint, seal, unseal
from manyhands.errors import CheckpointCorrupt, CheckpointError, CheckpointTooNew
from tests.checkpoint.checkpoint_cases import must_save, whole_step

SHARD = "shard-00001-of-00002.safetensors"
OTHER_SHARD = "shard-00002-of-00002.safetensors"
ALL_FILES = [MANIFEST, STATE, SHARD, OTHER_SHARD]


@pytest.fixture
def two(tmp_path):
    """A root with steps 1 and 2; returns it and the path of step 2."""
    root = tmp_path / "root"
    must_save(root, 1)
    return root, must_save(root, 2)


@pytest.mark.parametrize("name", ALL_FILES)
def test_no_flipped_bit_loads_in_silence(two, name):
    root, newest = two
    seed = 25
    choose = random.Random(f"{seed} {name}")
    size = (newest / name).stat().st_size
    fd = os.open(newest / name, os.O_RDWR)
    for _ in range(1000):
        at, bit = choose.randrange(size), 1 << choose.randrange(8)
        (byte,) = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte ^ bit]), at)
        with pytest.raises(CheckpointCorrupt, match=name):
            load(newest)
        found = newest_valid(root)
        assert found is not None
        assert found.step == 1, f"seed {seed}: byte {at}, bit {bit} of {name}"
        assert name in " ".join(found.skipped)
        os.pwrite(fd, bytes([byte]), at)
    os.close(fd)
    assert whole_step(root) == 2


def truncate(newest, older):
    os.truncate(newest / SHARD, 40)


def empty(newest, older):
    os.truncate(newest / STATE, 0)


def empty_manifest(newest, older):
    os.truncate(newest / MANIFEST, 0)


def delete(newest, older):
    os.unlink(newest / OTHER_SHARD)


def delete_manifest(newest, older):
    os.unlink(newest / MANIFEST)


def swap_shards(newest, older):
    os.rename(newest / SHARD, newest / "x")
    os.rename(newest / OTHER_SHARD, newest / SHARD)
    os.rename(newest / "x", newest / OTHER_SHARD)


def shard_of_another_step(newest, older):
    shutil.copy(older / SHARD, newest / SHARD)


def state_of_another_step(newest, older):
    shutil.copy(older / STATE, newest / STATE)


def manifest_of_another_step(newest, older):
    shutil.copy(older / MANIFEST, newest / MANIFEST)


def whole_content_of_another_step(newest, older):
    shutil.rmtree(newest)
    shutil.copytree(older, newest)


def symlinked_shard(newest, older):
    os.rename(newest / SHARD, newest / "elsewhere")
    os.symlink("elsewhere", newest / SHARD)


def pipe_for_a_shard(newest, older):
    os.unlink(newest / SHARD)
    os.mkfifo(newest / SHARD)


def directory_for_a_shard(newest, older):
    os.unlink(newest / SHARD)
    os.mkdir(newest / SHARD)


@pytest.mark.parametrize(
    "damage",
    [
        truncate, empty, empty_manifest, delete, delete_manifest, swap_shards, shard_of_another_step,
        state_of_another_step, manifest_of_another_step, whole_content_of_another_step, symlinked_shard,
        pipe_for_a_shard, directory_for_a_shard,
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(two, damage):
    root, newest = two
    damage(newest, root / "step-00000001")
    with pytest.raises(CheckpointCorrupt):
        load(newest)
    assert whole_step(root) == 1
    found = newest_valid(root)
    assert found is not None
    assert str(newest) in found.skipped[0]


def test_when_every_checkpoint_is_damaged_no_run_starts_over_in_silence(two):
    root, newest = two
    truncate(newest, None)
    truncate(root / "step-00000001", None)
    with pytest.raises(CheckpointCorrupt, match="None of the 2 checkpoints"):
        newest_valid(root)


@pytest.mark.parametrize("damage", [delete_manifest, empty_manifest])
def test_when_every_manifest_is_gone_no_run_starts_over_in_silence(two, damage):
    root, newest = two
    damage(newest, None)
    damage(root / "step-00000001", None)
    with pytest.raises(CheckpointCorrupt, match="None of the 2 checkpoints") as raised:
        newest_valid(root)
    assert MANIFEST in raised.value.what


def test_garbage_in_the_root_is_not_a_checkpoint(tmp_path):
    assert newest_valid(tmp_path / "not there") is None
    (tmp_path / "step-00000007").mkdir()
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-00000009").write_text("a file")
    (tmp_path / "LATEST").write_text("step-00000009 0000")
    os.symlink(tmp_path, tmp_path / "step-00000011")
    assert newest_valid(tmp_path) is None
    must_save(tmp_path, 3)
    assert whole_step(tmp_path) == 3


def test_a_newer_format_says_both_versions_and_is_not_passed_over(two):
    root, newest = two
    body = json.loads((newest / MANIFEST).read_bytes())
    del body["sha256"]
    body |= {"format": FORMAT + 1, "something_new": True}
    raw = json.dumps(body).encode()[:-1]
    (newest / MANIFEST).write_bytes(raw + b',"sha256":"' + hashlib.sha256(raw).hexdigest().encode() + b'"}\n')
    with pytest.raises(CheckpointTooNew, match=f"format {FORMAT + 1}; this manyhands reads up to {FORMAT}"):
        load(newest)
    with pytest.raises(CheckpointTooNew):
        newest_valid(root)


# From here on the attacker knows the format and seals what they made.


def replace_file(checkpoint, name, content):
    """Put `content` in and make the manifest agree with it."""
    (checkpoint / name).write_bytes(content)
    manifest = unseal((checkpoint / MANIFEST).read_bytes(), "it")
    entry = FileEntry(name, len(content), hashlib.sha256(content).hexdigest())
    files = [entry if old.name == name else old for old in manifest.files]
    (checkpoint / MANIFEST).write_bytes(seal(msgspec.structs.replace(manifest, files=files)))


def tensor_file(header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(begin, end, dtype="U8"):
    return {"dtype": dtype, "shape": [end - begin], "data_offsets": [begin, end]}


def pairs(*items):
    return ("{" + ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in items) + "}").encode()


EMPTY = json.dumps(entry(0, 0))
HOSTILE_SHARDS = {
    "header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "header longer than the file": struct.pack("<Q", 1000) + b"{}",
    "100,000 tensors": tensor_file(("{" + ",".join(f'"t{i}":{EMPTY}' for i in range(100_000)) + "}").encode()),
    "the same name twice": tensor_file(pairs(("a", entry(0, 4)), ("a", entry(0, 4))), bytes(4)),
    "overlapping tensors": tensor_file({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6)),
    "a hole": tensor_file({"a": entry(0, 4), "b": entry(6, 8)}, bytes(8)),
    "bytes of no tensor": tensor_file({"a": entry(0, 4)}, bytes(8)),
    "offsets beyond the file": tensor_file({"a": entry(0, 2**62)}, bytes(4)),
    "negative offsets": tensor_file({"a": entry(-4, 0)}, bytes(4)),
    "a shape that overflows": tensor_file(
        {"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}, bytes(4)
    ),
    "an empty shape that overflows": tensor_file({"a": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}}),
    "an empty shape whose product overflows": tensor_file(
        {"a": {"dtype": "F32", "shape": [2**31, 0, 2**31], "data_offsets": [0, 0]}}
    ),
    "an empty shape beyond 64 bits": tensor_file({"a": {"dtype": "U8", "shape": [0, 2**64], "data_offsets": [0, 0]}}),
    "a negative shape": tensor_file({"a": {"dtype": "U8", "shape": [-2, -2], "data_offsets": [0, 4]}}, bytes(4)),
    "a shape of 65 dimensions": tensor_file(
        {"a": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}}, bytes(1)
    ),
    "a shape of fractions": tensor_file({"a": {"dtype": "U8", "shape": [4.5], "data_offsets": [0, 4]}}, bytes(4)),
    "an unknown type": tensor_file({"a": entry(0, 4, "PY_OBJECT")}, bytes(4)),
    "a name of 10 MB": tensor_file({"x" * 10_000_000: entry(0, 4)}, bytes(4)),
    "metadata of 10 MB": tensor_file({"__metadata__": {"a": "x" * 10_000_000}, "t": entry(0, 4)}, bytes(4)),
    "a million brackets": tensor_file(b"[" * 1_000_000),
    "not JSON": tensor_file(b"\x80\x04K\x01."),
    "not an object": tensor_file(b"[1]"),
    "other tensors than the manifest says": tensor_file({"../../x": entry(0, 4)}, bytes(4)),
    "nothing": b"",
}


@pytest.mark.parametrize("content", HOSTILE_SHARDS.values(), ids=HOSTILE_SHARDS.keys())
def test_a_hostile_shard_is_refused_within_a_second(two, content):
    root, newest = two
    replace_file(newest, SHARD, content)
    started = time.process_time()
    with pytest.raises(CheckpointCorrupt, match=SHARD):
        load(newest)
    assert time.process_time() - started < 1.0
    assert whole_step(root) == 1


HOSTILE_STATES = {
    "brackets": b"[" * 1_000_000,
    "a list": b"[]",
    "binary": b"\xff\xfe",
    "a huge integer": b'{"a":' + b"9" * 9999 + b"}",
}


@pytest.mark.parametrize("content", HOSTILE_STATES.values(), ids=HOSTILE_STATES.keys())
def test_a_hostile_state_is_refused_within_a_second(two, content):
    _, newest = two
    replace_file(newest, STATE, content)
    started = time.process_time()
    with pytest.raises(CheckpointCorrupt, match=STATE):
        load(newest)
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/b", "", ".", "MANIFEST.json", "state.json\n"]
)
def test_a_manifest_cannot_name_a_file_outside_its_directory(two, name):
    root, newest = two
    manifest = unseal((newest / MANIFEST).read_bytes(), "it")
    files = [*manifest.files, FileEntry(name, 1, "0" * 64)]
    (newest / MANIFEST).write_bytes(seal(msgspec.structs.replace(manifest, files=files)))
    with pytest.raises(CheckpointCorrupt, match=MANIFEST):
        load(newest)
    assert whole_step(root) == 1


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("F32", [0, 2**62]), ("U8", [2**62, 0, 2]), ("F32", [2**62]), ("F32", [2**40, 2**40]), ("PY", [1])],
)
def test_a_forged_tensor_that_manifest_and_shard_agree_on_is_refused(two, dtype, shape):
    root, newest = two
    manifest = unseal((newest / MANIFEST).read_bytes(), "it")
    [name] = [name for name, one in manifest.tensors.items() if one.shard == SHARD]
    header = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}}
    tensors = manifest.tensors | {name: TensorEntry(SHARD, dtype, shape)}
    forged = msgspec.structs.replace(manifest, tensors=tensors, model=fingerprint(tensors))
    (newest / MANIFEST).write_bytes(seal(forged))
    (newest / SHARD).write_bytes(tensor_file(header))
    with pytest.raises(CheckpointCorrupt, match=MANIFEST):
        load(newest)
    with pytest.raises(CheckpointCorrupt, match=SHARD):
        read_tensors(newest / SHARD)
    assert whole_step(root) == 1


def test_a_manifest_with_a_string_of_10_mb_is_refused_within_a_second(two):
    _, newest = two
    manifest = unseal((newest / MANIFEST).read_bytes(), "it")
    (newest / MANIFEST).write_bytes(seal(msgspec.structs.replace(manifest, run="x" * 10_000_000)))
    started = time.process_time()
    with pytest.raises(CheckpointCorrupt):
        load(newest)
    assert time.process_time() - started < 1.0


class Bomb:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def test_code_in_a_file_is_never_run(two, tmp_path):
    root, newest = two
    canary = tmp_path / "canary"
    bomb = tmp_path / "bomb.pt"
    torch.save(Bomb(canary), bomb)
    shutil.copy(bomb, newest / "extra.pt")
    assert whole_step(root) == 2
    replace_file(newest, SHARD, bomb.read_bytes())
    with pytest.raises(CheckpointError):
        load(newest)
    with pytest.raises(CheckpointError):
        read_tensors(bomb)
    assert not canary.exists()
