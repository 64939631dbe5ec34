"""What to type instead, for common errors of torch that do not say so themselves."""

from __future__ import annotations

import re

__all__ = ["hint_for"]

NO_GPU = re.compile(
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
    r"|CUDA driver .* insufficient"
)
OTHER_DTYPES = re.compile(
    r"must have the same dtype, but got (?P<a>\w+) and (?P<b>\w+)"
    r"|same dtype, but got: (?P<c>\w+) != (?P<d>\w+)"
    r"|Input type \((?:torch\.)?(?P<e>\w+?)(?:Tensor)?\)"
    r" and (?:weight|bias) type \((?:torch\.)?(?P<f>\w+?)(?:Tensor)?\)"
    r"|expected scalar type (?P<g>\w+) but found (?P<h>\w+)"
    r"|Found dtype (?P<i>\w+) but expected (?P<j>\w+)"
    r"|expected .*?dtype (?P<k>\w+) but got (?:dtype )?(?P<l>\w+)"
)
CALLED_WITH_MODEL = re.compile(r"argument '(?:input|self)' \(position 1\) must be Tensor, not (?!NoneType)[A-Z]\w*")


def hint_for(error: BaseException) -> str | None:
    """One sentence, or None."""
    text = str(error)
    if NO_GPU.search(text):
        return (
            "No GPU here; batches are on the worker's device already, and so is the model: no .cuda(), no .to('cuda')."
        )
    if isinstance(error, TypeError) and CALLED_WITH_MODEL.search(text):
        return "A loss is called with (model, batch): loss=lambda model, batch: criterion(model(batch[0]), batch[1])."
    found = OTHER_DTYPES.search(text)
    if found is None:
        return None
    kinds = {kind.lower() for kind in found.groups() if kind}
    if not kinds & {"double", "float64"} or not kinds & {"float", "float32"}:
        return None
    return (
        "Data and model differ in dtype: numpy's numbers are float64, a model's float32. Make the data float32, "
        'x.astype("float32") or tensor.float(); or use float64 for both with precision="fp64".'
    )
