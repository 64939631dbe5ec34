"""Frozen data, no torch: what was asked for, what there is, what was decided."""
