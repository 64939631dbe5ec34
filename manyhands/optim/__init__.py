"""Optimizers that torch does not have: `FTRL` for dense weights, and `rows` for the rows of `mh.nn` embeddings.

May import `optim.ftrl` and `embedding`.
Start reading at `ftrl.FTRL`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from manyhands.optim.ftrl import FTRL

if TYPE_CHECKING:
    from manyhands.optim import rows as rows

__all__ = ["FTRL", "rows"]

if not TYPE_CHECKING:  # imported late: modules that `rows` imports use FTRL

    def __getattr__(name: str) -> Any:
        if name != "rows":
            raise AttributeError(f"module 'manyhands.optim' has no attribute {name!r}")
        return importlib.import_module("manyhands.optim.rows")
