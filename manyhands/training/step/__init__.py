"""What happens around a step: hooks, evaluation, stragglers, garbage collection, reports.

May import `spec`, `comm`, `data`, `parallel`, `strategies`, `launcher` and `training.worker`.
Start reading at `hooks.Hooks`.
"""
