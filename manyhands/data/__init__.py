"""Training data: slices, sample order and resume (pure); loading and prefetch. `sources` has the kinds of data.

May import only modules of the root, such as `errors`.
Start reading at `sample_order.order`.
"""
