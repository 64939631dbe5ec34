"""The wheel holds everything: installed apart from the checkout, it trains."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def install(folder: Path, compiler: str | None = None) -> Path:
    """A wheel of git's files, built and installed below `folder`: a stale build directory must not lend a hand."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    source = folder / "source"
    for name in filter(None, listed.decode().split("\0")):
        if not name.startswith(("tests/", "bench/")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    environment = {**os.environ, **({"CC": compiler} if compiler else {})}
    subprocess.run(build, check=True, timeout=100, env=environment, stderr=subprocess.DEVNULL if compiler else None)
    (wheel,) = folder.glob("manyhands-*.whl")
    installed = folder / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True, timeout=100)
    return installed


@pytest.mark.slow
def test_the_wheel_builds_installs_and_trains_away_from_the_checkout(tmp_path: Path) -> None:
    installed = install(tmp_path)
    # -S leaves out this environment's own, editable manyhands; its other packages come by path, behind the wheel.
    path = [str(installed), sysconfig.get_paths()["purelib"]]
    program = f"import sys; sys.path[:0] = {path!r}\n" + PROGRAM
    ended = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    assert str(installed) in ended.stdout
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.long
def test_without_a_compiler_it_installs_says_so_and_trains_over_gloo_as_well(tmp_path: Path) -> None:
    installed = install(tmp_path, compiler="/bin/false")
    assert not list(installed.glob("manyhands/native/*.so"))
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        # -P: the directory that it is called in, which has the sources, stays out of the way.
        words = (sys.executable, "-P", "-m", *words)
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)

    checked = subprocess.run(
        [sys.executable, "-P", "-c", "from manyhands.runtime.checkup import native; print(native())"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "the C extension is not built" in checked.stdout and "'warn'" in checked.stdout
    (tmp_path / "train.py").write_text(PROGRAM)
    trained = run("manyhands.cli.main", "run", "-n", "2", "train.py")
    assert trained.returncode == 0, trained.stderr
    assert str(installed) in trained.stdout
    assert "workers talk over Gloo (the C extension is not built" in trained.stderr
    words = ("pytest", "-q", "-n", "0", "-o", "pythonpath=", "-p", "no:cacheprovider", "--rootdir", str(ROOT))
    equal = run(*words, "-k", "AdamW or (exact and plain) or clipping", f"{ROOT}/tests/runtime/test_equivalence.py")
    assert equal.returncode == 0, equal.stdout
    assert "3 passed" in equal.stdout


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
