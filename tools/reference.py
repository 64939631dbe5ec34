"""docs/reference.md, written from the docstrings of the public names: `python -m tools.reference > docs/reference.md`.

A docstring is text, then `Args:` with an entry for each parameter. `public_calls` lists what must have one; its test
(tests/docs/test_api_reference.py) refuses a parameter that is in no entry.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import manyhands as mh

INTRODUCTION = """\
# Reference

Every public class and function of `import manyhands as mh`, with every parameter: the same text that an editor shows
when the pointer rests on a name. [guide.md](guide.md) says how they fit together, [cli.md](cli.md) has the commands.
This page is written by `python -m tools.reference`.
"""

GROUPS = {
    "Training": ["Trainer", "History", "Checkpoints", "EarlyStop", "TensorBoardHook", "launch", "read_events"],
    "Your own loop": ["join", "Hands"],
    "Strategies": [
        *("Single", "Mirrored", "Sharded", "CentralStorage", "TensorParallel", "PipelineParallel", "Mesh"),
        *("ParameterServer", "LocalSGD"),
    ],
    "Data and embeddings": [
        *("Dataset", "InputContext", "order.Weighted", "order.ByLength", "nn.Embedding", "nn.EmbeddingBag"),
        *("optim.rows.RowOptimizer", "optim.rows.SGD", "optim.rows.Adagrad", "optim.rows.RowwiseAdagrad"),
        *("optim.rows.Adam", "optim.rows.FTRL", "optim.rows.step"),
    ],
    "Augmentation of pictures": [
        *("images.decode", "images.class_names", "images.to_float", "images.resize", "images.center_crop"),
        *("images.random_crop", "images.random_resized_crop", "images.random_flip", "images.color_jitter"),
        "images.normalize",
    ],
    "Optimizers that torch does not have": ["optim.FTRL"],
    "Clusters": [
        *(
            "Slurm",
            "Ssh",
            "Kubernetes",
            "ClusterSpec",
            "Server",
            "dispatch.Cluster",
            "dispatch.Dispatcher",
            "dispatch.RemoteValue",
        ),
        *("dispatch.RemoteWorker", "dispatch.remote"),
    ],
}
ALIASES = {"MultiWorker": "Mirrored"}
MADE_BY_US = ("Hands", "dispatch.RemoteValue", "History", "optim.rows.RowOptimizer")
WITH_METHODS = (
    *("Trainer", "Hands", "ClusterSpec", "Server", "Dataset"),
    *("dispatch.Cluster", "dispatch.Dispatcher", "dispatch.RemoteValue", "dispatch.RemoteWorker"),
)


class Explained(NamedTuple):
    text: str
    args: dict[str, str]
    """The text of each parameter; parameters that share an entry have the same text."""


def explained(docstring: str | None) -> Explained:
    text, _, block = inspect.cleandoc(docstring or "").partition("\nArgs:\n")
    args: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", f"\n{inspect.cleandoc(block)}".replace("\n", "\n    ")):
        names, colon, meaning = " ".join(entry.split()).partition(": ")
        if colon:
            args |= dict.fromkeys((name.strip("* ") for name in names.split(",")), meaning)
    return Explained(text.strip(), args)


def public_name(name: str) -> Any:
    """The object with this public name, of mh or of one of its modules."""
    return functools.reduce(getattr, name.split("."), mh)


def public_calls() -> Iterator[tuple[str, Callable[..., Any], str | None]]:
    """Everything a user calls: its name, the callable with its signature, and its docstring."""
    for name in (name for group in GROUPS.values() for name in group):
        public = public_name(name)
        if name not in MADE_BY_US:
            yield f"mh.{name}", public, public.__doc__
        if name in WITH_METHODS:
            for method, function in vars(public).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"mh.{name}.{method}", function, function.__doc__


def parameters(call: Callable[..., Any]) -> list[inspect.Parameter]:
    return [one for one in inspect.signature(call).parameters.values() if one.name != "self"]


def reference() -> str:
    calls = {name: (call, docstring) for name, call, docstring in public_calls()}
    lines = [INTRODUCTION, *_overview()]
    for group, names in GROUPS.items():
        lines += [f"## {group}", ""]
        for name in names:
            whole = f"mh.{name}"
            lines += _entry(whole, *calls[whole]) if whole in calls else _bare(whole, public_name(name))
            lines += _properties(public_name(name)) if name in WITH_METHODS else []
            for method in [one for one in calls if one.startswith(f"{whole}.")]:
                lines += _entry(method, *calls[method])
    return "\n".join(lines)


def _overview() -> list[str]:
    """What `dir(mh)` shows, by topic."""
    shown = {group: [name for name in names if name in mh.__all__] for group, names in GROUPS.items()}
    shown = {group: [*names, *(a for a, same in ALIASES.items() if same in names)] for group, names in shown.items()}
    left = sorted(set(dir(mh)) - {name for names in shown.values() for name in names})
    shown = {**{group: names for group, names in shown.items() if names}, "Modules, and the base of all errors": left}
    return [*(f"- {group}: {', '.join(f'`mh.{name}`' for name in names)}" for group, names in shown.items()), ""]


def _bare(name: str, public: Any) -> list[str]:
    return [f"### {name}", "", _text(explained(public.__doc__).text), ""]


def _entry(name: str, call: Callable[..., Any], docstring: str | None) -> list[str]:
    said, asked = explained(docstring), parameters(call)
    shown = ", ".join(_arguments(asked))
    lines = [f"### {name}", "", f"`{name}({shown})`", "", _text(said.text), ""]
    lines += [f"- `{one.name}`{_type(one)}: {_text(said.args.get(one.name, ''))}" for one in asked]
    return [*lines, ""] if asked else lines


def _properties(public: type) -> list[str]:
    found = [(name, value.__doc__) for name, value in vars(public).items() if isinstance(value, property)]
    lines = [f"- `.{name}`: {_text(inspect.cleandoc(said))}" for name, said in found if said and name[0] != "_"]
    return [*lines, ""] if lines else []


def _arguments(asked: list[inspect.Parameter]) -> Iterator[str]:
    """As in a definition: a star before keyword-only parameters."""
    is_apart = False
    for one in asked:
        if one.kind is one.KEYWORD_ONLY and not is_apart:
            yield "*"
        is_apart = is_apart or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        yield _shown(one)


def _shown(one: inspect.Parameter) -> str:
    star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    return f"{star}{one.name}" + ("" if one.default is one.empty else f"={one.default!r}")


def _type(one: inspect.Parameter) -> str:
    if one.annotation is one.empty or one.annotation in (Any, "Any"):
        return ""
    shown = one.annotation if isinstance(one.annotation, str) else inspect.formatannotation(one.annotation)
    return f" ({shown})"


def _text(said: str) -> str:
    return said.replace("<", "\\<")


if __name__ == "__main__":
    sys.stdout.write(reference())
