"""`mh.Dataset`: chains of data as in tf.data, over the files, orders, slices and loader processes of `data`.

A chain is a frozen value (`stages`) that is read by position (`views`) or, where the data itself decides what comes
next, forward (`streams`); `binding` gives its stages their meaning under a seed, `leaves` are where examples are,
`index_orders` is the order arithmetic, and `chain_source` makes the source of a run.
May import `data` and `spec`.
Start reading at `dataset.Dataset`.
"""
