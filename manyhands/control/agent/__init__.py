"""The agent: one process per host that starts, watches and ends workers and servers as the coordinator orders.

May import `native`, `spec`, `comm` and `control`.
Start reading at `agent.run_agent`.
"""
