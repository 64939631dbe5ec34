"""What happens around a step: hooks, evaluation, stragglers, garbage collection, reports."""
