"""Slices, order and resume (pure); loading and prefetch. Start reading at `sample_order`, then `batches`."""
