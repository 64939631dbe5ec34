"""Sharded replicas (ZeRO, FSDP): each rank keeps a shard of parameters, gradients and optimizer state.

May import `optim.ftrl`, `comm`, `parallel.model`, `parallel.gradients`, `parallel.weights` and `parallel.tensor`.
Start reading at `fsdp_backend.FsdpBackend`.
"""
