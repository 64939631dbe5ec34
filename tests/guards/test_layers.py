"""The rules of the source tree: order of imports, forbidden code, docstrings, public names."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import manyhands

PACKAGE = Path(manyhands.__file__).parent
ROOT = PACKAGE.parent
# A package imports only from those above it. The longest matching name counts: `control.agent`, then `control`.
ORDER = [
    "errors", "supported", "exact_json", "private_files", "signals", "torch_private", "events",
    "lazy_names", "optim.ftrl",
    "native", "spec",
    "comm", "data", "order", "images", "checkpoint",
    "parallel.model", "parallel.averaging", "parallel.gradients", "parallel.replicas", "parallel.weights",
    "parallel.tensor", "parallel.pipeline", "parallel.sharding", "parallel", "planner",
    "embedding", "optim", "nn", "parameter_server.protocol", "parameter_server.memory", "parameter_server.log",
    "parameter_server.tables", "parameter_server.server", "parameter_server.worker",
    "strategies", "parameter_server.engine",
    "control.messages", "control", "control.security", "control.membership", "control.coordinator",
    "control.session", "control.processes", "control.servers", "control.agent",
    "observe", "launcher.worker_process", "launcher.machine", "launcher.placers", "launcher", "scheduler",
    "training.worker", "training.step", "training.setup", "planner.measure", "training.state", "training.elastic",
    "profiling", "dataflow",
    "training.loop", "parameter_server.loop", "parameter_server", "trials", "training", "dispatch",
    "compat", "distribute.train", "distribute", "chaos", "recipes", "cli.common", "cli.machine", "cli.runs",
    "cli.explore", "cli.start", "cli.cluster", "cli", "testing",
]  # fmt: skip
FLOOR = {name: number for number, name in enumerate(ORDER)}

# Each of these runs code from outside, or listens on all interfaces, and is forbidden. Exceptions with reasons follow.
FORBIDDEN = re.compile(
    r"\b(pickle|cloudpickle|marshal|shelve|dill)\b\.|import (pickle|cloudpickle|marshal|shelve|dill)\b"
    r"|recv_pyobj|shell=True"
    r"|(?<![\w.])(?<!def )eval\(|(?<![\w.])exec\(|yaml\.load\(|weights_only=False|0\.0\.0\.0|mktemp\("
)
ALLOWED = {
    ("data/loader_processes.py", "import pickle"): "for the name of the exception that multiprocessing raises",
    ("data/loader_processes.py", "pickle."): "the same",
    ("spec/run.py", "0.0.0.0"): "refused there by name",
    ("spec/placement.py", "0.0.0.0"): "refused there by name",
    ("spec/addresses.py", "0.0.0.0"): "refused there by name",
}


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def home(name: str) -> str:
    """The package in `ORDER` that a dotted name below manyhands belongs to."""
    words = name.split(".")
    return next((one for end in range(len(words), 0, -1) if (one := ".".join(words[:end])) in FLOOR), "")


def imports(path: Path) -> set[str]:
    """The packages of manyhands that a file imports, also inside functions; type checking included."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {home(name.partition(".")[2]) for name in names if name.startswith("manyhands.")} - {""}
    return found


def test_imports_point_down() -> None:
    wrong = []
    for path in sources():
        own = home(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        if path.relative_to(PACKAGE).parts[0] == "testing":
            continue
        if own == "" or any(isinstance(one, ast.ImportFrom) and one.level for one in ast.walk(tree(path))):
            wrong.append(f"{path.relative_to(ROOT)}: its package is not in ORDER, or it has a relative import")
            continue
        wrong += [
            f"{path.relative_to(ROOT)}: {own} imports {o}" for o in imports(path) if o != own and FLOOR[o] > FLOOR[own]
        ]
    assert not wrong, "\n".join(wrong)


def test_the_control_plane_is_without_torch() -> None:
    """`mh status` must not take seconds, and an agent must not need what its workers need: not even through others."""
    allowed = {"manyhands.launcher.worker_process.process_settings"}
    towers = (
        "spec",
        "control",
        "observe",
        "launcher",
        "cli.main",
        "cli.common",
        "cli.runs",
        "cli.cluster",
        "planner.memory_peaks",
        "planner.step_time",
        "scheduler",
    )
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources()}
    names = {one for one in names if f"{one}.".startswith(tuple(f"manyhands.{tower}." for tower in towers))} - allowed
    code = "import importlib, sys; sys.modules['torch'] = None\nfor name in sys.argv[1:]: importlib.import_module(name)"
    command = [sys.executable, "-c", code, *sorted(names)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert len(names) > 80
    assert ended.returncode == 0, ended.stderr


def test_nothing_imports_the_testing_tools() -> None:
    guilty = [p for p in sources() if "testing" not in p.parts and "manyhands.testing" in p.read_text()]
    assert not guilty


def test_only_spec_load_reads_the_environment() -> None:
    reading = re.compile(r"os\.environ|os\.getenv|environb")
    guilty = [str(p.relative_to(PACKAGE)) for p in sources() if reading.search(p.read_text())]
    assert guilty == ["spec/load.py"]


def test_nothing_runs_code_from_outside_or_listens_to_everyone() -> None:
    found = []
    for path in sources():
        for match in FORBIDDEN.finditer(path.read_text()):
            if (path.relative_to(PACKAGE).as_posix(), match.group()) not in ALLOWED:
                found.append(f"{path.relative_to(ROOT)}: {match.group()}")
    assert not found, "\n".join(found)


def test_public_names_are_those_of_all_and_each_has_a_docstring() -> None:
    assert sorted(manyhands.__all__) == manyhands.__all__ == dir(manyhands)
    for name in manyhands.__all__:
        assert getattr(manyhands, name).__doc__, name


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(p.relative_to(ROOT)) for p in sources() if not ast.get_docstring(tree(p))]
    assert not silent


def names_in(path: Path) -> set[str]:
    """The functions, methods and classes that a file defines, and the names that its module assigns or uses."""
    defined = {node.name for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return defined | {name.id for node in tree(path).body for name in ast.walk(node) if isinstance(name, ast.Name)}


def is_there(path: Path, said: str) -> bool:
    """Whether a module defines `said`; for a package: whether it has the module, and that module the name after it."""
    first, _, rest = said.partition(".")
    if path.name == "__init__.py":
        for module in (path.parent / f"{first}.py", path.parent / first / "__init__.py"):
            if module.exists():
                return not rest or is_there(module, rest)
    return set(said.split(".")) <= names_in(path)


def test_where_a_module_says_to_start_reading_there_is_something() -> None:
    wrong = []
    for path in sources():
        said = re.findall(r"Start\s+reading\s+at\s+`([\w.]+)`", ast.get_docstring(tree(path)) or "")
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in said if not is_there(path, name)]
    assert not wrong


FOLDERS = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)
# Modules of the root that every package may import; introductions of folders do not name them.
FOUNDATION = set(ORDER[: ORDER.index("lazy_names") + 1])


def dotted(folder: Path) -> str:
    return ".".join(folder.relative_to(PACKAGE).parts)


def introduction(folder: Path) -> str:
    return " ".join((ast.get_docstring(tree(folder / "__init__.py")) or "").split())


def may_import(folder: Path) -> set[str] | None:
    """The packages that the folder's introduction names, with their sub-packages; None if it has no such sentence."""
    said = re.search(r"May import (.*?)\.( |$)", introduction(folder))
    if said is None:
        return None
    names = re.findall(r"`([\w.]+)`", said[1])
    if said[1].startswith("all of manyhands"):
        return set(ORDER)
    if said[1].startswith("everything up to"):
        return set(ORDER[: FLOOR[names[0]] + 1])
    inside = {one for one in ORDER for name in names if f"{one}.".startswith(f"{name}.")}
    return inside | {home(name) if is_there(PACKAGE / "__init__.py", name) else "" for name in names}


def test_every_folder_says_what_it_is_for_what_it_may_import_and_where_to_start() -> None:
    wrong = []
    for folder in FOLDERS:
        text, lines = (
            introduction(folder),
            (ast.get_docstring(tree(folder / "__init__.py"), clean=False) or "").split("\n"),
        )
        if text.startswith("May import") or "May import " not in text or "Start reading at `" not in text:
            wrong.append(f"{dotted(folder)}: what it is for, May import, Start reading at `...`: one is missing")
        if not 3 <= len(lines) <= 8:
            wrong.append(f"{dotted(folder)}: {len(lines)} lines, not 3 to 8")
    assert not wrong, "\n".join(wrong)


def test_a_folder_imports_what_its_introduction_says() -> None:
    wrong = []
    for folder in FOLDERS:
        own, allowed = home(dotted(folder)), may_import(folder) or set()
        real = {one for path in folder.glob("*.py") for one in imports(path)} - {own}
        wrong += [f"{dotted(folder)} imports {one}, which is not said" for one in real - allowed - FOUNDATION]
        above = (
            ()
            if dotted(folder) == "testing"
            else [one for one in allowed - {own} if FLOOR.get(one, len(ORDER)) > FLOOR[own]]
        )
        wrong += [f"{dotted(folder)} says that it may import {one or 'what is not in ORDER'}" for one in above]
    assert not wrong, "\n".join(wrong)


FEW = {
    "compat": "a folder for each library whose calls are kept",
    "control.security": "keys are handled in one place, so that a review of them reads two files",
    "optim": "`mh.optim` is public, and has these two kinds of optimizers",
    "testing": "ranks for tests, which no other package imports",
}


def files_of(folder: Path) -> list[Path]:
    return [
        one
        for one in folder.iterdir()
        if one.is_file() and one.suffix not in (".so", ".pyc") and one.name != "__init__.py"
    ]


def test_a_folder_has_3_to_20_entries_or_a_reason() -> None:
    wrong = []
    for folder in [PACKAGE, *FOLDERS]:
        files = files_of(folder)
        entries = len(files) + sum(folder == one.parent for one in FOLDERS)
        if len(files) > 20 or (entries < 3) != (dotted(folder) in FEW):
            wrong.append(
                f"{dotted(folder)}: {len(files)} files, {entries} with folders; in FEW: {dotted(folder) in FEW}"
            )
    # Folders of tests are named after what they test, so the lower limit is that of the package, not theirs.
    for root in (ROOT / name for name in ("tests", "tools", "bench", "examples")):
        for folder in [root, *(one for one in root.rglob("*") if one.is_dir() and one.name != "__pycache__")]:
            if len(files_of(folder)) > 20:
                wrong.append(f"{folder.relative_to(ROOT)}: {len(files_of(folder))} files")
    assert not wrong, "\n".join(wrong)


SAME_NAME = {
    "ClusterSpec": "ours, and the same with TensorFlow's arguments",
    "FTRL": "the optimizer of dense weights, and the settings of the same optimizer for embedding rows",
    "Server": "ours, and the same with TensorFlow's arguments",
}


def test_a_public_class_name_exists_once() -> None:
    homes: dict[str, list[str]] = {}
    for path in sources():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    twice = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert set(twice) == set(SAME_NAME), twice


def test_importing_manyhands_is_light() -> None:
    heavy = ("torch", "numpy", "rich", "zmq", "keras")
    code = f"import manyhands, sys; print(sorted(m for m in {heavy} if m in sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.strip() == "[]"


def test_no_path_of_this_machine_and_no_package_index_is_in_the_tree() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in sources()]
    forbidden = [f"{Path.home()}/", f"{ROOT}/", "--index" + "-url", "--find" + "-links"]
    guilty = []
    for name in names:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".sh", "") and path.is_file():
            text = path.read_text(errors="replace")
            guilty += [f"{name}: {words}" for words in forbidden if words in text]
    assert not guilty
