"""Sharded replicas (ZeRO, FSDP): each rank keeps a shard of parameters, gradients and optimizer state."""
