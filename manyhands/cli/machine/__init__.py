"""Commands about this machine: its settings, health and keys.

May import `spec`, `strategies`, `launcher`, `trials`, `recipes` and `cli.common`.
Start reading at `doctor.doctor`.
"""
