"""Disks that fill up, fail or lose power, and killed writers: the loader returns the old checkpoint or the new."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.checkpoint import Snapshot
from manyhands.checkpoint.commit import begin
from manyhands.checkpoint.file_ops import FileSystem
from tests.checkpoint.checkpoint_cases import FailAt, leftovers, must_save, save, whole_step, writer
from tests.checkpoint.crash_states import Recorder, build, key, states
from tests.checkpoint.killed_writers import LAST_POINT

HERE = Path(__file__).parent


@pytest.fixture
def tiny_disk(tmp_path):
    """A real file system of 1 MB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    tried = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"CHECK 21 NOT RUN: a 1 MB tmpfs cannot be mounted here (needs root): {tried.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.faults
def test_a_full_disk_fails_the_save_and_nothing_else(tiny_disk):
    import torch

    root = tiny_disk / "checkpoints"
    must_save(root, 1)
    hand = writer(root, max_shard_bytes=2**20)
    big = {"model/w": torch.zeros(2**19)}
    hand.save(Snapshot(step=2, epoch=0, tensors=big, state={}, world_size=1, slices=1), wait=True)
    (result,) = hand.poll()
    assert result.error is not None
    assert "No space left on device" in result.error.what
    assert "2.1 MB needed" in result.error.what
    assert re.search(r"[1-9]\d*(\.\d)? [kM]B free|0\.[1-9] MB free", result.error.what)
    assert leftovers(root) == []
    assert whole_step(root) == 1
    hand.close(1.0)
    must_save(root, 3)
    assert whole_step(root) == 3


@pytest.mark.faults
def test_an_error_at_any_write_sync_or_rename_leaves_the_old_checkpoint_or_a_whole_new_one(tmp_path):
    must_save(tmp_path / "old", 1)
    n = 0
    while True:
        n += 1
        root = tmp_path / f"root-{n}"
        shutil.copytree(tmp_path / "old", root)
        files = FailAt(n, errno.EIO)
        result = save(root, 2, files=files, keep_last=1)
        if files.calls < n:
            break
        assert leftovers(root) == [] or result.warnings, files.failed_in
        if result.error is None:
            assert whole_step(root) == 2, files.failed_in
            assert result.warnings, files.failed_in
        else:
            assert os.strerror(errno.EIO) in result.error.what
            # Only the sync after the rename can fail with the new checkpoint already in place.
            assert whole_step(root) == (2 if files.failed_in == f"sync_directory {root.name}" else 1), files.failed_in
        must_save(root, 3)
        assert leftovers(root) == [], files.failed_in
        assert whole_step(root) == 3
    assert n > 20
    assert whole_step(root) == 2


@pytest.mark.faults
def test_an_input_output_error_of_the_kernel_fails_the_save_and_nothing_else(tmp_path):
    if shutil.which("strace") is None:
        pytest.skip("CHECK 22 NOT RUN with real system calls: strace is not installed")
    must_save(tmp_path, 1)
    script = "import sys, pathlib, checkpoint_cases as c; print(c.save(pathlib.Path(sys.argv[1]), 2).error.what)"
    inject = ["strace", "-f", "-qq", "--seccomp-bpf", "-e", "trace=fsync", "-e", "inject=fsync:error=EIO:when=2"]
    done = subprocess.run(
        [*inject, "-o", os.devnull, sys.executable, "-c", script, str(tmp_path)],
        cwd=HERE, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    if "ptrace" in done.stderr or "seccomp" in done.stderr:
        pytest.skip(f"CHECK 22 NOT RUN with real system calls: strace may not trace here: {done.stderr.strip()}")
    assert "Input/output error" in done.stdout, done.stderr
    assert leftovers(tmp_path) == []
    assert whole_step(tmp_path) == 1


@pytest.mark.faults
def test_a_writer_killed_at_any_point_leaves_the_old_checkpoint_or_a_whole_new_one(tmp_path):
    must_save(tmp_path / "old", 1)
    for n in range(1, LAST_POINT + 1):
        shutil.copytree(tmp_path / "old", tmp_path / f"root-{n}")
    # One process that has torch loaded forks a writer for each point and waits for it to die.
    done = subprocess.run(
        [sys.executable, HERE / "killed_writers.py", tmp_path], cwd=HERE, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    survivors = {int(line) for line in done.stdout.split()}
    points = [n for n in range(1, LAST_POINT + 1) if n not in survivors]
    assert len(points) > 20
    assert survivors == set(range(len(points) + 1, LAST_POINT + 1)), "every writer with a point to die at died"
    seen = set()
    for n in points:
        root = tmp_path / f"root-{n}"
        seen.add(whole_step(root))
        assert whole_step(root) in (1, 2)
        must_save(root, 3)
        assert leftovers(root) == [], "what the dead writer left is swept at the next start"
        assert whole_step(root) == 3
    assert seen == {1, 2}
    assert whole_step(tmp_path / f"root-{min(survivors)}") == 2


class NeverSyncsDirectories(Recorder):
    def sync_directory(self, path: Path) -> None:
        pass


class NeverSyncsFiles(Recorder):
    def sync(self, fd: int, path: Path) -> None:
        pass


def violations(recorder: Recorder, tmp_path: Path) -> Iterator[str]:
    """Saves steps 1 and 2, keeping one; then cuts the power after every change, the last first, in every legal way."""
    root = tmp_path / "root"
    committed = {0: 0}
    for step in (1, 2):
        must_save(root, step, files=recorder, keep_last=1)
        committed[len(recorder.log)] = step
    seen = set()
    for length in range(len(recorder.log), -1, -1):
        least = max(step for at, step in committed.items() if at <= length)
        for tree in states(recorder.log[:length], root):
            if (least, key(tree)) in seen:
                continue
            seen.add((least, key(tree)))
            build(tree, crashed := tmp_path / f"crash-{len(seen)}")
            try:
                step = whole_step(crashed) or 0
                if step not in (least, least + 1):
                    yield f"after {recorder.log[:length][-1:]}: step {step}, where {least} was committed"
            except Exception as error:
                yield f"after {recorder.log[:length][-1:]}: {error}"
    assert len(seen) > 100


@pytest.mark.faults
def test_power_lost_at_any_point_in_any_legal_way_leaves_the_last_committed_checkpoint_or_a_whole_new_one(tmp_path):
    assert list(violations(Recorder(), tmp_path)) == []


@pytest.mark.faults
@pytest.mark.parametrize("careless", [NeverSyncsDirectories, NeverSyncsFiles])
def test_the_power_loss_check_notices_a_writer_that_does_not_sync(tmp_path, careless):
    assert next(violations(careless(), tmp_path))


def test_a_live_writers_draft_is_not_swept_and_a_dead_ones_is(tmp_path):
    must_save(tmp_path, 1)
    with begin(tmp_path, 2, FileSystem()) as draft:
        dead = tmp_path / "step-00000003.tmp-0123456789abcdef0123456789abcdef"
        dead.mkdir()
        (dead / "state.json").write_text("{}")
        mine = tmp_path / "step-00000003.tmp-notes"
        mine.mkdir()
        writer(tmp_path)
        assert draft.path.is_dir()
        assert not dead.exists()
        assert mine.is_dir(), "only directories of our own naming are removed"
    assert not draft.path.exists()
