"""Keras's precision policies: for Keras models as in Keras, and as a cast of tensors.

A torch model computes in half precision with `precision="bf16"` of the trainer, or of `mh.join`. Start reading at
`Policy`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from manyhands.errors import EnvironmentProblem, SpecError
from manyhands.spec.keyword_check import checked_class, checked_keywords
from manyhands.torch_private import pytree

__all__ = ["Policy", "experimental", "global_policy", "set_global_policy", "set_policy"]

COMPUTE = {
    "float32": ("fp32", torch.float32),
    "float64": ("fp64", torch.float64),
    "mixed_float16": ("fp16", torch.float16),
    "mixed_bfloat16": ("bf16", torch.bfloat16),
}


@checked_class()
class Policy:
    """A precision by Keras's name.

    Args:
        name: "float32", "float64", "mixed_float16" or "mixed_bfloat16": weights in float32, computation in half.
    """

    def __init__(self, name: str) -> None:
        if name not in COMPUTE:
            raise SpecError(f"There is no policy {name!r}.", where="Policy", fix=[f'"{one}"' for one in COMPUTE])
        self.name = name
        self.precision, self._dtype = COMPUTE[name]
        """Our name, for `mh.Trainer` and `mh.join`."""

    @property
    def compute_dtype(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    @property
    def variable_dtype(self) -> str:
        return "float64" if self.name == "float64" else "float32"

    def cast_to_dtype(self, value: Any, dtype: torch.dtype | str | None = None) -> Any:
        """Floating-point tensors and arrays as tensors of the policy's computing dtype; others as they are.

        Args:
            value: A tensor, or a structure of them.
            dtype: Another dtype, or its name.
        """
        wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype or self._dtype
        if not isinstance(wanted, torch.dtype):
            raise SpecError(f"{dtype!r} is no dtype.", where="cast_to_dtype", fix=['"float16"', "torch.float16"])

        def cast(one: Any) -> Any:
            tensor = torch.as_tensor(one) if isinstance(one, np.ndarray) else one
            return tensor.to(wanted) if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else one

        return pytree.tree_map(cast, value)


class experimental:  # noqa: N801  # a module in TensorFlow
    """`tf.keras.mixed_precision.experimental`, where these names were before."""

    @staticmethod
    @checked_keywords
    def set_policy(policy: str | Policy) -> None:
        """As `set_policy`.

        Args:
            policy: A `Policy`, or its name.
        """
        set_policy(policy)


@checked_keywords
def set_policy(policy: str | Policy) -> None:
    """Set the policy of Keras layers that are made from now on: `keras.mixed_precision.set_global_policy`.

    Args:
        policy: A `Policy`, or its name.
    """
    chosen = policy if isinstance(policy, Policy) else Policy(policy)
    keras = sys.modules.get("keras")
    if keras is None:
        raise EnvironmentProblem(
            "A policy is for Keras layers, and Keras is not imported.",
            where="set_policy",
            fix=["import keras, before", f'precision="{chosen.precision}", of mh.Trainer or mh.join'],
        )
    keras.mixed_precision.set_global_policy(chosen.name)


set_global_policy = set_policy
experimental.Policy = Policy  # type: ignore[attr-defined]


@checked_keywords
def global_policy() -> Policy:
    """The policy of Keras layers that are made now."""
    keras = sys.modules.get("keras")
    return Policy(keras.mixed_precision.global_policy().name if keras is not None else "float32")
