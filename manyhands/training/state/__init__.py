"""What a checkpoint holds, and when it is taken."""
