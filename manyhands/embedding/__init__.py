"""Embeddings for any 64-bit id: layers, row tables and the optimizers of their rows.

May import `native` and `comm`.
Start reading at `layers.Embedding`.
"""
