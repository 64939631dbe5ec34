"""A worker process in its run: rank, device, mesh, connections, trainings of the script."""
