"""Orders for `fit(..., order=...)` and `hands.batches(..., order=...)`: sampling by weights, batches by length."""

from __future__ import annotations

from manyhands.data.custom_orders import ByLength, Weighted

__all__ = ["ByLength", "Weighted"]
