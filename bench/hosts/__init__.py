"""Two hosts, as network namespaces with a slow link between them: lossy sums, averaging, accuracy.

May import `driver`, `results` and `programs`. Start reading at `hosts.two_hosts`.
"""
