"""Optimizers that torch does not have: `FTRL` for dense weights, and `rows` for the rows of `mh.nn` embeddings."""

from manyhands.optim.ftrl import FTRL

__all__ = ["FTRL"]
