"""The memory that a layout needs on each worker: arithmetic only, no torch. What is measured is in
`planner.measure`.
"""
