"""Every parameter of every public call is explained in its docstring, and docs/reference.md has what they say."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from tools.reference import ALIASES, GROUPS, explained, parameters, public_calls, public_name, reference

CALLS = list(public_calls())


def unexplained(call: Callable[..., Any], docstring: str | None) -> list[str]:
    return [one.name for one in parameters(call) if not explained(docstring).args.get(one.name)]


@pytest.mark.parametrize(("call", "docstring"), [call[1:] for call in CALLS], ids=[call[0] for call in CALLS])
def test_every_parameter_is_explained_where_an_editor_shows_it(call: Callable[..., Any], docstring: str | None) -> None:
    assert unexplained(call, docstring) == [], "each needs an entry below Args: in the docstring"
    gone = set(explained(docstring).args) - {one.name for one in parameters(call)}
    assert not gone, "the docstring explains what is no parameter"


def test_a_parameter_without_an_entry_is_found() -> None:
    def fit(data: Any, *, epochs: int = 1, steps: int = 0, **more: Any) -> None:
        """Train.

        Args:
            data: What to train on,
                in two lines: with a colon.
            steps, more: Both.
        """

    assert unexplained(fit, fit.__doc__) == ["epochs"]
    assert explained(fit.__doc__).args["data"] == "What to train on, in two lines: with a colon."


def test_the_reference_has_every_public_name_but_modules_and_the_root_of_errors() -> None:
    named = {name for group in GROUPS.values() for name in group}
    public = {name for name in mh.__all__ if not inspect.ismodule(getattr(mh, name))}
    assert public - named - set(ALIASES) == {"ManyhandsError"}
    for module in (mh.optim, mh.order, mh.optim.rows, mh.nn, mh.dispatch):
        own = module.__name__.partition(".")[2]
        assert {f"{own}.{name}" for name in module.__all__ if name != "rows"} <= named


def test_another_name_is_the_same_object_and_is_in_the_overview() -> None:
    for name, same in ALIASES.items():
        assert getattr(mh, name) is getattr(mh, same)
        assert f"`mh.{name}`" in reference().partition("\n## ")[0]


def test_the_public_names_fit_one_screen() -> None:
    assert len(dir(mh)) <= 40
    assert all(f"`mh.{name}`" in reference().partition("\n## ")[0] for name in dir(mh))


@pytest.mark.parametrize(
    "name", ["Tensor", "Pipeline", "rows", "Cluster", "Coordinator", "Worker", "step", "Embedding"]
)
def test_an_old_name_says_the_new_one(name: str) -> None:
    with pytest.raises(mh.errors.UsageError, match=rf"mh\.{name} is called (mh\.[\w.]+) now") as caught:
        getattr(mh, name)
    assert public_name(caught.value.fix[0].removeprefix("mh.")) is not None
    assert not hasattr(mh, name)


def test_importing_an_old_name_says_the_new_one_too() -> None:
    with pytest.raises(mh.errors.UsageError, match=r"called mh\.TensorParallel now"):
        from manyhands import Tensor  # type: ignore[attr-defined] # noqa: F401


def test_every_class_with_calls_of_its_own_has_them_in_the_reference() -> None:
    page = reference()
    for call in (
        "Cluster.start_server",
        "Dispatcher.schedule",
        "RemoteValue.fetch",
        "RemoteWorker.join",
        "ClusterSpec.num_tasks",
    ):
        assert f".{call}\n" in page
    assert "- `.worker_pids`: " in page and "- `.model`: " in page
    assert "### mh.optim.rows.Adagrad\n" in page and "### mh.order.ByLength\n" in page


def test_the_reference_is_what_the_docstrings_say() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference.md"
    assert page.read_text() == reference(), "python -m tools.reference > docs/reference.md"
