"""Imports public names on first use, so that `import manyhands` needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from manyhands.errors import UsageError
from manyhands.supported import check_system

__all__ = ["find", "refuse_renamed"]


def find(module: str, homes: Mapping[str, str], name: str) -> Any:
    """The public `name` of `module`, imported from the manyhands module that defines it."""
    if name not in homes:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    importlib.import_module("manyhands.launcher.script_exit").watch_ending()
    check_system()
    return getattr(importlib.import_module(f"manyhands.{homes[name]}"), name)


def refuse_renamed(renamed: Mapping[str, str], name: str) -> None:
    if name in renamed:
        raise UsageError(f"mh.{name} is called {renamed[name]} now.", fix=[renamed[name]])
