"""Blockwise 8-bit quantization: codes by hand, exact cases, errors against integrals."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from builders import encode_shards

import gcbench
from gcbench import ops
from gcbench.core import codec
from gcbench.core.compressor import TILE, Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError, UsageError

NOTHING = torch.empty(0)
FIRST = Key(0, 0, 0)
FLOAT_MAX = (2 - 2**-23) * 2.0**127
ROUNDINGS = ("nearest", "stochastic")


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def blocks(n: int, block: int = 256) -> Segments:
    return Segments.of([(n,)], block)


def round_trip(x: torch.Tensor, key: Key = FIRST, **fields) -> torch.Tensor:
    method = gcbench.get_compressor("int8", **fields)
    segments = Segments.of([(len(x),)], method.granularity)
    return codec.decode(
        method, codec.encode(method, x, Context(segments, NOTHING, key)), Context(segments, NOTHING)
    )


def relative_error(x: torch.Tensor, **fields) -> float:
    return float((x.double() - round_trip(x, **fields)).square().sum() / x.double().square().sum())


def test_the_bytes_on_the_wire():
    """Codes in two's complement, one byte each, then each block's largest magnitude."""
    method = gcbench.get_compressor("int8", granularity=4)
    # 127 x / a by hand; ties (62.5, 63.5) go to the even code. The last block is short.
    x = torch.tensor([2.0, -1.0, 0.0, 0.5, -254.0, 125.0, 127.0, -1.0, 3.0])
    expected = [127, -64, 0, 32, -127, 62, 64, 0, 127]
    payload = codec.encode(method, x, Context(blocks(9, 4), NOTHING, Key(0, 0, 0)))
    packed = struct.pack("<9b", *expected) + struct.pack("<3f", 2.0, 254.0, 3.0)
    assert bytes(payload.to_bytes().tolist()) == packed
    assert method.layout(blocks(9, 4)) == ((torch.int8, 9), (torch.float32, 3))
    by_hand = [2.0, -64 / 127 * 2, 0.0, 32 / 127 * 2, -254.0, 124.0, 128.0, 0.0, 3.0]
    decoded = codec.decode(method, payload, Context(blocks(9, 4), NOTHING))
    torch.testing.assert_close(decoded, torch.tensor(by_hand), rtol=2e-7, atol=0)


@pytest.mark.parametrize(("block", "bits"), [(256, 8.125), (32, 9.0), (4096, 8.0078125)])
def test_bits_an_element(block, bits):
    method = gcbench.get_compressor("int8", granularity=block)
    segments = blocks(2**16, block)
    payload = codec.encode(method, normal(2**16), Context(segments, NOTHING, Key(0, 0, 0)))
    assert 8 * payload.nbytes == codec.bits(method, segments) == bits * 2**16


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_bytes_signs_and_spikes_are_exact(rounding):
    """(k / 127) * 127 is k in float32 for every code: no draw and no rounding can move it."""
    codes = torch.arange(-127.0, 128.0)
    signs = torch.tensor([1.0, -1.0, 0.0, -0.0, 1.0])
    spikes = torch.zeros(7 * 16)
    spikes[::16] = torch.arange(1.0, 8.0)
    for step in range(20):
        key = Key(0, step, 0)
        assert torch.equal(round_trip(codes, key, rounding=rounding), codes)
        assert torch.equal(round_trip(4 * codes, key, rounding=rounding), 4 * codes)
        assert torch.equal(round_trip(signs, key, rounding=rounding), signs)
        assert torch.equal(round_trip(spikes, key, rounding=rounding, granularity=16), spikes)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_block_maxima_are_exact(rounding):
    """a / a * 127 / 127 * a is a for every a; with a / 127 as the scale some would be missed."""
    tops = torch.cat([normal(20_000).abs() + 0.1, torch.tensor([FLOAT_MAX, 1e30, 2.0**-100])])
    assert (tops / 127 * 127 != tops).any(), "a scale a / 127 must fail for this to mean anything"
    x = torch.stack([0.3 * tops, -tops], dim=1).view(-1)
    decoded = round_trip(x, rounding=rounding, granularity=2)
    assert torch.equal(decoded[1::2], -tops)
    assert decoded.isfinite().all()


def test_nearest_error_is_half_a_step_at_most():
    """|x - x'| <= a / 254 up to rounding in float32, and a tie between two codes reaches it."""
    x = normal(256 * 1000, 2)
    step = x.view(-1, 256).abs().amax(1, keepdim=True).double() / 127
    errors = (x.double() - round_trip(x)).view(-1, 256).abs() / step
    assert 0.4999 < float(errors.max()) <= 0.5 + 2**-15
    middle = torch.tensor([127.0, 0.5, 1.5, 2.5, -3.5])
    assert round_trip(middle).tolist() == [127.0, 0.0, 2.0, 2.0, -4.0]


def expected_top_square(n: int) -> float:
    """E[max x^2] of n normal values: the integral of 2 t (1 - P(|x| < t)^n), by Simpson's rule."""
    steps, end = 4000, 12.0
    total = 0.0
    for i in range(steps + 1):
        t = end * i / steps
        value = 2 * t * -math.expm1(n * math.log1p(-math.erfc(t / math.sqrt(2)))) if t else 0.0
        total += value * (1 if i in (0, steps) else 4 if i % 2 else 2)
    return total * end / steps / 3


@pytest.mark.parametrize("block", [64, 256, 4096])
@pytest.mark.parametrize(("rounding", "share"), [("nearest", 1 / 12), ("stochastic", 1 / 6)])
def test_gaussian_error_is_the_integral(block, rounding, share):
    """E[a^2] / 127^2 times 1/12, or the mean 1/6 of p (1 - p); all but the largest element."""
    x = normal(2**20, 3)
    analytic = expected_top_square(block) / 127**2 * share * (block - 1) / block
    assert relative_error(x, granularity=block, rounding=rounding) == pytest.approx(
        analytic, rel=0.01
    )
    if (block, rounding) == (256, "nearest"):
        assert analytic == pytest.approx(4.84e-5, rel=1e-3)


@pytest.mark.parametrize("share", [0.5 - 2**-12, 0.5 + 2**-12])
def test_long_blocks_stay_contractive(share):
    """A million elements around half a step all err by half a step: the error is below the input.

    n (a / 254)^2 is 15.5 here, the largest element's energy 1: a bound without the other elements'
    own energy would not be below the input.
    """
    method = gcbench.get_compressor("int8", granularity="tensor")
    x = torch.full((1_000_000,), share / 127)
    x[17] = -1.0
    energy = float(x.double().square().sum())
    error = relative_error(x, granularity="tensor") * energy
    assert (
        0.9 * energy
        < error
        <= method.claims.error_bound(x, Context(Segments.of([(len(x),)])))
        < energy
    )


@pytest.mark.parametrize("value", [3.25, -100.75, 0.125])
def test_stochastic_rounding_has_the_probability_of_the_rest(value):
    """P(upper) = frac(|y|): the count over T draws within 5 sd of binomial: error below 6e-7."""
    draws = 40_000
    x = torch.full((draws,), value)
    x[0] = 127.0
    decoded = round_trip(x, Key(5, 1, 2), rounding="stochastic", granularity="tensor")[1:]
    low = math.floor(abs(value))
    p = abs(value) - low
    assert set((decoded.double() / math.copysign(1, value)).round().tolist()) == {low, low + 1.0}
    hits = int((decoded.abs() > low + 0.5).sum())
    assert abs(hits - p * draws) < 5 * math.sqrt(p * (1 - p) * draws)
    method = gcbench.get_compressor("int8", rounding="stochastic", granularity="tensor")
    variance = method.claims.variance(x, Context(Segments.of([(draws,)]), NOTHING))
    torch.testing.assert_close(variance[1:], torch.full_like(variance[1:], p * (1 - p)))
    assert variance[0] == 0


def test_draws_belong_to_elements():
    """A stretch of whole blocks encodes alike wherever the bucket is cut, and ranks differ."""
    method = gcbench.get_compressor("int8", rounding="stochastic")
    x = normal(3 * TILE + 100, 4)
    whole = codec.encode(method, x, Context(blocks(len(x)), NOTHING, Key(7, 2, 1))).parts[0]
    shards = encode_shards(method, x, blocks(len(x)), NOTHING, Key(7, 2, 1), [0, TILE, len(x)])
    assert torch.equal(torch.cat([shard.parts[0] for shard in shards]), whole)
    other = codec.encode(method, x, Context(blocks(len(x)), NOTHING, Key(7, 2, 2))).parts[0]
    assert not torch.equal(other, whole)
    assert int((other - whole).abs().max()) == 1


def test_the_owner_adds_in_float32():
    """Merging 1, 1 and 1/254 of three blocks: bytes could not hold the sum, float32 does."""
    method = gcbench.get_compressor("int8", granularity=2)
    xs = [torch.tensor([127.0, value]) for value in (1.0, 1.0, 2.0)]
    payloads = [codec.encode(method, x, Context(blocks(2, 2), NOTHING, Key(0, 0, 0))) for x in xs]
    mean = codec.mean(method, payloads, Context(blocks(2, 2), NOTHING))
    torch.testing.assert_close(mean, torch.tensor([127.0, 4 / 3]))
    merged = codec.merge(method, payloads, Context(blocks(2, 2), NOTHING, Key(0, 0, 0)))
    assert merged.count == 3
    assert merged.parts[0].tolist() == [127, 1]
    assert codec.decode(method, merged, Context(blocks(2, 2), NOTHING)).tolist() == [127.0, 1.0]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_tiny_blocks_are_sent_as_zeros(rounding):
    """Below 2^-100 a quotient could leave float32: scale 0, codes 0, and the others unharmed."""
    x = torch.tensor([2.0**-100, -(2.0**-101), 2.0**-101, 1e-42, 5.0, 1.0])
    method = gcbench.get_compressor("int8", granularity=2, rounding=rounding)
    payload = codec.encode(method, x, Context(blocks(6, 2), NOTHING, Key(0, 0, 0)))
    assert payload.parts[1].tolist() == [2.0**-100, 0.0, 5.0]
    assert payload.parts[0][2:4].tolist() == [0, 0]
    assert payload.parts[0][[0, 4]].tolist() == [127, 127]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_gradients_that_are_not_finite_are_refused(rounding, value):
    """Their block has no codes and a scale that no reader takes; the other blocks are as before."""
    x = normal(600, 8)
    x[300] = value
    method = gcbench.get_compressor("int8", rounding=rounding)
    payload = codec.encode(method, x, Context(blocks(600), NOTHING, FIRST))
    assert not payload.parts[0][256:512].any()
    assert payload.parts[1].isfinite().tolist() == [True, False, True]
    with pytest.raises(PayloadError, match="int8: a block's scale"):
        codec.decode(method, payload, Context(blocks(600), NOTHING))
    x[256:512] = 0
    assert torch.equal(
        codec.encode(method, x, Context(blocks(600), NOTHING, FIRST)).parts[0], payload.parts[0]
    )


def test_corrupt_payloads_are_refused():
    method = gcbench.get_compressor("int8")
    segments = blocks(600)
    codes, top = codec.encode(method, normal(600), Context(segments, NOTHING, Key(0, 0, 0))).parts
    outside = codes.clone()
    outside[599] = -128
    with pytest.raises(PayloadError, match="int8: code -128"):
        codec.decode(method, Payload((outside, top)), Context(segments, NOTHING))
    for scale in (math.nan, math.inf, -1.0, ops.statistics.TINY / 2):
        wrong = top.clone()
        wrong[2] = scale
        with pytest.raises(PayloadError, match="int8: a block's scale"):
            codec.decode(method, Payload((codes, wrong)), Context(segments, NOTHING))
    for parts in [(codes,), (codes, top[:2]), (codes[1:], top), (codes.view(torch.uint8), top)]:
        with pytest.raises(PayloadError, match="int8"):
            codec.decode(method, Payload(parts), Context(segments, NOTHING))


@pytest.mark.parametrize(
    ("fields", "unbiased", "contractive"),
    [
        ({}, False, True),
        ({"granularity": "tensor"}, False, True),
        ({"rounding": "stochastic"}, True, True),
        ({"rounding": "stochastic", "granularity": "tensor"}, True, False),
        ({"rounding": "stochastic", "granularity": 2**14}, True, False),
    ],
)
def test_declarations_follow_the_fields(fields, unbiased, contractive):
    method = gcbench.get_compressor("int8", **fields)
    assert (method.claims.unbiased, method.claims.contractive) == (unbiased, contractive)


def test_unknown_rounding_is_refused():
    with pytest.raises(UsageError, match=r"int8.*'up'.*'nearest' or 'stochastic'"):
        gcbench.get_compressor("int8", rounding="up")
