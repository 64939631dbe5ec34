"""What holds a run back: what a worker records for `mh profile`, and what its times mean (pure).

May import everything up to `training.elastic` in the order of tests/guards/test_layers.py.
Start reading at `verdict.judge`.
"""
