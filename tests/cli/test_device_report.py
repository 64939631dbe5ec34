"""`mh doctor --gpu`: what it runs, what it says of it, and the whole of it on the CPU, where it has to agree too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from manyhands.cli.machine.device_report import Compared, DeviceReport, MachineFacts, examine_devices, layouts, text_of
from manyhands.cli.machine.doctor import doctor
from manyhands.errors import EnvironmentProblem, UsageError
from manyhands.strategies.registry import STRATEGIES

CARDS = ["a card, 24 GB"]
HERE = MachineFacts(
    manyhands="0.1.0", python="3.11.7", torch="2.13.0", cuda="13.0", nccl="2.28", system="Linux", devices=CARDS
)


def report(*compared: Compared, speed: tuple[Compared, ...] = (), not_run: tuple[str, ...] = ()) -> DeviceReport:
    return DeviceReport(machine=HERE, compared=list(compared), speed=list(speed), not_run=list(not_run), seconds=100.0)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_strategy_there_is_has_a_layout_that_can_be_made(workers: int) -> None:
    tried = {STRATEGIES[one.strategy].settings(**one.settings).name for one in layouts(workers, "cpu")}
    assert tried == set(STRATEGIES) - {"single"}  # what is compared with


def test_on_two_cards_the_one_that_needs_shared_memory_is_left_out() -> None:
    left_out = {one.name for one in layouts(2, "cpu")} - {one.name for one in layouts(2, "cuda")}
    assert left_out == {"central_storage"}
    assert layouts(1, "cuda") == layouts(1, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT SHOWN HERE: there is a card")
def test_without_a_card_it_says_so_and_ends_with_3() -> None:
    done = CliRunner().invoke(doctor, ["--gpu"])
    assert isinstance(done.exception, EnvironmentProblem)
    assert done.exception.exit_code == 3
    assert "There is no CUDA device here" in str(done.exception)


def test_an_unknown_strategy_and_options_without_gpu_are_refused() -> None:
    with pytest.raises(UsageError, match="No layout is called mirored"):
        examine_devices("cpu", ["mirored"], print)
    refused = CliRunner().invoke(doctor, ["--device", "cpu"])
    assert isinstance(refused.exception, UsageError)


def test_the_report_shows_what_agrees_what_deviates_and_why_something_failed() -> None:
    same = Compared(layout="mirrored", workers=2, weights=1e-7, rows_per_s=1234.0, peak_bytes=50_000_000)
    other = Compared(layout="tensor", workers=2, weights=0.5, rows_per_s=10.0)
    broken = Compared(layout="mesh data", workers=2, failed="NCCL error: unhandled system error")
    found = report(same, other, broken, speed=(same,), not_run=("local_sgd",))
    text = text_of(found)
    assert "| mirrored | 2 | same | 1.0e-07 | 1,234 | 50 MB |" in text
    assert "| tensor | 2 | DEVIATES | 5.0e-01 | 10 | - |" in text
    assert "| mesh data | 2 | FAILED | - | FAILED | - |" in text
    assert "- mesh data: NCCL error: unhandled system error" in text
    assert "not run, for lack of time: local_sgd" in text
    assert "1 of 3 end with the weights of one process" in text
    assert "a card, 24 GB" in text and "NCCL 2.28" in text
    averaged = Compared(layout="local_sgd", workers=2, weights=0.5, is_alike=False)
    assert not found.is_fine and report(same, averaged).is_fine
    assert "| local_sgd | 2 | runs |" in text_of(report(averaged))


def test_weights_that_are_not_numbers_are_no_agreement() -> None:
    assert Compared(layout="tensor", workers=2, weights=float("inf")).verdict == "DEVIATES"
    assert Compared(layout="tensor", workers=2, weights=float("nan")).verdict == "DEVIATES"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_on_the_cpu_every_strategy_ends_where_one_process_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "manyhands.cli.main", "doctor", "--gpu", "--device", "cpu", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [one["layout"] for one in found["compared"]] == [layout.name for layout in layouts(2, "cpu")]
    assert all(one["weights"] < 1e-4 for one in found["compared"] if one["is_alike"])
    assert all(one["rows_per_s"] > 0 for one in found["compared"])
    assert [one["layout"] for one in found["speed"]] == ["mh.Mirrored", "DistributedDataParallel"]
    assert all(one["rows_per_s"] > 0 for one in found["speed"])
    ours, theirs = ((one["slices"], one["threads"]) for one in found["speed"])
    assert ours == theirs and ours[0] == 2, "the same passes and threads, or the speeds cannot be compared"
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"
