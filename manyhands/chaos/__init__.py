"""Faults on purpose, against a real run, and what became of each."""
