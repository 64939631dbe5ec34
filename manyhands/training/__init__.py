"""What runs inside a worker: the bootstrap, the training loop, and what records and shows it."""
