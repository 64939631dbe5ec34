"""A run that is to be `group_readable` can be read by the members of its directory's group, and by no other user."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from manyhands.checkpoint import CheckpointWriter, Snapshot
from manyhands.control.processes.worker_output import WorkerLog
from manyhands.control.run_directory import RunDirectory
from manyhands.events import Warned
from manyhands.observe.recorder import Recorder
from manyhands.observe.tensorboard import _EventFile
from manyhands.private_files import is_for_group, make_directory, open_private, write_private
from manyhands.spec.load import resolve
from manyhands.training.loop.recorded_calls import RecordedCalls
from manyhands.training.step.evaluation import to_file

TEAM, OTHERS, SOMEBODY = 54321, 54322, 54323


@pytest.fixture(params=[0o077, 0o000], ids=["umask 077", "umask 000"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def a_run(place: Path, *, group_readable: bool, endpoint: str | None = None) -> RunDirectory:
    """With one of everything that a run writes, by the code that writes it."""
    directory = RunDirectory.adopt(place, False, group_readable=group_readable, endpoint=endpoint)
    with Recorder(directory.events / "chief.jsonl") as recorder:
        recorder.emit(Warned(text="seen"))
    calls = RecordedCalls(place / "trainings" / "2" / "calls", writes=lambda: True, warn=lambda text: None)
    calls.begin("fit")
    calls.finish([])
    to_file(place / "calls" / "0001-predict.safetensors", torch.zeros(2))
    log = WorkerLog("rank-0")
    log.move_to(directory.logs(1))
    log.write("stdout", b"printed by the script\n")
    log.close()
    write_private(place / "placement.txt", b"text")
    writer = CheckpointWriter(directory.checkpoints, "theirs", 3, None, (1, 1))
    saved = Snapshot(step=1, epoch=0, tensors={"model/w": torch.zeros(2)}, state={}, world_size=1, slices=1)
    writer.save(saved, wait=True)
    writer.close(10.0)
    return directory


def modes(place: Path) -> dict[str, int]:
    return {str(path.relative_to(place)): stat.S_IMODE(path.stat().st_mode) for path in (place, *place.rglob("*"))}


def expected(place: Path, for_files: int, for_directories: int) -> dict[str, int]:
    found = {
        str(p.relative_to(place)): for_directories if p.is_dir() else for_files for p in (place, *place.rglob("*"))
    }
    return found | {"run.lock": 0o600}


def test_everything_that_a_run_writes_is_for_its_group_with_any_umask(tmp_path: Path, umask: None) -> None:
    a_run(tmp_path / "runs" / "a", group_readable=True).release()
    found = modes(tmp_path / "runs" / "a")
    assert len(found) > 18
    assert found == expected(tmp_path / "runs" / "a", 0o640, 0o750)
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) & 0o050 == 0o050  # or no member of the group gets there


def test_without_it_everything_is_private_also_in_a_directory_that_its_group_may_read(
    tmp_path: Path, umask: None
) -> None:
    place = tmp_path / "mine"
    place.mkdir()
    place.chmod(0o750)
    a_run(place, group_readable=False).release()
    assert modes(place) == expected(place, 0o600, 0o700) | {".": 0o750}


@pytest.mark.parametrize("first", [False, True])
def test_a_resumed_run_changes_what_was_written_before_but_no_file_of_the_users(tmp_path: Path, first: bool) -> None:
    place = tmp_path / "run"
    a_run(place, group_readable=first).release()
    (place / "mine.txt").write_text("not the run's")
    (place / "mine.txt").chmod(0o604)
    (place / "logs" / "link").symlink_to(place / "mine.txt")
    a_run(place, group_readable=not first).release()
    (place / "logs" / "link").unlink()
    wanted = expected(place, 0o600, 0o700) if first else expected(place, 0o640, 0o750)
    assert modes(place) == wanted | {"mine.txt": 0o604, ".": 0o750}


def test_a_group_that_a_directory_passes_on_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    a_run(tmp_path / "run", group_readable=True).release()
    folders = [path for path in (tmp_path / "run").rglob("*") if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run", *folders)} == {0o2750}


def test_a_file_called_run_json_of_another_program_opens_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "run.json").chmod(0o640)
    assert not is_for_group(tmp_path)
    make_directory(tmp_path / "kept" / "here")
    os.close(open_private(tmp_path / "kept" / "here" / "file", os.O_WRONLY | os.O_CREAT))
    found = [stat.S_IMODE((tmp_path / path).stat().st_mode) for path in ("kept", "kept/here", "kept/here/file")]
    assert found == [0o700, 0o700, 0o600]


def test_summaries_in_a_run_have_its_modes(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for name, group_readable in (("a", True), ("b", False)):
        RunDirectory.adopt(tmp_path / name, False, group_readable=group_readable).release()
        _EventFile(tmp_path / name / "summaries", None).close()
        wanted = expected(tmp_path / name, 0o640, 0o750) if group_readable else expected(tmp_path / name, 0o600, 0o700)
        assert len(wanted) == 5
        assert modes(tmp_path / name) == wanted


def test_the_environment_can_ask_for_it() -> None:
    assert resolve(environ={"MANYHANDS_GROUP_READABLE": "1"}).spec.run.group_readable
    assert not resolve(environ={}).spec.run.group_readable


# Imports come first: another user may not be able to read the code. One child for each command.
AS_ANOTHER = """
import importlib, json, os, sys
from manyhands.cli.main import main
for name in ("status", "logs", "stop", "scale", "ckpt"):
    importlib.import_module(f"manyhands.cli.runs.{name}")
importlib.import_module("manyhands.control.session.run_client")
importlib.import_module("manyhands.checkpoint.export")
importlib.import_module("psutil")
group, other_group, user, commands, folder = json.loads(sys.argv[1])
os.umask(0o077)
codes = []
for number, words in enumerate(commands):
    child = os.fork()
    if child == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT, 0o600), stream)
        os.setgroups([group]), os.setgid(other_group), os.setuid(user)
        main(words)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


def commands(run: Path) -> list[list[str]]:
    there = str(run)
    exported = str(run.parent / "open" / "model.safetensors")
    reading = [["status"], ["status", "--json"], ["logs"], ["ckpt", "ls"], ["ckpt", "verify"]]
    return [
        *([*words, there] for words in reading),
        ["ckpt", "export", there, "-o", exported],
        ["stop", there],
        ["scale", there, "2"],
    ]


def as_another(group: int, run: Path, folder: Path) -> tuple[list[int], list[str]]:
    folder.mkdir()
    asked = msgspec.json.encode([group, OTHERS, SOMEBODY, commands(run), str(folder)]).decode()
    done = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER, asked], capture_output=True, text=True, cwd="/", timeout=200
    )
    assert done.returncode == 0, done.stderr
    codes = msgspec.json.decode(done.stdout.splitlines()[-1], type=list[int])
    texts = [(folder / f"{n}.out").read_text() + (folder / f"{n}.err").read_text() for n in range(len(codes))]
    return codes, texts


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="NOT SHOWN HERE: becoming another user needs root")
def test_only_members_of_the_group_can_read_a_live_run_and_they_cannot_stop_it() -> None:
    with tempfile.TemporaryDirectory() as home:
        place = Path(home)
        os.chown(place, -1, TEAM)
        place.chmod(0o2755)
        (place / "open").mkdir()
        (place / "open").chmod(0o777)
        agent = place / "agent"
        agent.mkdir(mode=0o700)
        (agent / "control").touch()
        run = a_run(place / "run", group_readable=True, endpoint=f"ipc://{agent}/control")
        codes, texts = as_another(TEAM, place / "run", place / "member")
        exported = (place / "open" / "model.safetensors").exists()
        (place / "open" / "model.safetensors").unlink(missing_ok=True)
        strange_codes, strange_texts = as_another(OTHERS, place / "run", place / "stranger")
        run.release()
    assert codes == [0] * 6 + [3, 3], texts
    assert exported
    assert "running" in texts[0]
    assert "printed by the script" in texts[2]
    for text, command in zip(texts[6:], ("stop", "scale"), strict=True):
        assert "belongs to root and has mode 2750" in text
        assert f"as root: mh {command}" in text
    assert strange_codes == [3] * 8, strange_texts
    assert all("belongs to root and has mode 2750" in text and "--group-readable" in text for text in strange_texts)
