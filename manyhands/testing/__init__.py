"""Real ranks for tests: warm worker processes on loopback. May import all of manyhands; nothing imports it."""

from manyhands.testing.rank_pool import RankFailed, RankPool

__all__ = ["RankFailed", "RankPool"]
