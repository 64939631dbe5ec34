"""Who keeps what, by name."""

from __future__ import annotations

import torch

from manyhands.parameter_server.protocol.chunk_placement import CHUNK, divide
from manyhands.parameter_server.protocol.variable_listing import VariableShare, listing, with_versions

NAMES = ["large", "small", "half", "none"]
PARAMS = [torch.zeros(3, CHUNK), torch.zeros(5), torch.zeros(7, dtype=torch.bfloat16), torch.zeros(0, 4)]


def test_every_parameter_is_listed_with_its_servers_and_no_byte_is_missing() -> None:
    divided = divide([param.numel() for param in PARAMS], 2, {1: 1}, whole=False)
    found = {one.name: one for one in listing(NAMES, PARAMS, divided)}
    assert list(found) == NAMES
    assert sorted(share.chunks for share in found["large"].shares) == [1, 2]
    assert found["small"].shares == (VariableShare(server=1, chunks=1, num_bytes=20),)
    assert (found["half"].shape, found["half"].dtype, found["half"].num_bytes) == ((7,), "bfloat16", 14)
    for one, param in zip(found.values(), PARAMS, strict=True):
        assert one.num_bytes == param.nbytes == sum(share.num_bytes for share in one.shares)


def test_versions_are_those_of_the_servers_as_far_as_they_are_known() -> None:
    (large, *_) = listing(NAMES, PARAMS, divide([param.numel() for param in PARAMS], 2, {}, whole=False))
    (known,) = with_versions([large], {0: 12})
    assert [share.version for share in known.shares] == [12, None]
    assert with_versions([known], {}) == [large]
