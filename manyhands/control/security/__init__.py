"""The keys of a run, and the peers that were rejected."""
