"""Layers that torch does not have: embeddings for any 64-bit id, for one worker, replicas and parameter servers."""

from __future__ import annotations

from manyhands.embedding.layers import Embedding, EmbeddingBag

__all__ = ["Embedding", "EmbeddingBag"]
