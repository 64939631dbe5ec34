"""Imports public names on first use, so that `import manyhands` needs no torch."""

from __future__ import annotations

import dis
import importlib
from collections.abc import Mapping
from types import FrameType
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


class Renamed(UsageError, AttributeError):
    """So that `hasattr` is False, and what looks at all names of a module does not fail."""


def refuse_renamed(renamed: Mapping[str, str], name: str, asked_by: FrameType) -> None:
    """`asked_by` is the frame that looks the name up. `from manyhands import name` would replace an AttributeError by
    an ImportError that does not say the new name."""
    if name in renamed:
        imports = dis.opname[asked_by.f_code.co_code[asked_by.f_lasti]] == "IMPORT_FROM"
        raise (UsageError if imports else Renamed)(f"mh.{name} is called {renamed[name]} now.", fix=[renamed[name]])
