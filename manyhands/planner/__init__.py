"""The memory that a layout needs on each worker, and the time of a step by the number of workers: arithmetic only, no
torch. What is measured is in `planner.measure`.

May import only modules of the root, such as `errors`.
Start reading at `memory_peaks.Peaks`.
"""
