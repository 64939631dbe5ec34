"""The gradient of the whole batch: sums along the slice tree, over shared memory, a network or both."""
