"""What parameter servers store, by name, for listings. Pure; which server has which chunk is in `chunk_placement`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace
from torch import Tensor

from manyhands.parameter_server.protocol.chunk_placement import Chunk

__all__ = ["ServedVariable", "VariableShare", "listing", "with_versions"]


class VariableShare(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one server stores of a variable."""

    server: int
    chunks: int
    num_bytes: int
    version: int | None = None
    """How many updates the server has applied; None: it has not reported yet."""


class ServedVariable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One trained parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch calls it, without "torch."."""
    num_bytes: int
    shares: tuple[VariableShare, ...]

    """Every parameter, in model order. `divided`: each server's chunks, from `chunk_placement.divide`."""


def listing(names: Sequence[str], params: Sequence[Tensor], divided: Sequence[Sequence[Chunk]]) -> list[ServedVariable]:
    """Every parameter, in the order of the model. `divided`: each server's chunks, from `chunk_placement.divide`."""
    shares: list[list[VariableShare]] = [[] for _ in names]
    for server, chunks in enumerate(divided):
        for place in sorted({chunk.place for chunk in chunks}):
            sizes = [chunk.stop - chunk.start for chunk in chunks if chunk.place == place]
            num_bytes = sum(sizes) * params[place].element_size()
            shares[place].append(VariableShare(server=server, chunks=len(sizes), num_bytes=num_bytes))
    return [
        ServedVariable(
            name=name,
            shape=tuple(param.shape),
            dtype=str(param.dtype).removeprefix("torch."),
            num_bytes=param.numel() * param.element_size(),
            shares=tuple(kept),
        )
        for name, param, kept in zip(names, params, shares, strict=True)
    ]


def with_versions(variables: Sequence[ServedVariable], versions: Mapping[int, int | None]) -> list[ServedVariable]:
    """The same list, with the number of updates that each server has applied."""
    return [
        replace(one, shares=tuple(replace(share, version=versions.get(share.server)) for share in one.shares))
        for one in variables
    ]
