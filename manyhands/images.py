"""Augmentation of pictures on tensors, for `mh.Dataset.map`: resize, crop, flip, colour jitter, normalise."""

from __future__ import annotations

from manyhands.data.pipeline.pictures import (
    center_crop,
    class_names,
    color_jitter,
    decode,
    normalize,
    random_crop,
    random_flip,
    random_resized_crop,
    resize,
    to_float,
)

__all__ = [
    "center_crop",
    "class_names",
    "color_jitter",
    "decode",
    "normalize",
    "random_crop",
    "random_flip",
    "random_resized_crop",
    "resize",
    "to_float",
]
