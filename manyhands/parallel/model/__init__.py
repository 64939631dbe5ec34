"""What every strategy does to the user's model: buffers, precision, blocks, activation checkpointing."""
