"""`mh.Trainer` and `mh.join`: the user's way into a run.

May import everything up to `trials` in the order of tests/guards/test_layers.py.
Start reading at `trainer.Trainer`.
"""
