"""What the elements of a generator must look like: `output_signature` of `mh.Dataset.from_generator`, as in tf.data.

A signature is a structure with an `ElementSpec` for each tensor, which users know as `manyhands.distribute.TensorSpec`.
Elements are converted to its types, where that loses nothing, and refused where they have another structure or shape.
Start reading at `SignedGenerator`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.errors import DataError
from manyhands.spec.keyword_check import checked_class

__all__ = ["ElementSpec", "SignedGenerator"]

WHERE = "from_generator(output_signature=...)"
TEXT = "string"


@checked_class(name="TensorSpec")
class ElementSpec:
    """The shape and type of one tensor of an element: TensorFlow's `TensorSpec`.

    Args:
        shape: Its sizes, None for one that may differ; None: any shape.
        dtype: A torch dtype, or its name; "string" for text.
        name: Accepted as in TensorFlow; nothing uses it.
    """

    def __init__(
        self,
        shape: Sequence[int | None] | None,
        dtype: torch.dtype | str | type = torch.float32,
        name: str | None = None,
    ) -> None:
        self.shape = None if shape is None else tuple(None if one in (None, -1) else int(one or 0) for one in shape)
        self.dtype = _as_dtype(dtype)
        self.name = name

    def __repr__(self) -> str:
        return f"TensorSpec(shape={self.shape}, dtype={str(self.dtype).removeprefix('torch.')})"

    def convert(self, value: Any) -> Any:
        """The value as a tensor of this type; `ValueError` says what it has instead."""
        if self.dtype == TEXT:
            if not isinstance(value, str):
                raise ValueError(f"a {type(value).__name__}")
            return value
        try:
            tensor = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
        except (TypeError, ValueError):
            raise ValueError(f"{value!r:.60}") from None
        if not _holds(self.dtype, tensor):
            raise ValueError(f"the type {str(tensor.dtype).removeprefix('torch.')}")
        if self.shape is not None and not _fits(tensor.shape, self.shape):
            raise ValueError(f"the shape {tuple(tensor.shape)}")
        return tensor.to(self.dtype)


def _as_dtype(given: Any) -> Any:
    if given in (str, TEXT):
        return TEXT
    found = given if isinstance(given, torch.dtype) else getattr(torch, str(getattr(given, "name", given)), None)
    if isinstance(given, type):
        found = {int: torch.int64, float: torch.float32, bool: torch.bool}.get(given, _of_numpy(given))
    if not isinstance(found, torch.dtype):
        raise DataError(f"{given!r} is no type of a tensor.", where="TensorSpec", fix=["torch.float32", '"int64"'])
    return found


def _of_numpy(given: type) -> torch.dtype | None:
    try:
        return torch.as_tensor(np.zeros(0, given)).dtype
    except TypeError:
        return None


def _holds(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Whether a conversion keeps the kind: fractions are not cut off, and numbers do not become truth values."""
    if tensor.is_complex() or dtype.is_complex:
        return tensor.dtype == dtype
    if tensor.is_floating_point():
        return dtype.is_floating_point
    if dtype == torch.bool or dtype.is_floating_point or tensor.dtype == torch.bool:
        return dtype != torch.bool or tensor.dtype == torch.bool
    return bool((tensor.to(dtype).to(tensor.dtype) == tensor).all())


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(n in (None, size) for size, n in zip(shape, wanted, strict=True))


def as_signature(given: Any) -> Any:
    """The structure with an `ElementSpec` for everything that has a shape and a dtype, such as Keras's tensors."""
    if isinstance(given, ElementSpec):
        return given
    if isinstance(given, dict):
        return {name: as_signature(one) for name, one in given.items()}
    if isinstance(given, tuple):
        return tuple(map(as_signature, given))
    if hasattr(given, "shape") and hasattr(given, "dtype"):
        return ElementSpec(given.shape, given.dtype)
    raise DataError(
        f"output_signature has {given!r:.80}, which says neither shape nor type.",
        where=WHERE,
        fix=["(TensorSpec((None, 8), torch.float32), TensorSpec((), torch.int64))"],
    )


class SignedGenerator:
    """A generator function whose elements are converted to a signature, or refused with their number."""

    def __init__(self, function: Callable[..., Any], signature: Any) -> None:
        self._function, self._signature = function, as_signature(signature)
        self.__qualname__ = str(getattr(function, "__qualname__", type(function).__name__))

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for number, element in enumerate(self._function(*args, **kwargs)):
            yield _converted(element, self._signature, number, "")


def _converted(value: Any, signature: Any, number: int, part: str) -> Any:
    if isinstance(signature, dict):
        if not isinstance(value, dict) or value.keys() != signature.keys():
            raise _unlike(number, part, _shown(value), f"the parts {', '.join(map(repr, signature))}")
        return {name: _converted(value[name], one, number, f"{part}[{name!r}]") for name, one in signature.items()}
    if isinstance(signature, tuple):
        if not isinstance(value, tuple | list) or len(value) != len(signature):
            raise _unlike(number, part, _shown(value), f"{len(signature)} parts")
        pairs = enumerate(zip(value, signature, strict=True))
        return tuple(_converted(one, spec, number, f"{part}[{index}]") for index, (one, spec) in pairs)
    try:
        return signature.convert(value)
    except ValueError as error:
        raise _unlike(number, part, str(error), repr(signature)) from None


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"the parts {', '.join(map(repr, value))}"
    return f"{len(value)} parts" if isinstance(value, tuple | list) else f"a {type(value).__name__}"


def _unlike(number: int, part: str, found: str, wanted: str) -> DataError:
    return DataError(
        f"Element {number}{part} of a generator has {found}, and output_signature {wanted}.",
        where=WHERE,
        fix=["elements as output_signature says", "an output_signature of these elements", "no output_signature="],
    )
