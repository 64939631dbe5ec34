"""What is done when a module is imported, and that nothing is left of it."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from manyhands.launcher.worker_process import import_hooks as module_under_test
from manyhands.launcher.worker_process.import_hooks import after_import, import_to_stay, num_kept
from manyhands.training.step.garbage_collection import GarbageCollection

Module = Callable[[str, str], None]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """Writes modules that can be imported during the test."""
    finders = list(sys.meta_path)
    monkeypatch.setattr(module_under_test, "_num_kept", 0)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def write(name: str, code: str) -> None:
        names.append(name)
        (tmp_path / f"{name}.py").write_text(code)
        importlib.invalidate_caches()

    yield write
    gc.enable()
    gc.unfreeze()
    for name in names:
        sys.modules.pop(name, None)
    assert sys.meta_path == finders


def test_a_module_is_handed_over_once_its_code_has_run_or_at_once(module: Module) -> None:
    module("late", "value = 1")
    seen: list[ModuleType] = []
    after_import("late", seen.append)
    assert seen == []
    late = importlib.import_module("late")
    after_import("late", seen.append)
    assert seen == [late, late] and late.value == 1


def test_errors_of_a_callback_do_not_reach_the_import(module: Module) -> None:
    module("fine", "value = 1")
    after_import("fine", lambda module: module.absent)
    assert importlib.import_module("fine").value == 1


def test_the_collector_does_not_look_at_what_is_imported_to_stay(module: Module) -> None:
    module("large", "import gc; collecting = gc.isenabled()")
    import_to_stay("large")
    assert importlib.import_module("large").collecting is False
    assert gc.isenabled() and gc.get_freeze_count() > 0


def test_a_training_keeps_the_collector_from_all_that_has_come_since_unless_the_user_has_done_so(
    module: Module,
) -> None:
    module("large", "")
    import_to_stay("large")
    importlib.import_module("large")
    since = [[] for _ in range(1000)]
    garbage = GarbageCollection(manage=True)
    garbage.begin()
    assert gc.get_freeze_count() > num_kept() + len(since) / 2
    other = GarbageCollection(manage=True)
    other.begin()
    other.end()
    assert gc.get_freeze_count() > num_kept(), "another has frozen it"
    garbage.end()
    assert gc.get_freeze_count() == 0


def test_a_collector_that_the_user_has_disabled_stays_so(module: Module) -> None:
    module("large", "")
    import_to_stay("large")
    gc.disable()
    importlib.import_module("large")
    assert not gc.isenabled() and gc.get_freeze_count() == 0


def test_the_collector_stays_on_if_the_user_has_frozen_objects(module: Module) -> None:
    module("large", "import gc; collecting = gc.isenabled()")
    import_to_stay("large")
    gc.freeze()
    assert importlib.import_module("large").collecting is True


def test_the_collector_is_on_again_after_an_import_that_fails(module: Module) -> None:
    module("broken", "1 / 0")
    import_to_stay("broken")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("broken")
    assert gc.isenabled() and gc.get_freeze_count() == 0
