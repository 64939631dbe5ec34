"""Commands that start a run, or add a host to one.

May import `spec`, `control`, `observe`, `launcher`, `trials`, `chaos`, `recipes` and `cli.common`.
Start reading at `run.run`.
"""
