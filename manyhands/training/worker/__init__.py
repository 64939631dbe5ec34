"""A worker process in its run: rank, device, mesh, connections, trainings of the script.

May import `native`, `spec`, `comm`, `parallel`, `parameter_server.protocol`, `strategies`, `control`, `observe` and
`launcher`.
Start reading at `worker.Worker`.
"""
