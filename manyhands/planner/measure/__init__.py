"""The inputs of the planner's arithmetic: a model's memory and times, measured before anything starts."""
