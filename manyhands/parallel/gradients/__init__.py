"""The gradient of the whole batch: sums along the slice tree, over shared memory, a network or both.

May import `comm` and `parallel.model`.
Start reading at `network_sum.GradientSum`.
"""
