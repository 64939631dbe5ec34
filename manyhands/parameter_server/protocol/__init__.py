"""The protocol between workers and parameter servers: messages, leases, shards. Pure."""
