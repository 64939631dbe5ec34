"""Code that runs in a worker process before the user's code."""
