"""The networks that the modes are compared on: small, wide and deep, on the handwritten digits."""

from __future__ import annotations

from torch import Tensor, nn

from manyhands.recipes.digits import load

__all__ = ["BATCH", "NETWORKS", "SLICES", "data", "make_model"]

BATCH, SLICES = 64, 2
NETWORKS = {
    "small": (1, 256, "64-256-10; 19 thousand parameters, 0.08 MB"),
    "wide": (2, 1024, "64-1024-1024-10; 1.1 M parameters, 4.5 MB"),
    "deep": (12, 256, "64-256 x 12-10; 0.7 M parameters in 13 layers, 3 MB"),
}
"""Hidden layers, their width, and what that is."""
Pictures = tuple[Tensor, Tensor]


def make_model(name: str) -> nn.Module:
    """Smooth functions only: a rounding error stays one. The deep one normalises, or it would not learn."""
    count, width, _ = NETWORKS[name]
    layers: list[nn.Module] = [nn.Flatten()]
    for number in range(count):
        layers += [nn.Linear(width if number else 64, width), *([nn.LayerNorm(width)] if count > 4 else []), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def data() -> tuple[Pictures, Pictures]:
    """(training, held out), with pixels around 0."""
    (pictures, labels), (held_out, held_out_labels) = load()
    return ((pictures - 0.3) / 0.4, labels), ((held_out - 0.3) / 0.4, held_out_labels)
