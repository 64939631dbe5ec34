"""The training loop, for the trainer and for a user loop.

May import everything up to `dataflow` in the order of tests/guards/test_layers.py.
Start reading at `fit.LockstepSource.train`.
"""
