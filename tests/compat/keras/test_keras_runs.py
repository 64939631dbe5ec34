"""A Keras program under `mh run` and as `python script.py`: the same as Keras alone, also if workers are killed."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.long]

SCRIPT = Path(__file__).with_name("whole_training.py")
SERVED = Path(__file__).with_name("served_cases.py")
GENERATORS = Path(__file__).with_name("generator_training.py")
MH = str(Path(sys.executable).with_name("mh"))


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def by_keras(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder, and what Keras printed."""
    folder = tmp_path_factory.mktemp("keras")
    return folder, printed(run(folder, sys.executable, str(SCRIPT), "out", "keras"))


def printed(output: str) -> list[str]:
    """The lines of Keras's progress, without times."""
    lines = [line for line in output.splitlines() if re.match(r"Epoch |\d+/\d+ - ", line)]
    return [re.sub(r"\d+m?s - \d+m?s/step", "", line) for line in lines]


def check(by_keras: tuple[Path, list[str]], folder: Path, ranks: int, *, besides: tuple[str, ...] = ()) -> None:
    """Everything is as Keras alone has it, `besides` some results."""
    wanted = json.loads((by_keras[0] / "out").read_text())
    for rank in range(ranks):
        found = json.loads((folder / f"out.{rank}").read_text())
        assert found.keys() == wanted.keys()
        for name in wanted.keys() - {*besides}:
            np.testing.assert_allclose(flat(found[name]), flat(wanted[name]), atol=1e-5, err_msg=f"{rank} {name}")
    ours, theirs = ((one / "out.csv").read_text().splitlines() for one in (folder, by_keras[0]))
    assert [line.partition(",")[0] for line in ours] == [line.partition(",")[0] for line in theirs]


def flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [one for name in sorted(value) for one in flat(value[name])]
    return [one for part in value for one in flat(part)] if isinstance(value, list) else [float(value)]


def test_a_script_that_asks_for_two_workers_prints_and_trains_what_keras_does(
    by_keras: tuple[Path, list[str]], tmp_path: Path
) -> None:
    output = run(tmp_path, sys.executable, str(SCRIPT), "out", "2")
    check(by_keras, tmp_path, 2)
    assert printed(output) == by_keras[1]


def test_a_worker_killed_in_the_middle_of_fit_is_replaced_and_nothing_changes(
    by_keras: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """The chief, which writes the files; its replacement has the same History and the same calls of callbacks."""
    output = run(tmp_path, MH, "run", "-n", "3", "--elastic", "1:3", str(SCRIPT), "out", "0", "0")
    assert (tmp_path / "out.killed0").exists()
    check(by_keras, tmp_path, 3)
    assert len(printed(output)) == len(by_keras[1])


def test_a_run_whose_workers_are_all_killed_resumes_inside_an_epoch(
    by_keras: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run(tmp_path, MH, "run", "-n", "2", str(SCRIPT), "out", "0", "all")
    assert (tmp_path / "out.killed0").exists()
    check(by_keras, tmp_path, 2)


def test_a_worker_lost_while_a_generator_is_read_loses_and_repeats_no_batch(tmp_path: Path) -> None:
    """In the second of two calls on one generator; the replacement reads first what the run has used."""
    run(tmp_path, sys.executable, str(GENERATORS), "alone", "keras")
    run(tmp_path, MH, "run", "-n", "2", "--elastic", "1:2", str(GENERATORS), "ours", "ours", "kill")
    assert (tmp_path / "ours.killed").exists()
    wanted = json.loads((tmp_path / "alone").read_text())
    for found in tmp_path.glob("ours.[0-9]"):
        results = json.loads(found.read_text())
        for name in wanted:
            np.testing.assert_allclose(flat(results[name]), flat(wanted[name]), atol=1e-5, err_msg=name)


CLUSTER = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np
from manyhands import distribute
x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
strategy = distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
history = model.fit(x, x[:, :1], batch_size=32, epochs=2, verbose=0, shuffle=False)
print("loss", strategy.num_replicas_in_sync, round(history.history["loss"][-1], 5), flush=True)
"""


def test_keras_fit_by_tf_config(tmp_path: Path) -> None:
    """Two processes that are started as a cluster of TensorFlow's train one model."""
    (tmp_path / "train.py").write_text(CLUSTER)
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        workers = [f"127.0.0.1:{one.getsockname()[1]}" for one in (first, second)]
    started = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env={**os.environ, "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": _task(index)})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in (0, 1)
    ]
    said = [one.communicate(timeout=280)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0], said
    lines = {line for one in said for line in one.splitlines() if line.startswith("loss 2 ")}
    assert len(lines) == 1, said


def _task(index: int) -> dict[str, object]:
    return {"type": "worker", "index": index}


OF_BATCHES = ("losses",)
"""Where servers lease slices, a worker knows of a batch what it has read."""


@pytest.mark.parametrize(
    "strategy",
    [
        'mh.ParameterServer(mode="sync", servers=2, workers=workers)',
        'mh.ParameterServer(mode="ssp", staleness=0, workers=workers)',
        'mh.ParameterServer(mode="hybrid", workers=workers)',
        "mh.CentralStorage(workers=workers)",
    ],
)
def test_workers_in_step_train_what_keras_does_wherever_the_weights_are(
    by_keras: tuple[Path, list[str]], tmp_path: Path, strategy: str
) -> None:
    output = run(tmp_path, sys.executable, str(SCRIPT), "out", "2", "", strategy)
    check(by_keras, tmp_path, 2, besides=OF_BATCHES if "hybrid" not in strategy and "Server" in strategy else ())
    assert printed(output) == by_keras[1]


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_workers_that_do_not_wait_count_every_example_once_and_agree(
    by_keras: tuple[Path, list[str]], tmp_path: Path, mode: str
) -> None:
    run(tmp_path, sys.executable, str(SCRIPT), "out", "2", "", f'mh.ParameterServer(mode="{mode}", workers=workers)')
    first, second = (json.loads((tmp_path / f"out.{rank}").read_text()) for rank in (0, 1))
    for name in first.keys() - {*OF_BATCHES}:
        assert first[name] == second[name], name
    check_counts(by_keras, first)


def check_counts(by_keras: tuple[Path, list[str]], found: dict[str, Any]) -> None:
    """The loss of each epoch is close to that of steps in order; calls and numbers of examples are the same."""
    wanted = json.loads((by_keras[0] / "out").read_text())
    for name in ("examples", "val_examples"):
        assert found["history"][name] == wanted["history"][name]
    assert (found["epoch"], found["calls"]) == (wanted["epoch"], wanted["calls"])
    np.testing.assert_allclose(found["history"]["loss"], wanted["history"]["loss"], atol=0.05)


@pytest.mark.parametrize("strategy", ['mh.ParameterServer(mode="sync")', "mh.Sharded()"])
def test_all_workers_killed_resume_inside_an_epoch_wherever_the_weights_are(
    by_keras: tuple[Path, list[str]], tmp_path: Path, strategy: str
) -> None:
    servers = ("--servers", "1") if "Server" in strategy else ()
    run(tmp_path, MH, "run", "-n", "2", *servers, str(SCRIPT), "out", "0", "all", strategy)
    assert (tmp_path / "out.killed0").exists()
    check(by_keras, tmp_path, 2, besides=(*OF_BATCHES, "calls") if servers else ())


def test_a_worker_killed_under_synchronous_servers_changes_nothing(
    by_keras: tuple[Path, list[str]], tmp_path: Path
) -> None:
    command = (MH, "run", "-n", "3", "--servers", "1", "--elastic", "1:3", str(SCRIPT), "out", "0", "1")
    run(tmp_path, *command, 'mh.ParameterServer(mode="sync")')
    assert (tmp_path / "out.killed1").exists()
    check(by_keras, tmp_path, num_ended(tmp_path), besides=(*OF_BATCHES, "calls"))


def num_ended(folder: Path) -> int:
    """How many workers have written their results: on a busy machine the replacement may come after the last step."""
    ended = len(list(folder.glob("out.[0-9]")))
    assert ended >= 2
    return ended


def test_a_killed_server_is_replaced_with_the_state_of_keras_optimizer(
    by_keras: tuple[Path, list[str]], tmp_path: Path
) -> None:
    command = (MH, "run", "-n", "2", "--servers", "1", str(SCRIPT), "out", "0", "server")
    run(tmp_path, *command, 'mh.ParameterServer(mode="sync")')
    assert (tmp_path / "out.ended").exists()
    check(by_keras, tmp_path, 2, besides=OF_BATCHES)


def test_a_worker_killed_under_asynchronous_servers_loses_and_repeats_no_example(
    by_keras: tuple[Path, list[str]], tmp_path: Path
) -> None:
    command = (MH, "run", "-n", "3", "--servers", "1", "--elastic", "1:3", str(SCRIPT), "out", "0", "0")
    run(tmp_path, *command, 'mh.ParameterServer(mode="async")')
    assert (tmp_path / "out.killed0").exists()
    first, *others = (json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(num_ended(tmp_path)))
    for other in others:
        assert other["history"] == first["history"] and other["weights"] == first["weights"]
    check_counts(by_keras, {**first, "calls": json.loads((by_keras[0] / "out").read_text())["calls"]})


@pytest.mark.parametrize("case", ["steps per epoch", "schedule", "again", "changes after epochs"])
def test_programs_for_servers_end_where_keras_ends(tmp_path: Path, case: str) -> None:
    """Steps per epoch; a schedule of the learning rate; a second fit; weights that callbacks change after epochs."""
    for out in ("alone", "ours"):
        run(tmp_path, sys.executable, str(SERVED), case, out)
    wanted, *found = (json.loads((tmp_path / name).read_text()) for name in ("alone.0", "ours.0", "ours.1"))
    for name in wanted:
        for one in found[: 1 if name == "saved" else 2]:  # files are the chief's
            np.testing.assert_allclose(flat(one[name]), flat(wanted[name]), atol=1e-5, err_msg=name)


def test_a_request_of_one_worker_to_stop_after_a_batch_ends_the_epoch_of_all(tmp_path: Path) -> None:
    run(tmp_path, sys.executable, str(SERVED), "stop", "ours")
    first, second = (json.loads((tmp_path / f"ours.{rank}").read_text()) for rank in (0, 1))
    assert first == second
    assert first["epochs"] == [0] or (first["epochs"] == [0, 1] and first["iterations"] < 12)
    assert first["iterations"] >= 3


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("single batches", ["train_on_batch", "servers lease", 'mode="hybrid"']),
        ("weights after a batch", ["changed weights after a batch", "on_epoch_end"]),
        ("get_weights after a batch", ["get_weights", "parameter servers", "on_epoch_end"]),
    ],
)
def test_what_servers_cannot_do_after_a_batch_is_refused(tmp_path: Path, case: str, parts: list[str]) -> None:
    run(tmp_path, sys.executable, str(SERVED), case, "ours")
    for rank in (0, 1):
        said = json.loads((tmp_path / f"ours.{rank}").read_text())["error"]
        assert all(part in said for part in parts), said


def test_another_backend_is_refused_before_anything_is_made() -> None:
    code = "from manyhands.compat.keras import scope\nwith scope(): print('made')"
    numpy_backend = {**os.environ, "KERAS_BACKEND": "numpy"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=numpy_backend, capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode != 0
    assert "A scope needs Keras on the torch backend" in done.stderr  # this one's own packages are not installed
    assert "KERAS_BACKEND=torch" in done.stderr
    assert "made" not in done.stdout
