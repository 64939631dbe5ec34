"""Pipeline parallelism: stages, schedules and the code that runs them.

May import `comm`, `parallel.model` and `parallel.tensor`.
Start reading at `schedule.make_schedule`.
"""
