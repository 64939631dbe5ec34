"""Do something to a module right after the user's code imports it, and import nothing that it does not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["after_import"]


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Hand the module to `then` as soon as it is there, at once if it is. What `then` raises is kept from the user."""
    if name in sys.modules:
        with suppress(Exception):
            then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


class _AfterImport(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

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

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            with suppress(Exception):
                self._then(module)

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec
