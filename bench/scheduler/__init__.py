"""The scheduler against published figures, on simulated clusters, and against first-come-first-served, on this machine.

Start reading at `cluster_jobs.workload`.
"""
