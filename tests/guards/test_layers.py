"""The rules that hold the tree together, each in a few lines."""

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
    "optim.ftrl",
    "native", "spec",
    "comm", "data", "order", "checkpoint",
    "parallel.model", "parallel.averaging", "parallel.gradients", "parallel.replicas", "parallel.weights",
    "parallel.tensor", "parallel.pipeline", "parallel.sharding", "parallel", "planner",
    "parameter_server.protocol", "parameter_server.memory", "embedding", "optim", "parameter_server.log",
    "parameter_server.tables", "parameter_server.server", "parameter_server.worker",
    "strategies", "parameter_server.engine",
    "control.messages", "control", "control.security", "control.membership", "control.coordinator",
    "control.session", "control.processes", "control.servers", "control.agent",
    "observe", "launcher.worker_process", "launcher",
    "training.worker", "training.step", "training.setup", "planner.measure", "training.state", "training.elastic",
    "training.loop", "parameter_server.loop", "parameter_server", "trials", "training", "dispatch",
    "chaos", "recipes", "cli.common", "cli.machine", "cli.runs", "cli.explore", "cli.start", "cli", "testing",
]  # fmt: skip
FLOOR = {name: number for number, name in enumerate(ORDER)}

# Each of these runs code, or listens to everyone, and has no place here. Exceptions stand below with their reason.
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
    ("control/agent/preflight.py", "0.0.0.0"): "refused there by name",
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
        wrong += [
            f"{path.relative_to(ROOT)}: {own} imports {o}" for o in imports(path) if o != own and FLOOR[o] > FLOOR[own]
        ]
    assert not wrong, "\n".join(wrong)


def test_the_control_plane_is_without_torch() -> None:
    """`mh status` must not take seconds, and an agent must not need what its workers need."""
    allowed = {"launcher/worker_process/process_settings.py"}
    guilty = set()
    for path in sources():
        name = path.relative_to(PACKAGE).as_posix()
        if name.split("/")[0] in ("spec", "control", "observe", "launcher"):
            tops = (n for n in tree(path).body if isinstance(n, ast.Import | ast.ImportFrom))
            if any("torch" in ast.unparse(one).split() for one in tops):
                guilty.add(name)
    assert guilty <= allowed


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


def test_where_a_module_says_to_start_reading_there_is_something() -> None:
    wrong = []
    for path in sources():
        module = tree(path)
        defined = {node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        defined |= {name.id for node in module.body for name in ast.walk(node) if isinstance(name, ast.Name)}
        for said in re.findall(r"Start\s+reading\s+at\s+`([\w.]+)`", ast.get_docstring(module) or ""):
            *folder, name = said.split(".")
            if path.name == "__init__.py":  # a module of the package, or something in one
                found = any((path.parent / f"{said.split('.')[0]}{end}").exists() for end in (".py", "/__init__.py"))
            else:
                found = name in defined and set(folder) <= defined
            wrong += [] if found else [f"{path.relative_to(ROOT)}: {said}"]
    assert not wrong


def test_importing_manyhands_is_light() -> None:
    heavy = ("torch", "numpy", "rich", "zmq", "keras")
    code = f"import manyhands, sys; print(sorted(m for m in {heavy} if m in sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.strip() == "[]"


def test_no_path_of_this_machine_and_no_package_index_stands_in_the_tree() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in sources()]
    telling = [f"{Path.home()}/", f"{ROOT}/", "--index" + "-url", "--find" + "-links"]
    guilty = []
    for name in names:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".sh", "") and path.is_file():
            text = path.read_text(errors="replace")
            guilty += [f"{name}: {words}" for words in telling if words in text]
    assert not guilty
