"""Placers put our agents on the hosts of a cluster (Slurm, MPI, Ray, Kubernetes, ssh); what agents learn from them.

An *engine* is something else: it does a strategy's work in a worker.
May import `spec`, `comm` and `control`.
Start reading at `seats.find_seat` for a placed process, at `shell.start_elsewhere` for the command that places it.
"""
