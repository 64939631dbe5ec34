"""From summed gradients to new weights: updated locally, fused, or shared by the ranks of a host.

May import `optim.ftrl`, `native`, `comm`, `checkpoint`, `parallel.model`, `parallel.gradients` and `parallel.replicas`.
Start reading at `replica_backend.ReplicaBackend`.
"""
