"""Runs whose workers are killed, stopped or hang: seconds to the next step, steps lost, and what being ready costs.

May import `driver`, `results` and `programs`. Start reading at `recovery.measure`.
"""
