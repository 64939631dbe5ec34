"""Commands that start a run, or add a host to one."""
