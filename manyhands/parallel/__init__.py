"""The parts that strategies are made of: sums along the slice tree, buffers, precision, norms."""
