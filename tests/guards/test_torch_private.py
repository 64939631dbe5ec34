"""All private names of torch that are used are in one list, each with what happens without it; the list is complete."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import manyhands
from manyhands import torch_private
from manyhands.errors import EnvironmentProblem
from manyhands.strategies.registry import STRATEGIES

PACKAGE = Path(manyhands.__file__).parent
LIST = PACKAGE / "torch_private.py"
# Private names of libraries other than torch, and of named tuples.
OTHERS = {
    "Keras": {
        *("_compile_metrics", "_flatten_layers", "_fn", "_fn_kwargs", "_get_call_context", "_track_variables"),
        *("_user_metrics", "_user_weighted_metrics", "_keras_mask"),
        *("_assert_compile_called", "_call_has_training_arg", "_compile_loss", "_compute_loss", "_loss_tracker"),
        *("_compute_loss_has_training_arg", "_flatten_metrics_in_order", "_standardize_batch", "_symbolic_build"),
        "_trainable_variables",
    },
    "Python": {"_exit", "_replace", "_getframe", "_run_exitfuncs", "_shutdown", "_fields", "_Hash", "_set_native_id"},
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def from_torch(tree: ast.Module) -> dict[str, str]:
    """The names that a file imports from torch, with their full names there."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            torches = [one for one in node.names if one.name.split(".")[0] == "torch"]
            found |= {one.asname or "torch": one.name if one.asname else "torch" for one in torches}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    before = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else None


def own_names(text: str) -> set[str]:
    """Private attributes and methods that a file defines on its own objects."""
    given = re.findall(r"(?:\bself\.|\bcls\.|\bdef |^    )(_[a-z]\w*)|\.(_[a-z]\w*) = ", text, re.M)
    return {name for names in given for name in names}


def private_uses(tree: ast.Module, ours: set[str]) -> Iterator[str]:
    """Names of torch with a private part, and private attributes of objects that are not ours."""
    known = from_torch(tree)
    yield from (name for name in known.values() if any(map(is_private, name.split("."))))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        first, _, rest = (dotted(node) or "").partition(".")
        if first in known:
            name = f"{known[first]}.{rest}"
            if is_private(node.attr):
                yield name
        elif is_private(node.attr) and first not in ("self", "cls") and node.attr not in ours:
            yield node.attr


def listed(name: str) -> bool:
    """Whether the list has the name, dotted or by its last part, or a module that contains it."""
    for one in torch_private.NAMES:
        if name == one.name or name.startswith(f"{one.name}.") or name.split(".")[-1] == one.name.split(".")[-1]:
            return True
    return name == "torch._C" or any(name in names for names in OTHERS.values())


@functools.cache
def texts() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py")) if path != LIST}


def test_no_private_name_of_torch_is_used_that_is_not_in_the_list() -> None:
    ours = set[str]().union(*map(own_names, texts().values()))
    suspect = re.compile(r"(?<!\bself)(?<!\bcls)\._[a-zA-Z]|import .*\b_[a-zA-Z]")
    wrong = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, text in texts().items()
        if suspect.search(text)
        for name in sorted(set(private_uses(ast.parse(text), ours)))
        if not listed(name)
    ]
    assert not wrong, "put these into manyhands/torch_private.py, with what happens without them"


def test_a_name_that_is_not_in_the_list_is_found() -> None:
    source = "import torch\nfrom torch.nn import _x\ntorch.a._b.c(tensor)\ntensor._new\nf()._of_call\nself._own\n"
    assert set(private_uses(ast.parse(source), {"_own"})) == {"torch.nn._x", "torch.a._b", "_new", "_of_call"}
    assert not listed("torch.a._b") and not listed("_new")


def test_every_name_in_the_list_is_there_and_says_what_happens_without_it() -> None:
    assert torch_private.missing() == []
    assert all(one.used_for and bool(one.needed_by) != bool(one.instead) for one in torch_private.NAMES)


def test_every_name_in_the_list_is_used() -> None:
    text = "\n".join(texts().values()) + LIST.read_text().partition("# ---- substitutes")[2]
    unused = [one.name for one in torch_private.NAMES if one.name.split(".")[-1] not in text]
    assert unused in ([], ["torch.utils._pytree"])  # the list itself imports it


def test_a_strategy_that_lacks_a_name_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.autograd.grad_mode, "_unsafe_preserve_version_counter")
    torch_private.check_strategy_names.cache_clear()
    try:
        assert [one.name for one in torch_private.missing()] == [
            "torch.autograd.grad_mode._unsafe_preserve_version_counter"
        ]
        torch_private.check_strategy_names("mirrored", STRATEGIES["mirrored"].uses)
        with pytest.raises(EnvironmentProblem, match=r'_unsafe_preserve_version_counter.*"pipeline" needs'):
            torch_private.check_strategy_names("pipeline", STRATEGIES["pipeline"].uses)
    finally:
        torch_private.check_strategy_names.cache_clear()


def test_the_substitutes_compute_what_torch_computes() -> None:
    scores = torch.tensor([[1.0, 2.0, -float("inf")], [-float("inf")] * 3])
    assert torch.equal(torch_private._softmax_then_zeros(scores, -1), torch_private.safe_softmax(scores, -1))
    ours, theirs = ([torch.arange(4.0), torch.ones(2, 2)] for _ in range(2))
    values = [torch.full((4,), 2.0), torch.eye(2)]
    for mine, native, more in (
        (torch_private._add_each, torch_private.foreach_add_, (values,)),
        (torch_private._mul_each, torch_private.foreach_mul_, (torch.tensor(3.0),)),
        (torch_private._copy_each, torch_private.foreach_copy_, (values,)),
        (torch_private._zero_each, torch_private.foreach_zero_, ()),
    ):
        mine(ours, *more)
        native(theirs, *more)
        assert all(map(torch.equal, ours, theirs)), mine
