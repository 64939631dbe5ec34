"""The memory of servers and workers: versions of weights, optimizer states, frames between hosts."""
