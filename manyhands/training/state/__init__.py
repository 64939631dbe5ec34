"""What a checkpoint holds, and when it is taken.

May import everything up to `planner.measure` in the order of tests/guards/test_layers.py.
Start reading at `training_state.TrainingState`.
"""
