"""Parameter servers: protocol, memory, log, server, worker and the loop, one folder each; this folder has no module.

The folders are on different floors of the order of imports: `engine` is above `strategies`, `loop` above
`training.loop`, the others below `strategies`.
May import only modules of the root, such as `errors`.
Start reading at `protocol.leases.LeaseTable`.
"""
