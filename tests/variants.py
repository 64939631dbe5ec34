"""Which variants of a test belong to `make test`; `make test-long` runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["variants"]


def variants(every: Iterable[str], *quick: str) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: all but the `quick` ones are long."""
    names = list(every)
    unknown = set(quick) - set(names)
    assert not unknown, f"no such variants: {sorted(unknown)}"
    return [pytest.param(name, id=name, marks=[pytest.mark.long] * (name not in quick)) for name in names]
