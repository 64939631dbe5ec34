"""Tuning of real trainings: what it measures is there, and what the script does after its training never happens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TRAINER = """
import os
import torch
import manyhands as mh

def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

if __name__ == "__main__":
    torch.manual_seed(0)
    data = torch.randn(64, 4), torch.randn(64, 1)
    trainer = mh.Trainer(
        torch.nn.Linear(4, 1), loss, lambda params: torch.optim.SGD(params, lr=0.1), run_dir="mine",
        exact=True, tune=True,
    )
    trainer.save(f"{os.getpid()}.before.safetensors")
    try:
        trainer.fit(data, steps=60, batch_size=16, checkpoint=mh.Checkpoints(every_steps=1))
    finally:
        trainer.save(f"{os.getpid()}.after.safetensors")
        open(f"{os.getpid()}.went-on", "w").close()
    print("trained", trainer.step)
"""
OWN_LOOP = """
import torch
import manyhands as mh

hands = mh.join(run_dir="mine", slices=2)
model = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
model, optimizer = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for batch in hands.batches((torch.randn(64, 4), torch.randn(64, 1)), batch_size=16, epochs=100):
    hands.backward(torch.nn.functional.mse_loss(model(batch[0]), batch[1]))
    hands.step()
    if hands.stepped and hands.every(30):
        break
open("went on", "w").close()
"""


def run(folder: Path, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    (folder / "temporary").mkdir()
    environ = {
        **os.environ,
        "TMPDIR": str(folder / "temporary"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **variables,
    }
    command = [sys.executable, *words, "train.py"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)


def left_in(folder: Path) -> set[str]:
    assert not list((folder / "temporary").glob("manyhands-trial-*"))
    return {path.name.partition(".")[2] or path.name for path in folder.iterdir()} - {"py", "temporary"}


@pytest.mark.long
def test_trials_measure_a_loop_of_ones_own_and_leave_nothing_of_it(tmp_path: Path) -> None:
    pinned = ("--threads", "1", "--memory-format", "contiguous", "--allocator", "keep")
    tune = ("-m", "manyhands.cli.main", "tune", "-n", "2", "--seconds", "0.1", *pinned, "--json")
    done = run(tmp_path, OWN_LOOP, *tune)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["ground"]["depends_on_slices"] == "dropout" and printed["ground"]["slices_given"]
    first, second = printed["results"][:2]
    assert [(one["trial"]["workers"], one["measured"]["slices"]) for one in (first, second)] == [(1, 2), (2, 2)]
    assert first["measured"]["rows"] == second["measured"]["rows"] == 16
    assert all(one["measured"]["rows_per_s"] > 0 for one in printed["results"])
    assert left_in(tmp_path) == set()


@pytest.mark.long
def test_a_script_tunes_itself_and_trains_with_the_choice(tmp_path: Path) -> None:
    """An exact run of one slice: all there is to try is the allocator, and the bits stay the same.

    Where other programs make two measurements of one setting differ too much, nothing is chosen: the default trains.
    """
    done = run(tmp_path, TRAINER, MANYHANDS_VERBOSE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained 60\n"
    assert len(re.findall(r"^1 +1 +1 +contiguous +(?:keep|system) +fp32 +\d", done.stderr, re.M)) in (2, 3)
    chosen = re.search(r"^chosen: 1 worker x 1 thread, contiguous, (keep|system), fp32", done.stderr, re.M)
    assert chosen or "\ntoo noisy, try again: " in done.stderr
    kept = {"keep": "freed memory kept", "system": "system allocator"}[chosen[1] if chosen else "keep"]
    assert f"\nmirrored, V=1, fp32, 1 thread each, cpu, contiguous memory, {kept}" in done.stderr
    assert left_in(tmp_path) == {"mine", "before.safetensors", "after.safetensors", "went-on"}
    assert len(list(tmp_path.glob("*.safetensors"))) == 2, "a trial saved something"
    assert len(list(tmp_path.glob("*.went-on"))) == 1, "a trial went on after its training"
