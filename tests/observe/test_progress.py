"""What people see: lines in a pipe, a bar on a terminal; and that showing it never troubles the run."""

import io
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import uuid

import pytest

from manyhands.control.messages.failure import Failure, WorkerEnd, render
from manyhands.events import (
    CheckpointEvaluated,
    CheckpointFailed,
    CheckpointSaved,
    Divided,
    EpochDone,
    Evaluated,
    GenerationStarted,
    LaunchStarted,
    Logged,
    Resumed,
    RunEnded,
    RunStarted,
    StalenessSeen,
    StepDone,
    Straggler,
    Warned,
    WorkerLost,
)
from manyhands.observe import display_queue
from manyhands.observe.event_text import Tally, clean, details_of, duration, line_of, size, waiting_line
from manyhands.observe.output_spool import Spool
from manyhands.observe.progress_display import make_display
from manyhands.observe.terminal import BottomLines, _PrintsAbove

PHASES = {"load": 0.02, "forward": 0.31, "backward": 0.48, "reduce": 0.12, "update": 0.07}
RUN = {"run": "runs/a", "strategy": "mirrored", "workers": 2, "slices": 4, "precision": "fp32", "threads": 1}
STARTED = RunStarted(**RUN, total_steps=5000)


def step(number, **changes):
    fields = {"epoch": 3, "loss": 1.8734, "rows": 64, "samples_per_s": 312.0, "phases": PHASES, "total_steps": 5000}
    return StepDone(step=number, **(fields | changes))


def saved(number):
    return CheckpointSaved(step=number, path="c", num_bytes=12_000_000, seconds=0.2, blocked_s=0.01)


def wait_until(condition):
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


class Shown:
    """A display on streams we can read."""

    def __init__(self, ui="plain", **options):
        self.stdout, self.stderr = io.StringIO(), io.StringIO()
        self.display = make_display(ui, stdout=self.stdout, stderr=self.stderr, **options)

    def after(self, *events):
        for event in events:
            self.display.event(event)
        return self.lines()

    def lines(self):
        self.display.close()
        return self.stderr.getvalue().splitlines()


# ---- wording


def test_a_step_line_says_where_how_fast_and_what_the_time_went_into():
    tally = Tally()
    tally.add(step(1200))
    assert tally.line() == (
        "step 1200/5000  epoch 4  loss 1.873  312 samples/s  "
        "load 2% forward 31% backward 48% reduce 12% update 7%  eta 13m"
    )


def test_a_step_line_leaves_out_what_is_unknown():
    tally = Tally()
    tally.add(step(7, total_steps=None, phases={}))
    assert tally.line() == "step 7  epoch 4  loss 1.873  312 samples/s"


def test_speed_and_shares_are_those_of_all_steps_since_the_last_line():
    tally = Tally()
    tally.add(step(1, samples_per_s=100.0, phases={"forward": 3.0}))
    tally.add(step(2, samples_per_s=300.0, phases={"backward": 1.0}))
    assert tally.samples_per_s == pytest.approx(150.0)
    assert tally.shares() == "forward 75% backward 25%"
    tally.forget()
    tally.add(step(3, samples_per_s=300.0, phases={"backward": 1.0}))
    assert tally.samples_per_s == pytest.approx(300.0)
    assert tally.shares() == "forward 0% backward 100%"


def test_a_loss_that_is_not_a_number_is_shown_as_such():
    tally = Tally()
    tally.add(step(1, loss=float("nan"), samples_per_s=0.0))
    assert "loss nan" in tally.line()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (61, "1m01s"), (2460, "41m"), (3599, "1h00m"), (11_520, "3h12m"), (187_200, "2d4h")],
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_durations_and_sizes_of_odd_values_are_still_words():
    assert duration(float("inf")) == "?"
    assert [size(0), size(1500), size(12e6), size(5e12)] == ["0 B", "1.5 kB", "12 MB", "5 TB"]


def test_every_kind_of_event_has_its_line_or_none():
    assert line_of(STARTED) == "2 workers train together (mirrored), 5000 steps; everything is written to runs/a"
    assert details_of(STARTED) == "mirrored, V=4, fp32, 1 thread each"
    regrouped = GenerationStarted(generation="1.2", workers=2, hosts=1)
    assert line_of(regrouped) == "continuing with 2 workers on 1 host (generation 1.2)"
    assert line_of(EpochDone(epoch=2, step=90, results={"loss": 0.25})) == "epoch 3 done at step 90  loss 0.25"
    assert line_of(Evaluated(step=9, rows=360, results={"accuracy": 0.97})) == (
        "evaluated 360 examples at step 9  accuracy 0.97"
    )
    beside = CheckpointEvaluated(
        step=9, rows=360, results={"loss": 0.5}, seconds=0.1, call=1, commit=(1, 1, 2), digest="", step_s=0.03
    )
    assert line_of(beside) == (
        "checkpoint of step 9  loss 0.5  (360 examples, 3600 a second; training's steps take 30 ms meanwhile)"
    )
    assert line_of(Logged(step=4, values={"mine": 1.0})) == "logged at step 4  mine 1"
    assert line_of(saved(70)) == "saved checkpoint of step 70 (12 MB in 0.2 s)"
    assert line_of(CheckpointFailed(step=70, reason="disk full")) == (
        "warning: checkpoint of step 70 not saved: disk full"
    )
    assert line_of(Resumed(step=8, epoch=1, path="c/8", skipped=["c/9: truncated"])) == (
        "resumed at step 8, epoch 2, from c/8; skipped c/9: truncated"
    )
    lost = WorkerLost(rank=1, host="b", pid=41, reason="SIGKILL")
    assert line_of(lost) == "lost rank 1 on b (pid 41): SIGKILL"
    assert line_of(WorkerLost(rank=0, host="b", pid=42, reason="reset", collateral=True)) is None
    assert (
        line_of(StalenessSeen(step=3, updates={0: 2, 1: 1}))
        == "updates by the staleness of their gradients: 0: 2, 1: 1"
    )
    assert line_of(StalenessSeen(step=0, updates={})) is None, "no update, no line"
    assert line_of(Warned(text="careful")) == "warning: careful"
    assert line_of(RunEnded(exit_code=0, step=9, reason="", dropped=3), elapsed_s=61) == (
        "finished at step 9 after 1m01s (3 events not recorded)"
    )
    assert line_of(RunEnded(exit_code=0, step=0, reason="")) == "finished", "a script with its own training loop"
    full = "The checkpoint of step 70 was not saved to c: No space left on device."
    assert line_of(CheckpointFailed(step=70, reason=full)) == f"warning: {full}"
    assert line_of(RunEnded(exit_code=1, step=9, reason="NonFinite")) == "ended with exit code 1 at step 9: NonFinite"
    assert line_of(step(1)) is None


def test_text_from_a_script_cannot_move_the_cursor():
    assert clean("a\x1b[2Jb\r\nc\x9b") == r"a\x1b[2Jb\r\nc\x9b"
    assert "\x1b" not in line_of(Warned(text="\x1b[31mred"))


# ---- plain


def test_in_a_pipe_the_first_step_is_shown_at_once_and_then_one_line_per_interval():
    began, shown, number = time.monotonic(), Shown(interval_s=0.3), 1
    shown.display.event(step(1))
    wait_until(lambda: "step 1/5000" in shown.stderr.getvalue())
    while shown.stderr.getvalue().count("/5000") < 4:
        assert time.monotonic() - began < 60.0
        number += 1
        shown.display.event(step(number))
        time.sleep(0.005)
    steps = [line for line in shown.lines() if line.startswith("step ")]
    assert 4 <= len(steps) <= 2 + (time.monotonic() - began) / 0.3, "the first, one per interval, and the last"
    assert steps[-1].startswith(f"step {number}/5000")


def test_a_pipe_gets_no_carriage_return_and_no_escape():
    shown = Shown(interval_s=0.0)
    shown.after(STARTED, step(1), Warned(text="w"), EpochDone(epoch=1, step=1, results={"loss": 1.0}), saved(1))
    assert not set("\r\x1b") & set(shown.stderr.getvalue())


def test_a_run_reads_from_first_line_to_summary():
    lines = Shown().after(
        STARTED,
        GenerationStarted(generation="1.1", workers=2, hosts=1),
        Warned(text="dropout, and V was left to the default"),
        EpochDone(epoch=0, step=10, results={"loss": 0.5}),
        RunEnded(exit_code=0, step=10, reason="done"),
    )
    assert lines == [
        "2 workers train together (mirrored), 5000 steps; everything is written to runs/a",
        "warning: dropout, and V was left to the default",
        "epoch 1 done at step 10  loss 0.5",
        "finished at step 10 after 0s",
    ]


def test_a_second_call_does_not_repeat_the_first_line_but_a_restart_says_its_attempt():
    evaluate = RunStarted(**RUN, call="evaluate")
    again = RunStarted(**RUN, attempt=2)
    lines = Shown().after(STARTED, evaluate, again)
    assert ["attempt 2; everything" in line for line in lines] == [False, True]


def test_many_checkpoints_get_one_line_per_interval_and_the_last_is_shown_at_the_end():
    shown = Shown(interval_s=60)
    shown.display.event(saved(1))
    wait_until(lambda: "step 1 " in shown.stderr.getvalue())
    lines = shown.after(*[saved(number) for number in range(2, 100)])
    assert [re.search(r"step (\d+)", line)[1] for line in lines] == ["1", "99"]


def test_of_many_short_epochs_one_a_second_gets_a_line_and_the_last_one_always():
    epochs = [EpochDone(epoch=number, step=number + 1, results={"loss": 0.5}) for number in range(500)]
    lines = Shown(interval_s=60).after(STARTED, *epochs, RunEnded(exit_code=0, step=500, reason=""))
    shown = [line for line in lines if line.startswith("epoch")]
    assert shown[0] == "epoch 1 done at step 1  loss 0.5" and shown[-1] == "epoch 500 done at step 500  loss 0.5"
    assert len(shown) < 100, "500 epochs took far less than 100 s"
    assert lines[-1].startswith("finished")


def test_what_only_some_want_to_know_needs_verbose():
    machine = RunStarted(**RUN, machine="cpu, contiguous memory")
    assert "V=4" not in "".join(Shown().after(machine))
    assert Shown(verbose=True).after(machine)[1] == "mirrored, V=4, fp32, 1 thread each, cpu, contiguous memory"


def test_that_workers_share_no_memory_is_always_shown_as_it_costs_speed():
    machine = "cpu, contiguous memory, workers talk over Gloo (no C extension), weights divided"
    (line,) = Shown().after(RunStarted(**RUN, machine=machine))
    assert line.startswith("2 workers train together (mirrored), workers talk over Gloo (no C extension); everything")


def test_before_anything_comes_from_workers_a_line_says_what_is_being_done():
    launched = LaunchStarted(workers=2, servers=1)
    assert Shown().after(launched) == ["starting 2 workers and 1 parameter server, importing torch …"]
    shown = Shown("live")
    shown.display.event(launched)
    wait_until(lambda: "importing torch … 0 s" in shown.stderr.getvalue())
    shown.display.output(0, "stderr", b"the script speaks\n")
    shown.display.close()
    assert shown.stderr.getvalue().endswith("\r\x1b[2Kthe script speaks\n"), "the line makes room"
    assert waiting_line(launched, 2.6) == "starting 2 workers and 1 parameter server, importing torch … 3 s"
    assert "nothing from the script yet … 1m15s" in waiting_line(launched, 75)


@pytest.mark.parametrize("ui", ["plain", "live"])
def test_workers_lost_in_a_run_that_fails_are_named_by_the_failure_block_alone(ui):
    lost = WorkerLost(rank=3, host="b", pid=41, reason="signal 9 (SIGKILL)")
    end = WorkerEnd(rank=3, host="b", pid=41, kind="signal", signal=9)
    block = Failure(run="r", exit_code=4, reason="gave up", attempt=1, max_attempts=1, step=7, first=end, certain=True)
    shown = Shown(ui)
    for event in (lost, block, RunEnded(exit_code=4, step=7, reason="gave up")):
        (shown.display.failure if event is block else shown.display.event)(event)
    assert shown.lines() == render(block).splitlines()


def test_a_lost_worker_is_named_when_the_others_continue_and_not_when_all_were_asked_to_stop():
    lost = WorkerLost(rank=1, host="b", pid=41, reason="KeyboardInterrupt")
    regrouped = GenerationStarted(generation="1.2", workers=1, hosts=1)
    first = GenerationStarted(generation="1.1", workers=2, hosts=1)
    stopped = RunEnded(exit_code=130, step=7, reason="stopped on request")
    assert Shown().after(first, lost, regrouped, stopped) == ["ended with exit code 130 at step 7: stopped on request"]
    generations = [GenerationStarted(generation=name, workers=1, hosts=1) for name in ("1.1", "1.2")]
    lines = Shown().after(STARTED, generations[0], lost, generations[1], step(9))
    assert lines[1:3] == [
        "lost rank 1 on b (pid 41): KeyboardInterrupt",
        "continuing with 1 worker on 1 host (generation 1.2)",
    ]


def test_with_ui_none_only_output_and_failures_are_seen():
    shown = Shown("none")
    shown.display.output(0, "stdout", b"result 42\n")
    shown.display.say("a launcher's line")
    assert shown.after(STARTED, step(1), RunEnded(exit_code=0, step=1, reason="")) == []
    assert shown.stdout.getvalue() == "result 42\n"


@pytest.mark.parametrize("ui", ["plain", "none", "live"])
def test_a_failure_block_goes_to_stderr_in_every_mode(ui):
    end = WorkerEnd(rank=3, host="b", pid=41, kind="signal", signal=9)
    block = Failure(run="r", exit_code=1, reason="gave up", attempt=1, max_attempts=1, step=7, first=end, certain=True)
    shown = Shown(ui)
    shown.display.failure(block)
    assert shown.lines() == render(block).splitlines()
    assert "rank 3 on b (pid 41)" in shown.stderr.getvalue()
    assert shown.stdout.getvalue() == ""


@pytest.mark.parametrize("ui", ["plain", "live", "none"])
def test_the_chiefs_output_arrives_byte_for_byte_on_a_stdout_that_is_no_terminal(ui, tmp_path):
    data = bytes(range(256)) * 5000 + b"\r\x1b[2Jno newline at the end"
    with (tmp_path / "out").open("w") as stdout, (tmp_path / "err").open("w") as stderr:
        display = make_display(ui, stdout=stdout, stderr=stderr)
        for start in range(0, len(data), 65_536):
            display.event(step(start))
            display.output(0, "stdout", data[start : start + 65_536])
        display.close()
    assert (tmp_path / "out").read_bytes() == data


def test_a_line_waits_for_the_end_of_a_print_whose_text_and_end_come_apart_but_not_for_long():
    both = io.StringIO()
    display = make_display("plain", stdout=both, stderr=both)
    display.output(0, "stdout", b"loss 3.12")
    display.say("saved checkpoint")
    display.output(0, "stdout", b"\n")
    display.output(0, "stdout", b"50%")
    display.say("a slow worker")
    deadline = time.monotonic() + 30
    while "slow" not in both.getvalue():
        assert time.monotonic() < deadline, both.getvalue()
        time.sleep(0.01)
    display.say("another")  # the script never ends that line, and holds nothing up any more
    display.close()
    assert both.getvalue() == "loss 3.12\nsaved checkpoint\n50%a slow worker\nanother\n"


# ---- never in the way


@pytest.mark.parametrize("ui", ["plain", "live", "none"])
def test_an_event_costs_microseconds(ui):
    shown, costs = Shown(ui), []
    event = step(1)
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(100):
            shown.display.event(event)
        costs.append((time.perf_counter() - began) / 100)
    shown.lines()
    assert min(costs) < 20e-6  # the bound only catches drawing or I/O on this path


class Stuck(io.StringIO):
    """A terminal whose user pressed Ctrl-S."""

    def __init__(self):
        super().__init__()
        self.released = threading.Event()

    def write(self, text):
        self.released.wait()
        return super().write(text)


@pytest.mark.parametrize("ui", ["plain", "live"])
def test_a_stuck_terminal_holds_up_neither_steps_nor_the_end(ui, monkeypatch):
    monkeypatch.setattr(display_queue, "CLOSE_TIMEOUT_S", 0.2)
    stuck = Stuck()
    display = make_display(ui, stdout=io.StringIO(), stderr=stuck)
    for number in range(30_000):
        display.event(step(number))
    display.close()
    assert not stuck.released.is_set()  # and yet we are here
    stuck.released.set()
    display._thread.join(60)


@pytest.mark.slow
@pytest.mark.parametrize("ui", ["plain", "live"])
def test_a_process_whose_terminal_is_never_read_still_ends_well(ui, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        PREAMBLE
        + textwrap.dedent("""
        from manyhands.observe import display_queue
        display_queue.CLOSE_TIMEOUT_S = 0.3
        display = make_display(sys.argv[2], stdout=sys.stdout, stderr=sys.stderr, interval_s=0.0)
        slowest = 0.0
        for n in range(1, 400):
            began = time.perf_counter()
            display.event(Warned(text="x" * 200))
            display.event(step(n))
            slowest = max(slowest, time.perf_counter() - began)
        display.close()
        assert display._thread.is_alive(), "the terminal took it all: this shows nothing"
        print(f"trained on, {slowest:.3f}")
        """)
    )
    controller, terminal = os.openpty()
    command = [sys.executable, str(script), "unused", ui]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, text=True, timeout=100)
    os.close(terminal)
    os.close(controller)
    assert done.returncode == 0
    assert done.stdout.startswith("trained on"), done.stdout
    assert float(done.stdout.split()[-1]) < 3.0


def test_a_reader_that_pauses_loses_no_byte(monkeypatch):
    monkeypatch.setattr(display_queue, "MAX_OUTPUT_WAITING_BYTES", 1000)
    stuck, stderr = Stuck(), io.StringIO()
    display = make_display("plain", stdout=stuck, stderr=stderr)
    wrote = "".join(f"{number:09d}\n" for number in range(3000))
    for start in range(0, len(wrote), 10):
        display.output(0, "stdout", wrote[start : start + 10].encode())
    stuck.released.set()
    display.output(0, "stdout", b"the end\n")
    display.close()
    assert stuck.getvalue() == wrote + "the end\n"
    assert "not shown" not in stderr.getvalue()


def test_output_that_neither_memory_nor_disk_takes_is_skipped_and_said(monkeypatch):
    monkeypatch.setattr(display_queue, "MAX_OUTPUT_WAITING_BYTES", 1000)
    stuck, stderr = Stuck(), io.StringIO()
    display = make_display("plain", stdout=stuck, stderr=stderr)
    display._spool = Spool(max_bytes=500)
    for _ in range(300):
        display.output(0, "stdout", b"0123456789")
    stuck.released.set()
    display.close()
    kept = len(stuck.getvalue())
    assert 1500 <= kept <= 1530
    assert f"warning: {size(3000 - kept)} of output not shown" in stderr.getvalue()
    assert "mh logs" in stderr.getvalue()


def failure_block():
    end = WorkerEnd(rank=1, host="a", pid=7, kind="signal", signal=9, step=7, phase="training")
    return Failure(run="r", exit_code=1, reason="gave up", attempt=1, max_attempts=1, step=7, first=end, certain=True)


def test_a_failure_behind_output_that_waits_is_shown(monkeypatch):
    monkeypatch.setattr(display_queue, "CLOSE_TIMEOUT_S", 0.05)
    stuck = Stuck()
    display = make_display("plain", stdout=stuck, stderr=stuck)
    display.output(0, "stdout", b"some output\n")
    display.failure(failure_block())
    closing = threading.Thread(target=display.close)
    closing.start()
    closing.join(0.3)
    assert closing.is_alive(), "it waits for the reader"
    stuck.released.set()
    closing.join()
    assert stuck.getvalue() == "some output\n" + render(failure_block()).rstrip("\n") + "\n"


def test_a_failure_goes_ahead_of_output_that_waits_for_another_reader():
    paused, stdout = os.pipe()
    seen, stderr = os.pipe()
    with os.fdopen(stdout, "w") as out, os.fdopen(stderr, "w") as err, os.fdopen(paused, "rb") as reader:
        display = make_display("plain", stdout=out, stderr=err)
        wrote = b"x" * 999 + b"\n"
        for _ in range(1000):  # far more than a pipe holds
            display.output(0, "stdout", wrote)
        display.failure(failure_block())
        text = b""
        while render(failure_block()).encode().rstrip() not in text:
            text += os.read(seen, 65536)
        read = []
        reading = threading.Thread(target=lambda: read.append(reader.read(1000 * len(wrote))))
        reading.start()
        display.close()
        reading.join()
    os.close(seen)
    assert read == [wrote * 1000]


def test_a_reader_that_went_away_does_not_end_the_run():
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as stdout:
        stderr = io.StringIO()
        display = make_display("plain", stdout=stdout, stderr=stderr)
        os.close(read_end)
        for _ in range(3):
            display.output(0, "stdout", b"into the void\n")
        display.event(RunEnded(exit_code=0, step=3, reason=""))
        display.close()
    assert "finished at step 3" in stderr.getvalue()


def test_something_that_is_no_event_is_not_shown_and_hurts_nothing():
    assert Shown().after(None, 7, object(), Warned(text="still here")) == ["warning: still here"]


def test_without_a_terminal_or_in_ci_auto_means_plain():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def kind(stderr, **options):
        display = make_display("auto", stdout=io.StringIO(), stderr=stderr, **options)
        display.close()
        return type(display).__name__

    assert kind(io.StringIO()) == "_Plain"
    assert kind(Terminal(), ci=True) == "_Plain"
    assert kind(Terminal()) == "_Live"


@pytest.mark.parametrize(
    ("options", "colored"),
    [({}, False), ({"force_color": True}, True), ({"force_color": True, "no_color": True}, False)],
)
def test_colours_are_for_terminals_unless_forced_and_never_against_no_color(options, colored):
    shown = Shown("live", **options)
    shown.display.event(step(100))
    wait_until(lambda: "step 100/5000" in shown.stderr.getvalue())
    shown.lines()
    assert bool(re.search(r"\x1b\[[0-9;]*m", shown.stderr.getvalue())) is colored


def test_the_bar_is_redrawn_at_most_ten_times_a_second():
    shown = Shown("live")
    began = time.monotonic()
    for number in range(1, 150):
        shown.display.event(step(number))
        time.sleep(0.005)
    shown.display.close()
    redraws = len(re.findall(r"%  epoch", shown.stderr.getvalue()))
    assert 2 <= redraws <= 10 * (time.monotonic() - began) + 1


def test_lines_that_go_by_never_leave_the_terminal_without_its_bar():
    screen = io.StringIO()
    bar = BottomLines(screen)
    bar.draw(["first", "second"])
    bar.above(b"printed\n")
    assert screen.getvalue().endswith("printed\nfirst\r\nsecond")
    bar.above(b"half a line")
    assert screen.getvalue().endswith("half a line"), "a progress bar of the script, or a prompt"
    bar.above(b", done\n")
    assert screen.getvalue().endswith(", done\nfirst\r\nsecond")
    bar.erase()
    bar.above(b"over\n")
    assert screen.getvalue().endswith("over\n")


def test_a_child_that_was_forked_while_the_bar_was_drawn_can_still_print():
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as behind:
        bar = BottomLines(behind)
        prints = _PrintsAbove(bar, behind)
        with bar._lock:  # as the display's thread holds it while it draws
            child = os.fork()
            if child == 0:
                threading.Timer(60, os._exit, [1]).start()
                prints.write("from the child\n")
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(read_end) as reader:
        assert reader.read() == "from the child\n"


# ---- on a real terminal

TMUX = pytest.mark.skipif(shutil.which("tmux") is None, reason="NOT SHOWN HERE: the live bar needs tmux to look at it")


@pytest.fixture
def terminal(tmp_path):
    """Runs a script in a real terminal of our own; `screen()` is what a person would see."""
    socket = f"manyhands-{uuid.uuid4().hex[:8]}"

    class Terminal:
        def run(self, script, columns=100):
            path = tmp_path / "script.py"
            path.write_text(PREAMBLE + STAY + textwrap.dedent(script))
            script_and_go = (sys.executable, str(path), str(tmp_path / "go"))
            self._tmux("new-session", "-d", "-x", str(columns), "-y", "24", *script_and_go)

        def screen(self):
            return [line.rstrip() for line in self._tmux("capture-pane", "-p").rstrip().splitlines()]

        def wait_for(self, text):
            wait_until(lambda: any(text in line for line in self.screen()))
            return self.screen()

        def release(self):
            (tmp_path / "go").touch()

        def _tmux(self, *args):
            command = ["tmux", "-L", socket, "-f", os.devnull, *args]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    yield Terminal()
    subprocess.run(["tmux", "-L", socket, "kill-server"], capture_output=True, timeout=60)


PREAMBLE = f"""
import pathlib, sys, time
from manyhands.events import *
from manyhands.observe.progress_display import make_display

def step(n):
    return StepDone(step=n, epoch=1, loss=0.5, rows=64, samples_per_s=312.0, phases={PHASES!r}, total_steps=500)

def wait_for_go():
    deadline = time.monotonic() + 100
    while not pathlib.Path(sys.argv[1]).exists() and time.monotonic() < deadline: time.sleep(0.02)
"""

# tmux scrolls the screen of a process that ended, or closes it: stay until it hangs up.
STAY = """
import atexit
atexit.register(time.sleep, 300)
"""


@TMUX
@pytest.mark.slow
def test_on_a_terminal_a_bar_stays_below_the_chiefs_output_and_leaves_when_the_run_ends(terminal):
    terminal.run("""
        display = make_display("auto", stdout=sys.stdout, stderr=sys.stderr)
        for n in range(1, 251):
            display.event(step(n))
            if n % 50 == 0: display.output(0, "stdout", b"the script says %d\\n" % n)
            time.sleep(0.002)
        wait_for_go()
        display.event(RunEnded(exit_code=0, step=250, reason=""))
        display.close()
        print("a shell prompt")
    """)
    screen = terminal.wait_for("step 250/500")
    said = [f"the script says {n}" for n in range(50, 251, 50)]
    assert screen[:5] == said
    assert re.fullmatch(r"step 250/500 \S+\s+50%  epoch 2  loss 0.5  312 samples/s  eta \d+s", screen[5])
    assert screen[6] == "load 2% forward 31% backward 48% reduce 12% update 7%"
    terminal.release()
    screen = terminal.wait_for("a shell prompt")
    assert screen[:5] == said
    assert screen[-2].startswith("finished at step 250")
    assert not any("━" in line for line in screen), "the bar is gone"


@TMUX
@pytest.mark.slow
def test_in_a_run_of_one_process_prints_go_above_the_bar_and_a_bar_of_the_scripts_own_is_left_alone(terminal):
    terminal.run("""
        out = sys.stdout
        display = make_display("auto", stdout=sys.stdout, stderr=sys.stderr, solo=True)
        for n in range(1, 11):
            display.event(step(n))
            print("printed at", n)
            time.sleep(0.03)
        for n in range(30):
            display.event(step(11 + n))
            print(f"\\rtheir own bar {n}/30", end="", file=sys.stderr, flush=True)
            time.sleep(0.02)
        print("", file=sys.stderr)
        wait_for_go()
        display.close()
        assert sys.stdout is out
        print("a shell prompt")
    """)
    screen = terminal.wait_for("step 40/500")
    assert screen[:11] == [*(f"printed at {n}" for n in range(1, 11)), "their own bar 29/30"]
    assert screen[11].startswith("step 40/500 ")
    assert len(screen) == 13
    terminal.release()
    terminal.wait_for("a shell prompt")


@TMUX
@pytest.mark.slow
def test_on_a_narrow_terminal_the_bar_is_cut_not_wrapped(terminal):
    terminal.run(
        """
        display = make_display("auto", stdout=sys.stdout, stderr=sys.stderr)
        for n in range(1, 100):
            display.event(step(n))
            time.sleep(0.01)
        wait_for_go()
        """,
        columns=40,
    )
    screen = terminal.wait_for("step 99/500")
    assert len(screen) == 2
    assert screen[1].startswith("load 2% forward 31%")


SLOW = Straggler(rank=2, host="b", phase="forward", factor=1.94, step=51, waiting=0.41, generation="1.1")
SLOW_LINE = "rank 2 on b is 1.9 times as slow as the others, in forward; they wait 41% of a step"


def test_a_slow_worker_gets_a_line_and_is_named_again_at_the_end():
    lines = Shown().after(STARTED, SLOW, RunEnded(exit_code=0, step=90, reason=""))
    assert [line for line in lines if "rank 2" in line] == [SLOW_LINE, f"since step 51 {SLOW_LINE}"]


def test_one_that_keeps_up_again_is_not_named_at_the_end_nor_one_whose_rank_is_another_now():
    over = Straggler(rank=2, host="b", phase="forward", factor=1.94, step=101, is_over=True, generation="1.1")
    lines = Shown(interval_s=0).after(STARTED, SLOW, over, RunEnded(exit_code=0, step=190, reason=""))
    assert [line for line in lines if "rank 2" in line] == [SLOW_LINE, "rank 2 on b keeps up with the others again"]
    generations = [GenerationStarted(generation=name, workers=3, hosts=1) for name in ("1.1", "1.2")]
    lines = Shown().after(STARTED, generations[0], SLOW, generations[1], RunEnded(exit_code=0, step=190, reason=""))
    assert [line for line in lines if "rank 2" in line] == [SLOW_LINE]


def test_a_worker_that_is_slow_by_turns_gets_one_line_per_interval():
    over = Straggler(rank=2, host="b", phase="forward", factor=1.94, step=101, is_over=True, generation="1.1")
    ended = RunEnded(exit_code=0, step=190, reason="")
    lines = Shown(interval_s=60).after(STARTED, SLOW, *[over, SLOW] * 40, over, ended)
    assert [line for line in lines if "rank 2" in line] == [SLOW_LINE]


def test_a_new_division_of_few_workers_is_shown_one_by_one():
    assert line_of(Divided(step=51, slices=[6, 2])) == (
        "slices per worker from step 52 on: 6 2, in proportion to their speed"
    )
    assert "1 to 9 a worker" in (line_of(Divided(step=51, slices=list(range(1, 10)))) or "")
