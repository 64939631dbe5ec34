"""Decides which workers are in the run: pure functions over frozen state, without socket, clock or process.

May import `spec`, `comm` and `control.messages`.
Start reading at `react.react`.
"""
