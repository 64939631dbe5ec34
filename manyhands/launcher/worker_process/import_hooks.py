"""Hooks for when the user's code imports a module, without importing anything that it does not."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["after_import", "import_to_stay", "num_kept"]

Execute = Callable[[ModuleType], None]

_num_kept = 0


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with the module once it is imported, at once if it already is. Errors of `then` are suppressed."""
    if name in sys.modules:
        with suppress(Exception):
            then(sys.modules[name])
    else:

        def run(execute: Execute, module: ModuleType) -> None:
            execute(module)
            with suppress(Exception):
                then(module)

        sys.meta_path.insert(0, _OnImport(name, run))


def import_to_stay(name: str) -> None:
    """Exclude everything that exists after this module's import from garbage collection, and disable it meanwhile.

    The objects of a large import stay for ever, and the collector would scan them again and again. If the user has
    disabled the collector, or frozen objects, nothing is changed.
    """

    def run(execute: Execute, module: ModuleType) -> None:
        ours = gc.isenabled() and not gc.get_freeze_count()
        if not ours:
            return execute(module)
        gc.disable()
        try:
            execute(module)
            gc.freeze()
        finally:
            global _num_kept
            _num_kept = gc.get_freeze_count()
            gc.enable()

    sys.meta_path.insert(0, _OnImport(name, run))


def num_kept() -> int:
    """How many objects `import_to_stay` has frozen; if more are frozen, the user's code did it."""
    return _num_kept


class _OnImport(MetaPathFinder):
    """Runs the code of one module through `run`, once."""

    def __init__(self, name: str, run: Callable[[Execute, ModuleType], None]) -> None:
        self._name, self._run = name, run

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: self._run(execute, module)  # type: ignore[method-assign]
        return spec
