"""Many jobs on one cluster: a queue on disk, a daemon that starts elastic runs, and the policy that sizes them.

May import `spec`, `comm.transport`, `planner.step_time`, `control`, `observe`, `launcher`.
Start reading at `policy.allocate`, then `queue_state.react`.
"""
