"""Commands about many jobs on one cluster: the daemon, submitting, the queue, cancelling.

May import everything up to `cli.start`.
Start reading at `submit.submit`.
"""
