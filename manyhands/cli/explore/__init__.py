"""Commands that examine a script by short runs: settings, layouts, memory.

May import `spec`, `observe`, `launcher`, `planner.measure`, `trials` and `cli.common`.
Start reading at `plan.show`.
"""
