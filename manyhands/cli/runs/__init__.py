"""Commands about one run, alive or ended: its status, logs and checkpoints, and how to stop or scale it.

May import `checkpoint`, `control`, `observe` and `parameter_server`.
Start reading at `status.status`.
"""
