"""The training loop, for the trainer and for a user loop."""
