"""Real ranks for tests: reused worker processes on loopback. No other package imports this one.

May import all of manyhands.
Start reading at `rank_pool.RankPool`.
"""

from manyhands.testing.rank_pool import RankFailed, RankPool

__all__ = ["RankFailed", "RankPool"]
