"""This host's parameter server processes, the spare server, and the backup of other hosts' logs."""
