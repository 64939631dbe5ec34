"""Decides which workers are in the run: pure functions over frozen state, without socket, clock or process."""
