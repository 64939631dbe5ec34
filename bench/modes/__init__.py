"""Every strategy on three networks and on a slow link: speed, memory, bytes, staleness, loss, and what a kill costs.

The figures of docs/choosing.md. May import `driver`, `results` and `hosts`. Start reading at `modes.measure`.
"""
