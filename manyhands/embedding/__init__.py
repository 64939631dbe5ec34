"""Embeddings for any 64-bit id: layers, row tables and the optimizers of their rows.

May import `native`, `comm` and `parameter_server.memory`.
Start reading at `layers.Embedding`.
"""
