"""In a notebook: text goes to where a cell shows it, runs are named after the notebook, results show as tables."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.control.run_directory import run_name
from manyhands.errors import Preempted, UsageError
from manyhands.launcher.function_launch import call_target
from manyhands.launcher.solo_run import SoloSession
from manyhands.observe.notebook import in_notebook, notebook_name, shows_in_cell
from manyhands.observe.terminal import write_bytes
from manyhands.spec.load import resolve
from manyhands.training.history import FIRST, LAST
from tests.training.workloads import MODELS, OPTIMIZERS, mean_loss


class CellStream(io.StringIO):
    """As ipykernel's streams are: written text shows below the cell, and the file behind it is the server's log."""

    __module__ = "ipykernel.iostream"

    def __init__(self, log: Any) -> None:
        super().__init__()
        self._log = log

    def fileno(self) -> int:
        return int(self._log.fileno())


def test_text_for_a_cell_is_written_to_its_stream_and_not_to_the_file_behind_it(tmp_path: Path) -> None:
    with open(tmp_path / "server.log", "w+") as log:
        cell = CellStream(log)
        assert shows_in_cell(cell) and not shows_in_cell(sys.__stdout__)
        write_bytes(cell, b"epoch 0 done\n")
        assert cell.getvalue() == "epoch 0 done\n"
        log.seek(0)
        assert log.read() == ""


def test_only_a_kernel_of_ipython_makes_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_notebook()
    shell = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert not in_notebook(), "a prompt in a terminal"
    shell.kernel = object()
    assert in_notebook()


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"JPY_SESSION_NAME": "/home/me/First tries.ipynb"}, "First tries"),
        ({"JPY_SESSION_NAME": "0b1e-4c"}, "notebook"),
        ({}, "notebook"),
    ],
)
def test_a_run_is_named_after_the_notebook(environ, name) -> None:
    assert notebook_name(environ) == name
    assert run_name(name).endswith(name.replace(" ", "_"))


def test_a_function_of_a_cell_is_refused_with_what_to_write_into_which_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = types.ModuleType("__main__")
    exec("def train(): pass", cell.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", cell)
    with pytest.raises(UsageError) as refused:
        call_target(cell.train)
    first, second, third = refused.value.fix
    assert first.startswith('"%%writefile my_training.py"') and second.endswith("from my_training import train")
    assert third == "mh.launch(train, workers=2)"


def test_a_history_is_a_list_of_dicts_and_shows_as_a_table() -> None:
    rows = [{"epoch": 0, "step": 3.0, "loss": 0.123456}, {"epoch": 0, "step": 12, "loss": 0.1, "val_<b>": float("nan")}]
    history = mh.History(rows)
    assert history == rows and isinstance(history, list)
    assert repr(history).splitlines() == [
        "epoch  step    loss  val_<b>",
        "    0     3  0.1235",
        "    0    12     0.1      nan",
    ]
    assert "<th>val_&lt;b&gt;</th>" in history._repr_html_() and "<td>0.1235</td>" in history._repr_html_()
    assert repr(mh.History()) == "History: no rows"
    long = mh.History({"step": step, "loss": 1.0} for step in range(100))
    assert len(repr(long).splitlines()) == 1 + FIRST + 1 + LAST and "(85 more)" in repr(long)


INTERRUPTED = """
import os, signal, sys, threading, types
import torch
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()))
import manyhands as mh

signal.signal(signal.SIGINT, signal.default_int_handler)  # as kernels have it, however the tests were started

class Interrupting(torch.optim.SGD):  # the button is pressed between the updates of two parameters
    presses = 1
    def step(self, closure=None):
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                param.data.sub_(1.0)
                if number == 0 and self.presses:
                    self.presses -= 1
                    os.kill(os.getpid(), signal.SIGINT)

def make():
    model = torch.nn.Linear(4, 1)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    return model

def cell(steps):
    try:
        trainer.fit(torch.ones(16, 4), steps=steps, batch_size=4)
        print("done", end=" ")
    except KeyboardInterrupt:
        print("interrupted", end=" ")
    model = trainer.model
    print(trainer.step, -model.weight.max().item(), -model.bias.item(), signal.getsignal(signal.SIGINT).__name__)

trainer = mh.Trainer(make, lambda model, batch: model(batch).mean(), lambda p: Interrupting(p, lr=0.1), slices=2)
cell(1000)
print(sorted(os.listdir(trainer.run_dir / "checkpoints"))[-1])
cell(2)
trainer = mh.Trainer(make, lambda model, batch: model(batch).mean(), lambda p: torch.optim.SGD(p, lr=0.1), slices=2)
trainer.fit(torch.ones(16, 4), steps=2, batch_size=4)
print(trainer.step)
"""


@pytest.mark.long
def test_an_interrupted_cell_ends_after_a_whole_step_and_the_next_one_resumes(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(INTERRUPTED)
    done = subprocess.run([sys.executable, "kernel.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines() == [
        "interrupted 2 2.0 2.0 default_int_handler",
        "step-00000002",  # the step under way had begun before the button was pressed: one more ends it
        "done 4 4.0 4.0 default_int_handler",
        "2",
    ], done.stderr


def test_an_interrupt_stops_steps_once_and_a_second_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    session, before = SoloSession(resolve()), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="after step 3"), session.interruptible():
        signal.raise_signal(signal.SIGINT)
        assert session.stop_requested == "preempt"
        raise Preempted("after step 3")
    assert session.stop_requested is None and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt), session.interruptible():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one has waited")
    with session.interruptible():
        pass
    with pytest.raises(Preempted), session.interruptible():  # of a SIGTERM
        raise Preempted("after step 4")


def test_a_trainer_says_what_it_trains_before_and_after_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = mh.Trainer(MODELS["plain"], mean_loss, OPTIMIZERS["SGD"])
    assert repr(trainer) == "<mh.Trainer: Sequential of 276 parameters, mirrored, fp32>"
    assert trainer._repr_html_() == (
        "<table><tr><th>model</th><td>Sequential of 276 parameters</td></tr>"
        "<tr><th>strategy</th><td>mirrored</td></tr><tr><th>precision</th><td>fp32</td></tr></table>"
    )
    assert not list(tmp_path.iterdir()), "showing it has begun a run"
    assert torch.is_grad_enabled()
