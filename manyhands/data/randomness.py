"""The three global generators (`random`, `numpy`, `torch`), seeded with a slice's key and restored afterwards.

Random numbers inside depend on the key only: not on the rank, the number of workers or earlier draws.
`sample_order.slice_key` gives each slice its key.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random import mtrand

__all__ = ["drawn_unseeded", "randomness", "seed_all", "torch_randomness"]

# numpy's get_state and set_state take 90 microseconds together; swapping the generator takes one. Spares are kept
# because creating one is slow too; a nested use takes another.
_spare_generators: list[np.random.BitGenerator] = []


def seed_all(key: int) -> None:
    """Seed all three permanently. numpy's legacy generator takes 32 bits, so it gets the low ones."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    # torch.manual_seed also visits every kind of accelerator, which takes 160 microseconds even if there is none.
    torch.default_generator.manual_seed(key)
    if _cuda_in_use():
        torch.cuda.manual_seed_all(key)


def drawn_unseeded() -> bool:
    """Whether torch's generator was used without a seed, so that no later run can repeat its numbers.

    A seed that torch chose has more bits than a user would type.
    """
    seed = torch.default_generator.initial_seed()
    if seed < 2**32:
        return False
    fresh = torch.Generator().manual_seed(seed)
    return not torch.equal(fresh.get_state(), torch.default_generator.get_state())


@contextmanager
def randomness(key: int) -> Iterator[None]:
    """Seed all three inside, and restore them afterwards. About 30 microseconds in all."""
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    cuda_states = torch.cuda.get_rng_state_all() if _cuda_in_use() else None
    put_back = _swap_numpy_generator()
    try:
        seed_all(key)
        yield
    finally:
        random.setstate(python_state)
        put_back()
        torch.default_generator.set_state(torch_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class torch_randomness:  # noqa: N801 - reads like the one above; a class, as a generator takes twice as long per slice
    """The same for torch only, which is where a model draws its dropout: a few microseconds."""

    __slots__ = ("_cuda_states", "_key", "_state")

    def __init__(self, key: int) -> None:
        self._key = key

    def __enter__(self) -> None:
        self._state = torch.default_generator.get_state()
        self._cuda_states = torch.cuda.get_rng_state_all() if _cuda_in_use() else None
        torch.default_generator.manual_seed(self._key)
        if self._cuda_states is not None:
            torch.cuda.manual_seed_all(self._key)

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._state)
        if self._cuda_states is not None:
            torch.cuda.set_rng_state_all(self._cuda_states)


def _swap_numpy_generator() -> Callable[[], None]:
    outer = mtrand.get_bit_generator()
    inner = _spare_generators.pop() if _spare_generators else np.random.MT19937(0)
    mtrand.set_bit_generator(inner)

    def put_back() -> None:
        mtrand.set_bit_generator(outer)
        _spare_generators.append(inner)

    return put_back
