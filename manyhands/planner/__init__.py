"""The memory that a layout needs on each worker: arithmetic only, no torch. What is measured is in `planner.measure`.

May import only modules of the root, such as `errors`.
Start reading at `memory_peaks.Peaks`.
"""
