"""Tensor parallelism: layers that are sharded over ranks.

May import `comm` and `parallel.model`.
Start reading at `rules.propose`.
"""
