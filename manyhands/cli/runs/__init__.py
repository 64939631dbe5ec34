"""Commands about one run, alive or ended: status, logs, hosts and checkpoints, and how to stop or scale it.

May import `checkpoint`, `control`, `launcher`, `observe`, `parameter_server` and `spec`.
Start reading at `status.status`.
"""
