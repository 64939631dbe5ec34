"""`fit`, a user loop and the server's process, where weights are on servers.

May import everything up to `training.loop` in the order of tests/guards/test_layers.py.
Start reading at `leased_source.LeasedSource`.
"""
