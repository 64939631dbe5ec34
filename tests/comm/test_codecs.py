"""What codecs make of values: how far off they may be, what is not finite, and that nothing is lost over time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyhands.comm import codecs
from manyhands.comm.codecs import Bf16, Codec, Int8

LENGTHS = [0, 1, 2, 1023, 1024, 1025, 3000, Int8.SPAN + 1]
CODECS: list[Codec] = [Bf16(), Int8()]


def there_and_back(codec: Codec, values: Tensor, residual: Tensor | None = None) -> Tensor:
    data = torch.full((codec.num_bytes(values.numel()),), 255, dtype=torch.uint8)
    codec.encode(values, data, residual)
    decoded = torch.full((values.numel(),), math.nan)
    codec.decode(data, decoded)
    return decoded


def random_values(numel: int, seed: int = 0) -> Tensor:
    """Magnitudes over many decades, changing from block to block."""
    generator = torch.Generator().manual_seed(seed)
    decades = torch.randint(-30, 30, (numel // 700 + 1,), generator=generator).repeat_interleave(700)[:numel]
    return torch.randn(numel, generator=generator) * 10.0**decades


def block_maxima(values: Tensor) -> Tensor:
    """For each value, the largest magnitude in its block."""
    return torch.cat([block.abs().max().expand_as(block) for block in values.split(Int8.BLOCK)])


@pytest.mark.parametrize("numel", LENGTHS)
def test_bf16_is_off_by_at_most_one_part_in_256(numel: int) -> None:
    values = random_values(numel)
    assert bool(((there_and_back(Bf16(), values) - values).abs() <= values.abs() / 256).all())
    assert Bf16().num_bytes(numel) <= 2 * numel + 3


@pytest.mark.parametrize("numel", LENGTHS[1:])
def test_int8_is_off_by_at_most_half_a_step_of_its_block(numel: int) -> None:
    values = random_values(numel)
    allowed = block_maxima(values) / 254 * (1 + 1e-5)
    assert bool(((there_and_back(Int8(), values) - values).abs() <= allowed).all())
    assert Int8().num_bytes(numel) <= numel + 4 * math.ceil(numel / Int8.BLOCK) + 3


def test_nothing_is_encoded_as_nothing() -> None:
    for codec in CODECS:
        assert there_and_back(codec, torch.empty(0), torch.empty(0) if codec.feeds_back else None).numel() == 0


ANY_FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=200)
@given(st.lists(ANY_FLOAT, min_size=1, max_size=40))
@example([3.4028234663852886e38])
@example([1e-45])
@example([3.4028234663852886e38, -1e-45, 0.0])
def test_any_finite_block_stays_finite_and_within_its_bound(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    decoded = there_and_back(Int8(), values)
    largest = values.abs().max().double()
    allowed = torch.maximum(largest / 254 * (1 + 1e-5), torch.tensor(1.6e-36, dtype=torch.float64))
    assert bool(((decoded.double() - values.double()).abs() <= allowed).all())


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 4999), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_not_finite_is_seen_on_the_other_side(place: int, value: float) -> None:
    values = random_values(5000)
    values[place] = value
    assert not bool(there_and_back(Bf16(), values)[place].isfinite())
    residual = torch.ones(5000)
    decoded = there_and_back(Int8(), values, residual)
    block = place // Int8.BLOCK
    expected = torch.arange(5000) // Int8.BLOCK == block
    assert decoded.isnan().tolist() == expected.tolist()
    assert bool(residual.isfinite().all()), "the residual outlives a step that is skipped"


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 2500), st.integers(0, 1000))
def test_with_its_residual_nothing_is_lost_over_many_steps(numel: int, seed: int) -> None:
    """The sum of what arrives is the sum of what was sent, but for the last residual."""
    residual = torch.zeros(numel)
    sent, arrived = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    largest = torch.zeros(numel)
    for step in range(30):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(seed * 100 + step))
        sent += values
        arrived += there_and_back(Int8(), values, residual)
        largest = torch.maximum(largest, block_maxima(values))
    torch.testing.assert_close(arrived + residual, sent, rtol=0, atol=30 * 2**-22)
    assert bool((residual.abs() <= largest / 120).all()), "it does not grow"


def test_small_values_beside_a_large_one_arrive_in_the_end() -> None:
    """Without the residual they would be rounded to 0 for ever."""
    values = torch.full((1024,), 1e-3)
    values[0] = 1.0
    residual = torch.zeros(1024)
    arrived = sum(there_and_back(Int8(), values, residual) for _ in range(100))
    torch.testing.assert_close(arrived[1:], torch.full((1023,), 0.1), rtol=0.05, atol=0)
    assert not there_and_back(Int8(), values)[1:].any()


def test_encoding_leaves_the_values_alone_and_is_the_same_every_time() -> None:
    values = random_values(3000)
    before, encoded = values.clone(), []
    for codec in (*CODECS, *CODECS):
        data = torch.zeros(codec.num_bytes(3000), dtype=torch.uint8)
        codec.encode(values, data)
        encoded.append(data.tolist())
    assert torch.equal(values, before)
    assert encoded[:2] == encoded[2:]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_pass_through_fp32(codec: Codec, dtype: torch.dtype) -> None:
    values = torch.randn(2000, generator=torch.Generator().manual_seed(0)).to(dtype)
    data = torch.zeros(codec.num_bytes(2000), dtype=torch.uint8)
    codec.encode(values, data)
    decoded = torch.empty_like(values)
    codec.decode(data, decoded)
    assert torch.equal(decoded, there_and_back(codec, values.float()).to(dtype))
    with pytest.raises(TypeError, match="int64"):
        codec.encode(torch.arange(2000), data)


@pytest.mark.skipif(codecs.library is None, reason="NOT SHOWN HERE: the C extension is not built")
@pytest.mark.parametrize("numel", LENGTHS)
def test_the_c_extension_gives_the_same_bits(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = random_values(numel)
    values[numel // 2 : numel // 2 + 1] = math.inf
    found = []
    for library in (codecs.library, None):
        monkeypatch.setattr(codecs, "library", library)
        residual = random_values(numel, seed=1) * 1e-3
        data = torch.zeros(Int8().num_bytes(numel), dtype=torch.uint8)
        Int8().encode(values, data, residual)
        decoded = torch.zeros(numel)
        Int8().decode(data, decoded)
        scales = 4 * math.ceil(numel / Int8.BLOCK)
        encoded = data[scales:].clone()
        encoded[:numel][decoded.isnan()] = 0  # the bytes of a value that is not finite have no meaning
        found.append((data[:scales].view(torch.float32).nan_to_num(-1.0), encoded, decoded.nan_to_num(-1.0), residual))
    for native, plain in zip(*found, strict=True):
        assert torch.equal(native, plain)
