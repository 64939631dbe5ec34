"""Commands about one run, alive or ended: its status, logs and checkpoints, and how to stop or scale it."""
