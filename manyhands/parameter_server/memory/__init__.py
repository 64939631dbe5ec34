"""The memory of servers and workers: versions of weights, optimizer states, frames between hosts.

May import `native`, `comm`, `parallel` and `parameter_server.protocol`.
Start reading at `versioned_memory.VersionedMemory`.
"""
