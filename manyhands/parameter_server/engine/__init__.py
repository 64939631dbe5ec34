"""The engines of strategies whose weights are on servers: a worker leases slices, computes and pushes."""
