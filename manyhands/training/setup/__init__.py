"""From what the user gave to an engine that trains it.

May import everything up to `training.step` in the order of tests/guards/test_layers.py.
Start reading at `engine_factory.make_engine`.
"""
