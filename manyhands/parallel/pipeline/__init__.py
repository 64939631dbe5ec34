"""Pipeline parallelism: stages, schedules and the code that runs them."""
