"""The agent: one process per host that starts, watches and ends workers and servers as the coordinator orders."""
