"""TensorBoard files, read back with TensorBoard's own reader; and training goes through when they cannot be written."""

import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings

import pytest

from manyhands.errors import EnvironmentProblem, SpecError
from manyhands.observe import tensorboard
from manyhands.observe.tensorboard import TensorBoardHook


def stats(loss=0.5, **changes):
    fields = {
        "loss": loss,
        "rows": 8,
        "seconds": {"load": 0.1, "forward": 0.2},
        "samples_per_s": 100.0,
        "lr": 0.01,
        "grad_norm": None,
    }
    return types.SimpleNamespace(**(fields | changes))


@pytest.fixture
def trainer(tmp_path):
    return types.SimpleNamespace(home=tmp_path)


def scalars(log_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(log_dir), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(each.step, round(each.value, 5)) for each in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }


def test_a_run_reads_back_in_tensorboard(trainer, tmp_path):
    hook = TensorBoardHook()
    hook.begin(trainer)
    for step in (1, 2, 3):
        hook.after_step(trainer, step, stats(loss=1 / step, grad_norm=float(step)))
    hook.after_epoch(trainer, 1, {"loss": 0.25, "accuracy": 0.9})
    hook.end(trainer, None)
    seen = scalars(tmp_path / "summaries")
    assert seen["train/loss"] == [(1, 1.0), (2, 0.5), (3, 0.33333)]
    assert seen["train/grad_norm"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert seen["train/lr"][0] == (1, 0.01)
    assert seen["train/samples_per_s"][0] == (1, 100.0)
    assert seen["seconds/forward"][0] == (1, 0.2)
    assert seen["epoch/accuracy"] == [(3, 0.9)]
    assert hook.dropped == 0


def test_every_thins_the_steps_but_not_the_epochs(trainer, tmp_path):
    hook = TensorBoardHook(tmp_path / "elsewhere", every=10)
    hook.begin(trainer)
    for step in range(1, 36):
        hook.after_step(trainer, step, stats())
    hook.after_epoch(trainer, 1, {"loss": 0.25})
    hook.end(trainer, None)
    seen = scalars(tmp_path / "elsewhere")
    assert [step for step, _ in seen["train/loss"]] == [10, 20, 30]
    assert seen["epoch/loss"] == [(35, 0.25)]
    assert "train/grad_norm" not in seen, "what is unknown is left out"


def test_after_a_resume_no_step_is_there_twice(trainer, tmp_path):
    first = TensorBoardHook()
    first.begin(trainer)
    for step in range(1, 11):
        first.after_step(trainer, step, stats(loss=1.0))
        if step == 6:
            checkpoint = first.state()
    first.end(trainer, RuntimeError("killed at step 10, four steps after its checkpoint"))

    second = TensorBoardHook()
    second.restore(checkpoint)
    second.begin(trainer)
    for step in range(5, 13):  # even if the loop were to repeat steps that the checkpoint has
        second.after_step(trainer, step, stats(loss=2.0))
    second.end(trainer, None)
    assert scalars(tmp_path / "summaries")["train/loss"] == (
        [(step, 1.0) for step in range(1, 7)] + [(step, 2.0) for step in range(7, 13)]
    )


def test_a_second_fit_of_the_same_run_writes_on(trainer, tmp_path):
    hook = TensorBoardHook()
    for steps in ((1, 2), (3, 4)):
        hook.begin(trainer)
        for step in steps:
            hook.after_step(trainer, step, stats())
        hook.end(trainer, None)
    assert [step for step, _ in scalars(tmp_path / "summaries")["train/loss"]] == [1, 2, 3, 4]


def test_only_the_chief_writes():
    assert TensorBoardHook.chief_only


def test_a_log_directory_that_cannot_be_made_is_warned_about_once_and_training_continues(trainer, tmp_path):
    (tmp_path / "file").write_text("in the way")
    hook = TensorBoardHook(tmp_path / "file" / "logs")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hook.begin(trainer)
        for step in range(1, 50):
            hook.after_step(trainer, step, stats())
        hook._writer.close(60)
        hook.after_step(trainer, 50, stats())
        assert hook.dropped == 49
        hook.end(trainer, None)
    (warning,) = [each for each in caught if "TensorBoard" in str(each.message)]
    assert "NotADirectoryError" in str(warning.message)


def test_even_where_warnings_are_errors_lost_summaries_do_not_end_training(trainer, tmp_path):
    (tmp_path / "file").write_text("in the way")
    hook = TensorBoardHook(tmp_path / "file" / "logs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hook.begin(trainer)
        hook.after_step(trainer, 1, stats())
        hook.end(trainer, None)


def test_after_a_failure_writing_starts_again_in_a_new_file(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "RETRY_S", 0.0)
    (tmp_path / "summaries").write_text("in the way")
    hook = TensorBoardHook()
    hook.begin(trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hook.after_step(trainer, 1, stats())
        deadline = time.monotonic() + 60
        while not hook.dropped and time.monotonic() < deadline:
            time.sleep(0.01)
        (tmp_path / "summaries").unlink()
        hook.after_step(trainer, 2, stats())
        hook.end(trainer, None)
    assert [step for step, _ in scalars(tmp_path / "summaries")["train/loss"]] == [2]


def test_what_is_not_written_in_time_is_counted_and_warned_about(trainer, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(tensorboard, "_tensorboard", release.wait)
    monkeypatch.setattr(tensorboard, "IMPORT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(tensorboard, "CLOSE_TIMEOUT_S", 0.05)
    hook = TensorBoardHook()
    hook.begin(trainer)
    thread = hook._writer._thread
    for step in (1, 2, 3):
        hook.after_step(trainer, step, stats())
    with pytest.warns(RuntimeWarning, match=r"being lost \(not written within 0.05 s of the end\)"):
        hook.end(trainer, None)
    assert hook.dropped == 3
    release.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="NOT SHOWN HERE: mounting a small disk needs root"
)
@pytest.mark.faults
@pytest.mark.slow
def test_on_a_full_disk_training_continues_and_no_file_stays_open(tmp_path):
    script = """
        import os, subprocess, sys, time, types, warnings
        from manyhands.observe import tensorboard
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", sys.argv[1]], check=True)
        warnings.simplefilter("ignore")
        tensorboard.RETRY_S = 0.0
        stats = types.SimpleNamespace(loss=1.0, lr=None, samples_per_s=1.0, grad_norm=None, seconds={"load": 0.1})
        hook = tensorboard.TensorBoardHook(sys.argv[1])
        hook.begin(None)
        slowest = 0.0
        for step in range(1, 5000):
            began = time.perf_counter(); hook.after_step(None, step, stats)
            slowest = max(slowest, time.perf_counter() - began)
        hook._writer.close(40)  # on a busy machine its thread may be far behind
        assert hook.dropped > 1000, hook.dropped
        assert slowest < 3.0, slowest
        assert len(os.listdir("/proc/self/fd")) < 20
        print("trained on")
    """
    command = ["unshare", "--mount", sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "trained on\n", done.stderr
    assert "Traceback" not in done.stderr


def test_a_step_costs_microseconds(trainer):
    hook, costs = TensorBoardHook(), []
    hook.begin(trainer)
    for block in range(20):
        began = time.perf_counter()
        for step in range(100):
            hook.after_step(trainer, block * 100 + step + 1, stats())
        costs.append((time.perf_counter() - began) / 100)
    hook.end(trainer, None)
    assert min(costs) < 100e-6  # the bound only catches I/O on this path


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'manyhands\[tensorboard\]'"):
        TensorBoardHook()


def test_an_interval_below_one_step_is_refused():
    with pytest.raises(SpecError, match="every is 0"):
        TensorBoardHook(every=0)


def test_importing_the_hook_does_not_import_tensorboard():
    code = "import sys, manyhands.observe.tensorboard; print('tensorboard' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "False\n", done.stdout + done.stderr
