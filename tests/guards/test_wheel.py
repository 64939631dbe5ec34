"""The wheel is complete: installed outside of the checkout, it trains. The source distribution has the rest."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def listed() -> list[str]:
    """The files that git tracks."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [name for name in names.decode().split("\0") if name and (ROOT / name).is_file()]


def copy(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    """Copy git's files below `folder`, so that a stale build directory cannot help the build."""
    source = folder / "source"
    for name in listed():
        if not name.startswith(without):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    return source


def install(folder: Path, compiler: str | None = None) -> Path:
    """A wheel of git's files, built and installed below `folder`."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = copy(folder, without=("tests/", "bench/"))
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    environment = {**os.environ, **({"CC": compiler} if compiler else {})}
    subprocess.run(build, check=True, timeout=100, env=environment, stderr=subprocess.DEVNULL if compiler else None)
    (wheel,) = folder.glob("manyhands-*.whl")
    installed = folder / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True, timeout=100)
    return installed


@pytest.mark.long
@pytest.mark.slow
def test_the_wheel_builds_installs_and_trains_away_from_the_checkout(tmp_path: Path) -> None:
    installed = install(tmp_path)
    # -S leaves out this environment's editable manyhands; its other packages follow the wheel in the path.
    path = [str(installed), *(path for path in sys.path if path.endswith("site-packages"))]
    program = f"import sys; sys.path[:0] = {path!r}\n" + PROGRAM
    ended = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    assert str(installed) in ended.stdout
    assert (tmp_path / "model.safetensors").exists()
    (wheel,) = tmp_path.glob("manyhands-*.whl")
    check_contents(wheel)


def check_contents(wheel: Path) -> None:
    """No C sources, and a description without relative links: a package index has no files that they could point to."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        about = email.message_from_bytes(archive.read(metadata))
    assert not [name for name in names if name.endswith((".c", ".h"))]
    assert "manyhands/py.typed" in names
    assert {"manyhands/recipes/digits.npz", "manyhands/recipes/digits-licence.txt"} <= set(names)
    text = about.get_payload()
    assert "# manyhands" in text and about["Description-Content-Type"] == "text/markdown"
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith(("https://", "#"))] == []
    assert about["Author"] == "manyhands developers" and about["Keywords"]
    assert "Programming Language :: Python :: 3.11" in about.get_all("Classifier")


@pytest.mark.slow
@pytest.mark.long
def test_the_source_distribution_has_docs_tests_and_all_that_a_wheel_is_made_of(tmp_path: Path) -> None:
    source = copy(tmp_path)
    made = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "sdist"], cwd=source, capture_output=True, text=True, timeout=100
    )
    assert made.returncode == 0, made.stderr
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    assert {name for name in listed() if not name.startswith(".")} - packed == set()


@pytest.mark.slow
@pytest.mark.long
def test_without_a_compiler_it_installs_says_so_and_trains_over_gloo_as_well(tmp_path: Path) -> None:
    installed = install(tmp_path, compiler="/bin/false")
    assert not list(installed.glob("manyhands/native/*.so"))
    # A fork of this process would have imported the package from the sources.
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "tests").symlink_to(ROOT / "tests")
    environment = {**os.environ, "PYTHONPATH": f"{installed}:{tmp_path}/sources", "FORK_COMMANDS": "0"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        # -P: the current directory, which has the sources, is not on the path.
        words = (sys.executable, "-P", "-m", *words)
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)

    checked = subprocess.run(
        [sys.executable, "-P", "-c", "from manyhands.launcher.machine_check import native; print(native())"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "the C extension is not built" in checked.stdout and "'warn'" in checked.stdout
    (tmp_path / "train.py").write_text(PROGRAM)
    trained = run("manyhands.cli.main", "run", "-n", "2", "train.py")
    assert trained.returncode == 0, trained.stderr
    assert str(installed) in trained.stdout
    assert "workers talk over Gloo (the C extension is not built" in trained.stderr
    words = ("pytest", "-q", "-n", "0", "-o", "pythonpath=", "-p", "no:cacheprovider", "--rootdir", str(ROOT))
    chosen = ("-m", "long or not long", "-k", "AdamW or (exact and plain) or clipping")
    equal = run(*words, *chosen, f"{ROOT}/tests/strategies/test_equivalence.py")
    assert equal.returncode == 0, equal.stdout
    assert "3 passed" in equal.stdout


def test_the_container_has_the_torch_that_the_tests_ran_with() -> None:
    (named,) = re.findall(r"\btorch==\S+", (ROOT / "Dockerfile").read_text())
    assert named in (ROOT / "constraints.txt").read_text().split()
    copied = re.findall(r"^COPY (?!--from)(\S+)", (ROOT / "Dockerfile").read_text(), re.M)
    assert all((ROOT / name).exists() for name in copied)


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
