"""Commands that examine a script by short runs: settings, layouts, memory, bottlenecks, graphs.

May import `spec`, `observe`, `launcher`, `planner.measure`, `profiling`, `dataflow`, `trials` and `cli.common`.
Start reading at `plan.show`.
"""
