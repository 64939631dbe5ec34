"""What workers tell each other with every step that they want done after it.

The largest wins. Each includes those before it, but for REGROUP, which is asked for again.
"""

from __future__ import annotations

__all__ = ["END_FIT", "LEAVE", "REGROUP", "SAVE"]

REGROUP, SAVE, END_FIT, LEAVE = 1, 2, 3, 4
