"""One model over several workers: tensor, pipeline and sharded, beside the same by hand with torch's own tools.

May import `driver`, `results` and `programs`. Start reading at `divided.sharded`.
"""
