"""Code that runs in a worker process before the user's code.

May import `spec` and `control`.
Start reading at `bootstrap.main`.
"""
