"""The demo, as `make demo` runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.cells import cell_len

from manyhands.cli.start.demo import _line
from manyhands.cli.start.demo_kill import FaultyDisplay, summary
from manyhands.cli.start.demo_modes import ModeResult, distance, rows_per_s, run_mode
from manyhands.cli.start.demo_narration import NarratingDisplay
from manyhands.cli.start.demo_texts import CHINESE, ENGLISH, table_line, texts_for
from manyhands.control.processes.template_process import shared_template
from manyhands.events import (
    CheckpointSaved,
    Event,
    GenerationStarted,
    LaunchStarted,
    RunEnded,
    StepDone,
    WorkerLost,
    WorkerStarted,
)
from manyhands.launcher.launch import default_environment
from manyhands.recipes.digits import load
from manyhands.recipes.every_mode import MODES

DEMO = [sys.executable, "-m", "manyhands.cli.main", "demo"]


def plain(**more: str) -> dict[str, str]:
    unset = ("LC_ALL", "LC_MESSAGES", "LANG")
    return {**{name: text for name, text in os.environ.items() if name not in unset}, **more}


@pytest.mark.long
@pytest.mark.faults
def test_the_demo_compares_ten_modes_loses_a_worker_stops_and_resumes(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DEMO, "--run-dir", "d", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    modes = {one["mode"]: one for one in report["modes"]}
    assert list(modes) == [mode.name for mode in MODES]
    for mode in MODES:
        one = modes[mode.name]
        assert not one["failed"] and not one["not_run"], one
        assert one["rows_per_s"] > 0 and one["memory_bytes"] > 0 and one["held_out"] == 360
        assert mode.name == "single" or one["bytes_per_step"] > 0
        if mode.is_alike and mode.name != "single":
            assert one["distance"] < 1e-4
            assert one["accuracy"] == modes["single"]["accuracy"] > 0.9
    assert modes["servers_async"]["distance"] > 1e-3 and modes["local_sgd"]["distance"] > 1e-3
    assert modes["local_sgd"]["bytes_per_step"] < modes["mirrored"]["bytes_per_step"] / 2
    check_kill(report["kill"])


def check_kill(report: dict[str, object]) -> None:
    assert report["accuracy"] >= 0.97 and report["examples_evaluated"] == 360
    assert report["workers"][0] == 2 and report["workers"][-1] == 1
    assert report["problems"] == [] and report["steps"] == 345 and report["steps_done_twice"] == 0
    killed = report["killed"]
    assert "SIGKILL" in killed["reason"] and killed["went_on_after_s"] >= 0
    assert 103 < killed["next_step"] <= report["stopped_and_resumed_at"]
    for texts in (ENGLISH, CHINESE):
        assert str(killed["next_step"]) in summary(report, texts)


@pytest.mark.slow
def test_a_mode_of_the_demo_ends_with_the_weights_of_one_process(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with shared_template(default_environment(threads=1)):
        results = [
            run_mode(mode, tmp_path, lambda step, total: seen.append((step, total)), ["--epochs", "1"])
            for mode in MODES
            if mode.name in ("single", "mirrored")
        ]
    single, mirrored = results
    assert not any(one.failed or one.not_run for one in results), results
    assert single.distance is None and single.bytes_per_step == 0
    assert mirrored.distance is not None and mirrored.distance < 1e-4
    weights = 4 * (64 * 768 + 2 * 768 * 768 + 10 * 768 + 3 * 768 + 10)
    assert weights <= mirrored.bytes_per_step <= weights + 4096  # rounded up to cache lines
    assert (23, 23) in seen


def test_the_digits_are_all_there_and_held_out_ones_are_not_trained_on() -> None:
    (pictures, labels), (held_out, held_out_labels) = load()
    assert (len(pictures), len(held_out)) == (1437, 360) == (len(labels), len(held_out_labels))
    assert pictures.shape[1:] == (1, 8, 8) and float(pictures.min()) == 0 and float(pictures.max()) == 1
    assert sorted(set(labels.tolist())) == list(range(10)) == sorted(set(held_out_labels.tolist()))
    trained = {picture.numpy().tobytes() for picture in pictures}
    assert not any(picture.numpy().tobytes() in trained for picture in held_out)
    licence = Path(load.__code__.co_filename).with_name("digits-licence.txt").read_text()
    assert "Creative Commons Attribution 4.0" in licence and "Alpaydin" in licence


@pytest.mark.parametrize("texts", [ENGLISH, CHINESE], ids=["English", "Chinese"])
def test_every_line_of_the_table_fits_80_columns_and_nothing_is_cut_off(texts: object) -> None:
    assert cell_len(table_line(texts.columns)) <= 79
    for mode in MODES:
        result = ModeResult(
            mode=mode.name, workers=2, servers=0, command="", run_dir="",
            rows_per_s=123456, memory_bytes=10**10, bytes_per_step=9e7, distance=1e-7, accuracy=1.0,
        )  # fmt: skip
        line = _line(result, texts)
        assert cell_len(line) <= 79
        assert texts.labels[mode.name] in line and texts.divided[mode.name] in line
    for text in (texts.legend, texts.one_core, texts.killed, texts.stopped, texts.resumes):
        assert all(cell_len(line) <= 80 for line in text.splitlines())


def test_a_mode_that_cannot_run_says_why_and_one_that_deviates_is_an_error() -> None:
    result = ModeResult(mode="mesh", workers=4, servers=0, command="", run_dir="", not_run="no C compiler")
    assert _line(result, ENGLISH).endswith("\n  did not run here: no C compiler") and not result.is_wrong
    long = msgspec.structs.replace(result, not_run="the C extension is not built, and nothing else is there " * 3)
    assert all(cell_len(line) <= 79 for texts in (ENGLISH, CHINESE) for line in _line(long, texts).splitlines())
    assert ModeResult(mode="mesh", workers=4, servers=0, command="", run_dir="", failed="x").is_wrong
    far = ModeResult(mode="mesh", workers=4, servers=0, command="", run_dir="", distance=0.1, accuracy=0.9)
    assert far.is_wrong and "DEVIATES" in _line(far, ENGLISH)
    assert msgspec.structs.replace(far, distance=float("nan")).is_wrong
    assert not msgspec.structs.replace(far, is_alike=False).is_wrong


def test_the_distance_is_that_of_the_worst_tensor_and_infinite_if_tensors_differ(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    a = {"w": np.array([1.0, -4.0], np.float32), "b": np.array([2.0], np.float32)}
    for name, tensors in {"a": a, "b": {**a, "w": a["w"] + np.float32(0.5)}, "c": {"w": a["w"]}}.items():
        save_file(tensors, tmp_path / name)
    assert distance(tmp_path / "a", tmp_path / "a") == 0
    assert distance(tmp_path / "a", tmp_path / "b") == 0.5 / 4
    assert distance(tmp_path / "a", tmp_path / "c") == float("inf")


def test_speed_is_that_of_the_later_steps() -> None:
    times = [0, 10, 20, 21, 22, 23, 24, 25]
    steps = [
        StepDone(step=n, epoch=0, loss=1.0, rows=64, samples_per_s=1.0, phases={}, time_s=t)
        for n, t in enumerate(times)
    ]
    assert rows_per_s(steps) == 64
    assert rows_per_s(steps[:1]) is None


def test_the_language_is_that_of_the_locale() -> None:
    assert texts_for({"LANG": "zh_CN.UTF-8"}, "utf-8") is CHINESE
    assert texts_for({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN.UTF-8"}, "utf-8") is CHINESE
    assert texts_for({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, "utf-8") is ENGLISH
    assert texts_for({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, "gb18030") is CHINESE
    assert texts_for({"LANG": "zh_CN"}, "ascii") is ENGLISH
    assert texts_for({}, "utf-8") is ENGLISH


def test_where_nothing_can_be_written_it_says_so_before_it_starts_anything(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [*DEMO, "--run-dir", "file/demo"], cwd=tmp_path, capture_output=True, text=True, timeout=100, env=plain()
    )
    assert done.returncode == 3 and "cannot: Not a directory" in done.stderr and "--run-dir DIR" in done.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model").write_text("")
    done = subprocess.run([*DEMO, "--run-dir", "full"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "full is not empty" in done.stderr


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.parametrize("phase", ["single", "servers_sync", "kill"])
def test_ctrl_c_ends_the_demo_in_any_phase_and_leaves_no_process(tmp_path: Path, phase: str) -> None:
    only = ["--only", "kill" if phase == "kill" else "modes"]
    command = [*DEMO, "--run-dir", "d", *only]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=plain(LANG="zh_CN.UTF-8"),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while not list((tmp_path / "d" / phase).glob("events/*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, output
    assert "已中断" in output and "Traceback" not in output
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.long
def test_on_one_core_in_a_pipe_the_table_is_complete_and_says_that_there_is_one_core(tmp_path: Path) -> None:
    command = ["taskset", "-c", "0", *DEMO, "--run-dir", "d", "--only", "modes"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800, env=plain())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "There is one core" in done.stderr and "\x1b" not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if re.match(r"mesh +batch and layers", line)]
    assert all(len(line) <= 80 for line in lines)


class Shown:
    def __init__(self) -> None:
        self.said: list[str] = []

    def event(self, event: Event) -> None: ...

    def output(self, rank: int, stream: str, data: bytes) -> None: ...

    def say(self, line: str) -> None:
        self.said.append(line)

    def failure(self, block: object) -> None: ...

    def close(self) -> None: ...


def test_the_demo_kills_one_worker_and_stops_the_run_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    shown = Shown()
    display = FaultyDisplay(shown, ENGLISH, quiet=True)
    for slot, pid in ((0, 40), (1, 41)):
        display.event(WorkerStarted(slot=slot, incarnation=slot, host="a", pid=pid))
    for number in range(1, 101):
        display.event(StepDone(step=number, epoch=0, loss=1.0, rows=1, samples_per_s=1.0, phases={}, total_steps=100))
    assert sent == [(41, signal.SIGKILL), (os.getpid(), signal.SIGTERM)]
    assert shown.said == ["2. kill -9 41: one worker is dead. The other continues; another starts."]
    assert display.has_stopped


def test_in_chinese_the_run_with_the_kill_is_narrated_in_chinese() -> None:
    said: list[str] = []
    progress: list[str] = []
    display = NarratingDisplay(CHINESE.events, said.append, progress.append, quiet=False)
    lost = WorkerLost(rank=1, host="a\x1b[2J", pid=7, reason="SIGKILL")
    step = StepDone(step=3, epoch=0, loss=2.5, rows=8, samples_per_s=100.0, phases={}, total_steps=9)
    for event in (
        LaunchStarted(workers=2),
        GenerationStarted(generation="1.1", workers=2, hosts=1),
        step,
        step,
        lost,
        GenerationStarted(generation="1.2", workers=1, hosts=1, why="worker 1 died"),
        CheckpointSaved(step=5, path="p", num_bytes=1_840_000, seconds=0.1, blocked_s=0.0),
        RunEnded(exit_code=75, step=5, reason="SIGTERM", dropped=0),
        RunEnded(exit_code=0, step=9, reason="finished", dropped=0),
    ):
        display.event(event)
    display.say("1 joined")
    display.output(0, "stdout", b"held-out digits: 99% correct\n")
    assert said == [
        "正在启动 2 个 worker，导入 torch …",
        "丢失 a\\x1b[2J 上的 rank 1（pid 7）：SIGKILL",
        "由 1 个 worker 继续训练（世代 1.2）",
        "已保存第 5 步的检查点（1.84 MB，用时 0.1 秒）",
        "训练停在第 5 步，退出码 75",
        "训练完成，共 9 步",
    ]
    assert progress == ["第 3/9 步  损失 2.5000  每秒 100 行"], "not for every step"
    quiet = NarratingDisplay(CHINESE.events, said.append, progress.append, quiet=True)
    quiet.event(lost)
    assert len(said) == 6


def test_errors_of_the_demo_are_in_chinese_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [*DEMO, "--run-dir", "file/demo"]
    environ = plain(LANG="zh_CN.UTF-8", PYTHONIOENCODING="utf-8")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, env=environ)
    assert done.returncode == 3 and "演示的训练要写到 file/demo，但写不了" in done.stderr
