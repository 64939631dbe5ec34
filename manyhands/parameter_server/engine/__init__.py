"""The engines of strategies whose weights are on servers: a worker leases slices, computes and pushes.

May import `comm`, `parallel`, `parameter_server.protocol`, `parameter_server.memory`, `embedding`,
`parameter_server.server`, `parameter_server.worker` and `strategies`.
Start reading at `leased_engine.LeasedEngine`.
"""
