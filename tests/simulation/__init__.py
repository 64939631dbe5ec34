"""A deterministic simulation of elastic runs: the real decisions; a virtual clock, network, disk, agents and workers.

`world.run(seed)` plays one run and returns its history; `checker.violations(history)` reads it. A failing seed replays
by number: `python -m tests.simulation --seed 17`.
"""
