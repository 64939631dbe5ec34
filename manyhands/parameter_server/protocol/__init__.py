"""The protocol between workers and parameter servers: messages, leases, shards. Pure.

May import `comm`, `data` and `parallel.averaging`.
Start reading at `leases.LeaseTable`.
"""
