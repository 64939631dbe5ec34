"""Sums and barriers in memory that the workers of one host share, in C (see core.h); without torch.

The extension is optional: if it was not built, `library` is None and `why_not` returns the reason. The rest of the
package uses `comm.shared_memory`.
May import only modules of the root, such as `errors`.
Start reading at `why_not`, then plane.c.
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
    """Why there is no extension; empty if there is one."""
    return f"the C extension is not built ({_reason})" if library is None else ""
