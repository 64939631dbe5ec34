"""How many bytes this process has handed to other processes: gradients, weights, activations and messages.

One count per process that only grows, as the kernel has one of CPU time. It is the same whether the bytes pass through
this host's memory or a network, so that strategies can be compared: what is counted is what a rank puts into a
collective, a message, a gradient buffer that others read, or a push, not the copies that an algorithm makes of it.
"""

from __future__ import annotations

__all__ = ["bytes_handed_over", "count_handed_over"]

_total = [0]


def count_handed_over(num_bytes: int) -> None:
    _total[0] += num_bytes


def bytes_handed_over() -> int:
    return _total[0]
