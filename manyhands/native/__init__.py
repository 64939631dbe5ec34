"""Sums and meetings in memory that the workers of one host share, in C (see core.h); without torch.

The extension is optional: where it was not built, `library` is None and `why_not` says why. `comm.shared_memory` is
what the rest of the package uses.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["library", "why_not"]

library: Any = None
_reason = ""
try:
    library = importlib.import_module("manyhands.native._native")
except ImportError as _error:
    _reason = str(_error)


def why_not() -> str:
    """Why there is no extension; empty where there is one."""
    return f"the C extension is not built ({_reason})" if library is None else ""
