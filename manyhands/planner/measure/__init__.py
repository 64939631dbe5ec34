"""The inputs of the planner's arithmetic: a model's memory and times, measured before anything starts.

May import everything up to `training.setup` in the order of tests/guards/test_layers.py.
Start reading at `memory_plan.plan_model`.
"""
