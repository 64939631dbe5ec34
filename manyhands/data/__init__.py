"""Slices, order and resume (pure); loading and prefetch. Start reading at `order`, then `batches`."""
