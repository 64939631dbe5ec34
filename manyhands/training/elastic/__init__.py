"""What a worker does when its group changes: it agrees with the others on a step, and gives or takes state.

May import everything up to `training.state` in the order of tests/guards/test_layers.py.
Start reading at `regroup.Regroup`.
"""
