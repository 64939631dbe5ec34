"""The articles' programs and flows: the index is whole, every file has its form, and every file runs.

A few run under `mh run -n 2` in `make test`, in forked processes; all of them in long tests, by their own command.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.forked_commands import PROGRAM

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "articles"
FILES = sorted(FOLDER.glob("article_*/*.py"))
FLOWS = [path for path in FILES if path.stem.endswith("_flow")]
DUE = {"create_transfer_graph", "fine_tune_graph", "faster_rcnn_flow"}
OTHER_LIBRARIES = {"keras", "numpy", "torch"}
PUBLIC = {"manyhands", "manyhands.distribute", "manyhands.compat.keras", "manyhands.distribute.experimental"}
"""What the documentation has users import."""
CHINESE = re.compile("[\u4e00-\u9fff]")

SAID = {
    "all_reduce_flow": "5. It is what one process computes from all rows",
    "autocast_grad_scaler": "the layer computed in torch.float16 and its weights are torch.float32",
    "balance_flow": "Divided(step=",
    "bf16_flow": "34312 bytes become 17156",
    "central_storage": "what a lost host leaves is central-3.keras",
    "cluster_and_worker": "w is [200.0, 200.0, 200.0] after 200 calls",
    "cluster_session": "bias: /job:ps/task:1/device:CPU:0",
    "data_and_model_mesh": "2 workers, 1348 parameters in all",
    "data_loader": "epoch 2 ends at step 15, loss",
    "data_parallel_flow": "StepDone(step=6, total_steps=6, loss=",
    "distribute_dataset_loop": "epoch 2: 5 steps, 10 of 20 rows on replica 0",
    "distributed_data_parallel": "epoch 2, 2 processes, loss",
    "fault_flow": "joined",
    "fp16_flow": "skipped",
    "ftrl_clicks": "of 40 weights are exactly 0",
    "keras_compile_fit": "val_accuracy [",
    "layers_over_workers_flow": "RunStarted(strategy=pipeline, workers=2, slices=4)",
    "mirrored_dataset_function": "epoch 2, 2 replicas, loss",
    "mirrored_devices_reduce": "epoch 2, 2 replicas, loss of the last batch",
    "mixed_float16_policy": "computes in float16, weights in float32: LossScaleOptimizer",
    "model_parallel_flow": "parameters here: [(128, 64), (128,), (16, 128), (16,)]",
    "monitored_session_hooks": "20 steps, loss",
    "multi_gpu_model": "between one process in two parts and two workers",
    "multi_worker_tf_config": "of 2 replicas",
    "parameter_server_flow": "staleness=1)",
    "pipeline_branches": "pipeline.svg",
    "reduce_grad_optimizer": "reduce_grad was called 20 times in 20 steps",
    "session_flow": "CheckpointSaved(step=12",
    "several_tasks_flow": "evaluate",
    "sync_replicas_session": "step 10 of 2 workers",
}
"""What each prints that shows that it did its work."""

QUICK = ["reduce_grad_optimizer", "data_parallel_flow"]


class Row(NamedTuple):
    article: str
    kind: str
    path: str
    command: str


def rows(index: str) -> list[Row]:
    cells = [line.strip("|").split("|") for line in (FOLDER / index).read_text().splitlines() if line.startswith("| 0")]
    found = []
    for article, kind, _, file, command, _ in cells:
        path = re.search(r"article_\d+/\w+\.py", file)
        assert path is not None, file
        words = kind.strip().strip("[").partition("]")[0]
        found.append(Row(article.strip(), words, path[0], command.strip().strip("`")))
    return found


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("index", ["README.md", "README.zh.md"])
def test_the_index_has_33_entries_and_each_is_a_file_or_due(index: str) -> None:
    found = rows(index)
    kinds = [row.kind for row in found]
    english = ["program", "lost listing", "flow"]
    names = english if index == "README.md" else ["程序", "丢失的代码", "流程"]
    assert [kinds.count(name) for name in names] == [18, 3, 12]
    assert len({row.path for row in found}) == 33
    there = {str(path.relative_to(FOLDER)) for path in FILES}
    due = {row.path for row in found if row.command in ("due", "待完成")}
    assert {Path(path).stem for path in due} == DUE
    assert {row.path for row in found} == there | due and not there & due
    assert all(row.path.startswith(f"article_{row.article}/") for row in found)
    assert all(row.command.endswith(f"examples/articles/{row.path}") for row in found if row.path not in due)


def test_both_indexes_have_the_same_rows() -> None:
    english, chinese = rows("README.md"), rows("README.zh.md")
    assert [(row.article, row.path) for row in english] == [(row.article, row.path) for row in chinese]
    assert [row.command for row in english if row.command != "due"] == [
        row.command for row in chinese if row.command != "待完成"
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_has_a_head_in_both_languages_is_short_and_imports_public_names(path: Path) -> None:
    head = ast.get_docstring(ast.parse(path.read_text())) or ""
    number = path.parent.name.removeprefix("article_")
    paragraphs = head.split("\n\n")
    assert paragraphs[0].startswith(f"Article {number}, ")
    assert any(one.startswith(f"文章 {number} ") for one in paragraphs)
    languages = [bool(CHINESE.search(one)) for one in paragraphs]
    assert languages == sorted(languages) and languages.count(False) >= 2 and languages.count(True) >= 2
    assert len(path.read_text().splitlines()) <= 60
    allowed = PUBLIC | OTHER_LIBRARIES | {"flow_record"} | set(sys.stdlib_module_names)
    found = imported(path)
    assert all(name in allowed or name.split(".")[0] in {*OTHER_LIBRARIES, *sys.stdlib_module_names} for name in found)


TENSORFLOW_2 = {
    "central_storage",
    "distribute_dataset_loop",
    "keras_compile_fit",
    "mirrored_dataset_function",
    "mirrored_devices_reduce",
    "mixed_float16_policy",
    "multi_worker_tf_config",
}
"""The programs that TensorFlow 2 has, in Keras: they say that only their imports are changed."""
TF_NAMES = {
    *("CentralStorageStrategy", "MirroredStrategy", "MultiWorkerMirroredStrategy", "GradientTape", "ReduceOp"),
    *("function", "compute_average_loss", "mixed_precision", "Dataset"),  # of tf, tf.nn, tf.keras and tf.data
}
TF_STRATEGY = {
    *("scope", "run", "reduce", "experimental_distribute_dataset", "num_replicas_in_sync"),
    "experimental_distribute_datasets_from_function",
}
TF_OPTIONS = {"devices", "compute_devices", "parameter_device", "cluster_resolver"}


@pytest.mark.parametrize("name", sorted(TENSORFLOW_2))
def test_a_tensorflow_2_program_uses_tensorflows_names_only(name: str) -> None:
    [path] = [path for path in FILES if path.stem == name]
    program = ast.parse(path.read_text())
    ours = {
        alias.asname or alias.name
        for node in ast.walk(program)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).startswith("manyhands")
    }
    modules, taken = {"mh", "tf_distribute"} & ours, ours - {"mh", "tf_distribute"}
    assert ours and taken <= TF_NAMES
    for node in ast.walk(program):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            allowed = TF_NAMES if node.value.id in modules else TF_STRATEGY if node.value.id == "strategy" else None
            assert allowed is None or node.attr in allowed, f"{node.value.id}.{node.attr}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Strategy"):
            assert {one.arg for one in node.keywords} <= TF_OPTIONS
    head = ast.get_docstring(program) or ""
    assert "only the imports are changed" in head.replace("\n", " ").lower() and "只改了 import" in head.replace(
        "\n", ""
    )


def test_what_each_prints_is_known() -> None:
    assert SAID.keys() == {path.stem for path in FILES}
    assert all(len(list(folder.iterdir())) <= 20 for folder in FOLDER.glob("article_*"))


def steps_of(flow: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    return list(runpy.run_path(str(flow))["FLOW"].steps)


@pytest.mark.parametrize("flow", FLOWS, ids=lambda path: path.stem)
def test_the_pages_of_a_flow_have_its_steps_its_script_and_its_figure(
    flow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = importlib.import_module("tools.article_pages")
    steps = steps_of(flow, monkeypatch)
    seen = []
    for index, language in enumerate((pages.ENGLISH_PAGE, pages.CHINESE_PAGE)):
        page = ROOT / language.folder / f"{flow.stem}.md"
        text = page.read_text()
        table = [
            [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")
        ]
        numbered = [(row[0], row[1]) for row in table[1:] if row[0]]
        assert numbered == [(str(number), step[index]) for number, step in enumerate(steps, 1)], "write the pages anew"
        title, about = pages.head(flow, index)
        assert text.startswith(f"# {title}\n\n{about}\n"), "write the pages anew"
        links = re.findall(r"\]\(([^)]+)\)", text)
        assert [(page.parent / link).resolve() for link in links] == [
            ROOT / "docs" / "articles" / "figures" / f"{flow.stem}.svg",
            flow,
        ]
        seen.append([row[2:] for row in table[1:]])
    assert seen[0] == seen[1], "both pages are of the same run"
    figure = ElementTree.parse(ROOT / "docs" / "articles" / "figures" / f"{flow.stem}.svg").getroot()
    drawn = "".join(figure.itertext())
    assert all(f"{number} " in drawn for number in range(1, len(steps) + 1))


def test_there_are_no_pages_of_other_flows() -> None:
    stems = {flow.stem for flow in FLOWS}
    for folder, ending in (("docs/articles", "md"), ("docs/zh/articles", "md"), ("docs/articles/figures", "svg")):
        assert {path.stem for path in (ROOT / folder).glob(f"*.{ending}")} == stems


def script(name: str) -> Path:
    [path] = [path for path in FILES if path.stem == name]
    return path


def run(command: list[str], folder: Path) -> str:
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("MANYHANDS_", "PET_"))}
    environment |= {"PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_program_and_a_flow_run_on_two_workers(name: str, tmp_path: Path) -> None:
    output = run([*PROGRAM, "run", "-n", "2", str(script(name))], tmp_path)
    assert SAID[name] in output
    if name in {flow.stem for flow in FLOWS}:
        [record] = [json.loads(path.read_text()) for path in tmp_path.rglob("flow.json")]
        assert {one["step"] for one in record["seen"]} == set(range(1, len(record["steps"]) + 1))
        assert {one["lane"] for one in record["seen"]} == {"worker 0", "worker 1", "record"}
        [figure] = tmp_path.rglob("flow.svg")
        assert ElementTree.parse(figure).getroot().tag.endswith("svg")


RUN = [row for row in rows("README.md") if row.command != "due"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("row", RUN, ids=lambda row: Path(row.path).stem)
def test_every_file_runs_by_the_command_of_the_index(row: Row, tmp_path: Path) -> None:
    """In an empty directory, with the `mh` and the `python` that a user has."""
    first, *rest = row.command.split()
    words = [str(ROOT / word) if word.endswith(".py") else word for word in rest]
    output = run([str(Path(sys.executable).with_name(first)), *words], tmp_path)
    assert SAID[Path(row.path).stem] in output


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("row", RUN, ids=lambda row: Path(row.path).stem)
def test_every_file_runs_on_two_workers(row: Row, tmp_path: Path) -> None:
    words = row.command.split()[1:-1] if row.command.startswith("mh ") else ["run", "-n", "2"]
    run([*PROGRAM, *words, str(FOLDER / row.path)], tmp_path)
