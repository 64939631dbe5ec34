"""Parameter servers: their modes beside each other and other libraries, embeddings, and a server that is killed.

May import `driver`, `results`, `programs` and `recovery`. Start reading at `served.measure`.
"""
