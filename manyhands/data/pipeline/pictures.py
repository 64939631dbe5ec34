"""Augmentation of pictures on tensors: resize, crop, flip, colour jitter, normalise. Users find it as `mh.images`.

A picture is channels by height by width, uint8 from 0 to 255 or float from 0 to 1; each function keeps the type unless
it says otherwise. Random ones draw from torch's generator, which `Dataset.map` keys by (seed, epoch, example).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from manyhands.data.pipeline.leaves import class_folders, picture
from manyhands.errors import DataError

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

Size = int | tuple[int, int]
_GREY = (0.299, 0.587, 0.114)


def decode(path: str) -> Tensor:
    """A picture file as a uint8 tensor, red, green and blue by height by width.

    Args:
        path: The file, of a kind that pillow reads.
    """
    return picture(path)


def class_names(folder: str) -> list[str]:
    """The names of the classes of a picture folder; a label is an index into it.

    Args:
        folder: With a subfolder for each class, as for `mh.Dataset.from_files`.
    """
    return class_folders(folder)


def to_float(image: Tensor) -> Tensor:
    """The picture with float32 values from 0 to 1.

    Args:
        image: A picture of either type.
    """
    return image if image.is_floating_point() else image.float() / 255


def resize(image: Tensor, size: Size) -> Tensor:
    """The picture in another size, bilinear and without aliasing.

    Args:
        image: A picture.
        size: (height, width); one number is the length of the shorter side.
    """
    height, width = image.shape[-2:]
    if isinstance(size, int):
        factor = size / min(height, width)
        size = (max(size, round(height * factor)), max(size, round(width * factor)))
    if (height, width) == size:
        return image
    return functional.interpolate(image[None], size, mode="bilinear", antialias=True)[0]


def center_crop(image: Tensor, size: Size) -> Tensor:
    """The middle of the picture.

    Args:
        image: A picture, at least as large as the part.
        size: (height, width) of the part, or one number for both.
    """
    height, width = _fitting(image, size)
    return _cut(image, (image.shape[-2] - height) // 2, (image.shape[-1] - width) // 2, height, width)


def random_crop(image: Tensor, size: Size, padding: int = 0) -> Tensor:
    """A part of the picture, anywhere.

    Args:
        image: A picture, with padding at least as large as the part.
        size: (height, width) of the part, or one number for both.
        padding: Black pixels that are put on each side before.
    """
    if padding:
        image = functional.pad(image, (padding,) * 4)
    height, width = _fitting(image, size)
    return _cut(image, _below(image.shape[-2] - height + 1), _below(image.shape[-1] - width + 1), height, width)


def random_resized_crop(
    image: Tensor,
    size: Size,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """A part of random area and shape, resized.

    Args:
        image: A picture.
        size: (height, width) of the result, or one number for both.
        scale: The least and the largest area of the part, as fractions of the picture.
        ratio: The least and the largest width of the part, as multiples of its height.
    """
    height, width = image.shape[-2:]
    area = height * width * _between(*scale)
    shape = math.exp(_between(math.log(ratio[0]), math.log(ratio[1])))
    rows = min(height, max(1, round(math.sqrt(area / shape))))
    columns = min(width, max(1, round(math.sqrt(area * shape))))
    part = _cut(image, _below(height - rows + 1), _below(width - columns + 1), rows, columns)
    return resize(part, (size, size) if isinstance(size, int) else size)


def random_flip(image: Tensor, p: float = 0.5) -> Tensor:
    """The picture, or its mirror image.

    Args:
        image: A picture.
        p: The probability of the mirror image.
    """
    return image.flip(-1) if _between(0.0, 1.0) < p else image


def color_jitter(
    image: Tensor, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0, hue: float = 0.0
) -> Tensor:
    """Brightness, contrast, saturation and hue changed at random, in this order, as float32 from 0 to 1.

    Args:
        image: A picture with three channels.
        brightness, contrast, saturation: 0.4 multiplies by a factor from 0.6 to 1.4.
        hue: 0.1 turns the colours by up to a tenth of the circle, either way; at most 0.5.
    """
    if image.shape[0] != 3:
        raise DataError(f"color_jitter needs 3 channels, but the picture has {image.shape[0]}.")
    image = to_float(image)
    if brightness:
        image = (image * _factor(brightness)).clamp_(0, 1)
    if contrast:
        image = _blended(image, _grey(image).mean(), _factor(contrast))
    if saturation:
        image = _blended(image, _grey(image), _factor(saturation))
    return _turned(image, _between(-hue, hue)) if hue else image


def normalize(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Each channel minus its mean, divided by its standard deviation, as float32.

    Args:
        image: A picture.
        mean, std: A number for each channel, of values from 0 to 1.
    """
    means, stds = _channels(tuple(mean)), _channels(tuple(std))
    if min(std) <= 0 or {len(mean), len(std)} - {1, image.shape[-3]}:
        raise DataError(
            f"normalize was given mean={tuple(mean)} and std={tuple(std)}, for {image.shape[-3]} channels.",
            where="mh.images.normalize",
            fix=["a mean, and a standard deviation above 0, for each channel"],
        )
    return (to_float(image) - means) / stds


@functools.lru_cache(maxsize=16)
def _channels(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None, None]


def _fitting(image: Tensor, size: Size) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    if height > image.shape[-2] or width > image.shape[-1]:
        raise DataError(
            f"A part of {height} x {width} does not fit into a picture of {image.shape[-2]} x {image.shape[-1]}.",
            fix=["mh.images.resize before it", "random_crop(..., padding=4)"],
        )
    return height, width


def _cut(image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    return image[..., top : top + height, left : left + width]


def _below(limit: int) -> int:
    return int(torch.randint(limit, ()))


def _between(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), dtype=torch.float64))


def _factor(strength: float) -> float:
    return _between(max(0.0, 1 - strength), 1 + strength)


def _grey(image: Tensor) -> Tensor:
    red, green, blue = _GREY
    return image[0] * red + image[1] * green + image[2] * blue


def _blended(image: Tensor, other: Tensor, factor: float) -> Tensor:
    return (image * factor + other * (1 - factor)).clamp_(0, 1)


def _turned(image: Tensor, turn: float) -> Tensor:
    """The colours turned on the colour circle: hue, saturation and value as in HSV."""
    value, brightest = image.max(0)
    least = image.min(0).values
    spread = value - least
    red, green, blue = image
    safe = torch.where(spread == 0, torch.ones_like(spread), spread)
    sector = torch.where(
        brightest == 0,
        (green - blue) / safe,
        torch.where(brightest == 1, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = (sector / 6 + turn) % 1.0
    # Each channel falls from the value by the spread, as far as its hue is away: n = 5, 3, 1 for red, green, blue.
    steps = torch.tensor([5.0, 3.0, 1.0])[:, None, None]
    distance = (steps + hue * 6) % 6
    fall = torch.minimum(distance, 4 - distance).clamp_(0, 1)
    return value - spread * fall
