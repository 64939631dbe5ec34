"""The wheel holds everything: installed apart from the checkout, it trains."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_wheel_builds_installs_and_trains_away_from_the_checkout(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # Only git's files: a stale build directory must not lend a hand.
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    source = tmp_path / "source"
    for name in filter(None, listed.decode().split("\0")):
        if not name.startswith(("tests/", "bench/")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, timeout=100)
    (wheel,) = tmp_path.glob("manyhands-*.whl")
    installed = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True, timeout=100)
    # -S leaves out this environment's own, editable manyhands; its other packages come by path, behind the wheel.
    path = [str(installed), sysconfig.get_paths()["purelib"]]
    program = f"import sys; sys.path[:0] = {path!r}\n" + PROGRAM
    ended = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    assert str(installed) in ended.stdout
    assert (tmp_path / "model.safetensors").exists()


PROGRAM = """
import torch, manyhands as mh
print(mh.__file__)
trainer = mh.Trainer(
    torch.nn.Linear(4, 1),
    lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
    lambda params: torch.optim.SGD(params, lr=0.1),
)
trainer.fit((torch.randn(64, 4), torch.randn(64, 1)), steps=3, batch_size=16)
trainer.save("model.safetensors")
"""
