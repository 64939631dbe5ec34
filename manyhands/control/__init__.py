"""The control plane: membership (pure), and the coordinator, agents and sessions that act on it. Imports no torch.

This folder itself has the run directory only.
May import `spec`.
Start reading at `membership.react.react`.
"""
