"""The programs in examples/: they do what their heads say, on one worker and on two.

The cheap tests call an example's `main` on small data, on warm workers. The long ones run each as a user does.
"""

from __future__ import annotations

import ast
import importlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import manyhands
from manyhands.native import why_not
from manyhands.testing import RankPool

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
INDEXES = ("README.md", "README.zh.md")
MH = [sys.executable, "-m", "manyhands.cli.main"]

# Arguments for small data.
SMALL = {
    "breast_cancer": ["--epochs", "1"],
    "character_gpt": ["--steps", "12", "--block", "16", "--layers", "1", "--width", "32"],
    "gan": ["--rows", "2600", "--epochs", "2", "--width", "16"],
    "image_classification": ["--epochs", "2", "--width", "4", "--limit", "64"],
    "rare_positives": ["--rows", "4000", "--epochs", "2"],
    "recommender": ["--rows", "3000", "--epochs", "1"],
    "regression": ["--rows", "800", "--epochs", "2"],
    "sensor_series": ["--hours", "600", "--epochs", "1"],
    "tabular_linear": ["--rows", "2500", "--epochs", "1"],
    "text_classification": ["--rows", "400", "--epochs", "1"],
}
# Warm ranks may not start the loader processes that this one has.
LOADS = "image_classification"
# Its scikit-learn takes longer to import than the others take to train.
QUICK = [name for name in SMALL if name not in ("breast_cancer", LOADS)]
EXACT = ["breast_cancer", "regression"]
# Its last line is what the model wrote, which differs where torch rounds differently.
WRITES = "character_gpt"

without_shared_memory = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")


def head(name: str) -> str:
    return ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""


def expected(name: str) -> list[str]:
    """The lines that the head says are printed."""
    return [line.strip() for line in head(name).split("Expected output:")[1].split("\n\n")[1].splitlines()]


def alternatives(name: str) -> list[str]:
    return re.findall(r"`(strategy=[^`]+)`", " ".join(head(name).split()))


def small(name: str, folder: Path) -> list[str]:
    if name != LOADS:
        return SMALL[name]
    image = pytest.importorskip("PIL.Image", reason="NOT SHOWN HERE: no pillow")
    for number in range(96):
        place = folder / "pictures" / ("test" if number % 3 == 0 else "train") / ("dark", "light")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (40, 36), (40 + number + 100 * (number % 2),) * 3).save(place / f"{number}.jpg")
    return [*SMALL[name], "--data", str(folder / "pictures")]


def run_example(name: str, arguments: list[str]) -> dict[str, float]:
    """On a rank."""
    results: dict[str, float] = importlib.import_module(f"examples.{name}").main(arguments)
    return results


def check_one_and_two_workers(name: str, ranks: RankPool, folder: Path, *more: str) -> None:
    arguments = [*small(name, folder), *more]
    # Warm ranks have no parameter servers; the long tests below run those.
    flags = {"train.strategy": "mirrored"}
    (alone,) = ranks(1, run_example, name, arguments, flags=flags)
    assert alone and all(math.isfinite(value) for value in alone.values()), alone
    for one in ranks(2, run_example, name, arguments, flags=flags):
        assert one == (alone if name in EXACT else pytest.approx(alone, rel=1e-3, abs=1e-4))


def test_every_example_is_in_both_indexes_and_has_its_small_data_here() -> None:
    assert sorted(SMALL) == NAMES
    assert len(list(FOLDER.iterdir())) <= 20
    for index in INDEXES:
        text = (FOLDER / index).read_text()
        rows = re.findall(r"^\| \[(\w+)\.py\]\((\w+)\.py\) \|", text, re.M)
        assert sorted(first for first, _ in rows) == NAMES, index
        assert all(first == second for first, second in rows)
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            assert link.startswith(("http", "articles/")) or (FOLDER / link).exists(), f"{index}: {link}"


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_its_head_and_uses_public_names_only(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    for part in (f"python examples/{name}.py", f"mh run -n 2 examples/{name}.py", "Strategies that make sense"):
        assert part in head(name), part
    in_chinese = [part for part in head(name).split("\n\n") if re.search("[\u4e00-\u9fff]", part)]
    assert len(in_chinese) >= 2, "a head in both languages"
    assert len(expected(name)) >= 2
    assert alternatives(name), "the one line to change, in backticks"
    assert text.count(default_strategy(text)) == 1, "one line decides on the strategy"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("manyhands"), node.module
        if isinstance(node, ast.Import):
            for one in node.names:
                assert not one.name.startswith("manyhands") or (one.name, one.asname) == ("manyhands", "mh")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mh":
            assert node.attr in manyhands.__all__, f"mh.{node.attr}"


def default_strategy(text: str) -> str:
    found = re.search(r'strategy=("mirrored"|mh\.ParameterServer\(servers=1, mode="sync"\)),', text.split('"""', 2)[2])
    assert found, "a line with strategy="
    return found[0]


@without_shared_memory
@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_one_and_two_workers_print_the_same_figures(name: str, ranks: RankPool, tmp_path: Path) -> None:
    check_one_and_two_workers(name, ranks, tmp_path)


@without_shared_memory
@pytest.mark.long
def test_a_cross_validation_has_the_same_figures_too(ranks: RankPool, tmp_path: Path) -> None:
    check_one_and_two_workers("breast_cancer", ranks, tmp_path)


@pytest.mark.long
def test_loader_processes_augment_alike_on_one_and_two_workers(tmp_path: Path) -> None:
    program = [str(FOLDER / f"{LOADS}.py"), *small(LOADS, tmp_path)]
    alone = command([*MH, "run", "--threads", "1", *program], tmp_path)
    assert command([*MH, "run", "-n", "2", "--threads", "1", *program], tmp_path) == alone


@without_shared_memory
@pytest.mark.long
@pytest.mark.parametrize("model", ["lstm", "bert"])
def test_the_other_text_models_too(model: str, ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="NOT SHOWN HERE: no transformers")
    check_one_and_two_workers("text_classification", ranks, tmp_path, "--model", model)


def command(words: list[str], folder: Path, *, code: int = 0) -> list[str]:
    """The lines that a user's command prints to standard output."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stderr[-3000:]
    return [line.strip() for line in done.stdout.splitlines()]


def examples_beside(folder: Path) -> None:
    shutil.copytree(FOLDER, folder / "examples", ignore=shutil.ignore_patterns("articles", "__pycache__"))


NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def check_printed(name: str, lines: list[str]) -> None:
    """The words of the head, and its numbers but for what another processor's rounding may do to a training."""
    wanted = expected(name)
    if name == WRITES:
        wanted, lines = wanted[:-1], lines[: len(wanted) - 1]
    assert [NUMBER.sub("#", line) for line in lines] == [NUMBER.sub("#", line) for line in wanted]
    for line, other in zip(lines, wanted, strict=True):
        for number, known in zip(NUMBER.findall(line), NUMBER.findall(other), strict=True):
            assert float(number) == pytest.approx(float(known), rel=0.1, abs=0.03), f"{line}\n{other}"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_both_commands_of_the_head_print_what_the_head_says(name: str, tmp_path: Path) -> None:
    examples_beside(tmp_path)
    alone = command([sys.executable, f"examples/{name}.py"], tmp_path)
    check_printed(name, alone)
    together = command([*MH, "run", "-n", "2", f"examples/{name}.py"], tmp_path)
    check_printed(name, together)
    if name in EXACT:
        assert together == alone


@pytest.mark.long
@pytest.mark.parametrize(("name", "strategy"), [(name, one) for name in NAMES for one in alternatives(name)])
def test_the_other_strategies_of_the_head_work(name: str, strategy: str, tmp_path: Path) -> None:
    examples_beside(tmp_path)
    path = tmp_path / "examples" / f"{name}.py"
    text = path.read_text()
    path.write_text(text.replace(default_strategy(text), f"{strategy},"))
    workers = [] if "workers=" in strategy or strategy == 'strategy="single"' else ["-n", "2"]
    arguments = small(name, tmp_path)
    lines = command([*MH, "run", *workers, str(path), *arguments], tmp_path)
    assert len(lines) >= 2, lines
    if "mh.ParameterServer(" in strategy and "async" not in strategy:
        assert lines == command([*MH, "run", str(FOLDER / f"{name}.py"), *arguments], tmp_path), (
            "servers change nothing"
        )


@pytest.mark.long
@pytest.mark.parametrize("model", ["cnn", "lstm", "bert"])
def test_text_models_train_on_parameter_servers_by_flags(model: str, tmp_path: Path) -> None:
    program = [str(FOLDER / "text_classification.py"), "--model", model, *SMALL["text_classification"]]
    flags = ["-n", "2", "--strategy", "parameter_server", "--servers", "1"]
    first, second = command([*MH, "run", *flags, *program], tmp_path)
    assert re.fullmatch(rf"{model}: [01]\.\d+ of 100 test sentences right", first)
    assert second == "counting words 0.4900, always the commoner class 0.5200"


@pytest.mark.long
@pytest.mark.faults
def test_a_cross_validation_that_was_killed_resumes_in_its_training_on_other_workers(tmp_path: Path) -> None:
    program = str(FOLDER / "breast_cancer.py")
    undisturbed = command([*MH, "run", program], tmp_path)
    start = [*MH, "run", "--run-dir", "run", "--ui", "none"]
    process = subprocess.Popen([*start, "-n", "2", program], cwd=tmp_path, start_new_session=True)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("run/trainings/3/checkpoints/step-*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)  # the agent; its workers end with it
    process.wait()
    assert command([*start, program], tmp_path) == undisturbed


@pytest.mark.parametrize(
    ("name", "table", "arguments"),
    [
        ("regression", "a,b,c\n" + "".join(f"{n},{n % 7},{2 * n + n % 7}\n" for n in range(60)), ["--epochs", "2"]),
        ("tabular_linear", "x,y,z\n" + "".join(f"u{n % 5},v{n % 3},{n % 2}\n" for n in range(80)), ["--epochs", "1"]),
    ],
)
@without_shared_memory
def test_a_table_of_ones_own_is_read(
    name: str, table: str, arguments: list[str], ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "own.csv").write_text(table)
    flags: dict[str, Any] = {"train.strategy": "mirrored"}
    (results,) = ranks(1, run_example, name, ["--data", str(tmp_path / "own.csv"), *arguments], flags=flags)
    assert all(math.isfinite(value) for value in results.values()), results
