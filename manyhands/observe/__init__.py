"""Observing a run: its recorded events, progress display, status, TensorBoard. Imports no torch."""
