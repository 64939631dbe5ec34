"""The keys of a run, and the peers that were rejected.

May import `comm` and `control.messages`.
Start reading at `keys.server_curve`.
"""
