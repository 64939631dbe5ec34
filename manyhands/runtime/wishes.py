"""What workers tell each other with every step that they want done after it.

The largest wins. Each includes those before it, but for TELL and REGROUP, which are asked for again.
"""

from __future__ import annotations

__all__ = ["END_FIT", "LEAVE", "REGROUP", "SAVE", "TELL"]

# TELL: hooks of every worker are called with the checkpoints that the chief has committed.
TELL, REGROUP, SAVE, END_FIT, LEAVE = 1, 2, 3, 4, 5
