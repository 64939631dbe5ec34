"""From summed gradients to new weights: updated locally, fused, or shared by the ranks of a host."""
