"""An unknown option of any name of `manyhands.distribute` is our error: which option, the nearest one, what is there.

The names are found by looking, so that a new one cannot be forgotten.
"""

from __future__ import annotations

import enum
import inspect
import json
from types import ModuleType
from typing import Any

import pytest

from manyhands import distribute
from manyhands.dispatch.worker_session import WorkerConfig
from manyhands.distribute import cluster_resolver, coordinator, experimental, mixed_precision, train
from manyhands.errors import NotHere, SpecError

CLUSTER = {"worker": ["localhost:2222"], "ps": ["localhost:2224"]}
MODULES = (distribute, experimental, cluster_resolver, coordinator, mixed_precision, train)
GIVEN: dict[str, tuple[Any, ...]] = {
    "PSWorker": (WorkerConfig(address="ipc:///nowhere"),),
    "Server": (CLUSTER,),
    "SimpleClusterResolver": (CLUSTER,),
    "TFCluster": (CLUSTER,),
}
"""What is needed before the options are looked at."""
OURS = ("RemoteValue", "RunResolver", "run_resolver", "with_cluster")
"""In the modules for other parts of ours, or made by a call: no program writes them."""


def names() -> list[tuple[str, Any]]:
    """Every function and class that a program may call, by its dotted name."""
    found = {}
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            kind_of_its_own = inspect.isclass(value) and issubclass(value, enum.Enum | Exception)
            if callable(value) and not isinstance(value, ModuleType) and name not in OURS and not kind_of_its_own:
                found[f"{module.__name__.removeprefix('manyhands.')}.{name}"] = value
    del found["distribute.experimental.coordinator"], found["distribute.mixed_precision.experimental"]  # modules there
    return sorted(found.items())


def methods() -> list[tuple[str, Any]]:
    """Every public method of these classes that is written in `manyhands.distribute`."""
    return [
        (f"{name}.{method}", function)
        for name, kind in names()
        if inspect.isclass(kind)
        for method, function in inspect.getmembers(kind, inspect.isfunction)
        if not method.startswith("_") and function.__module__.startswith("manyhands.distribute")
    ]


@pytest.mark.parametrize(("name", "value"), names(), ids=[name for name, _ in names()])
def test_an_unknown_option_is_named(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 0}}))
    with pytest.raises(SpecError, match="no_such_option") as refused:
        value(*GIVEN.get(name.rpartition(".")[2], ()), no_such_option=1)
    parameters = [one for one in inspect.signature(value).parameters.values() if one.kind is not one.VAR_KEYWORD]
    for one in parameters:
        assert one.name in str(refused.value), "what is there is listed"


@pytest.mark.parametrize(("name", "value"), names(), ids=[name for name, _ in names()])
def test_the_nearest_option_is_suggested(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 0}}))
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for one in inspect.signature(value).parameters.values():
        if one.kind in kinds and len(one.name) > 4:
            misspelt = one.name[0] + one.name[2:]
            with pytest.raises(SpecError, match="Did you mean") as refused:
                value(*GIVEN.get(name.rpartition(".")[2], ()), **{misspelt: 1})
            assert repr(misspelt) in str(refused.value)


@pytest.mark.parametrize(("name", "method"), methods(), ids=[name for name, _ in methods()])
def test_an_unknown_option_of_a_method_is_named(name: str, method: Any) -> None:
    with pytest.raises((SpecError, NotHere)) as refused:
        method(None, no_such_option=1)
    assert isinstance(refused.value, NotHere) or "no_such_option" in str(refused.value)


def test_there_are_many_names_to_look_at() -> None:
    assert len(names()) > 60 and len(methods()) > 80
