"""What a worker does when its group changes: it agrees with the others on a step, and gives or takes state."""
