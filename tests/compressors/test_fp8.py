"""Blockwise e4m3: codes by hand, every code, exact cases, errors beside int8's."""

from __future__ import annotations

import struct

import pytest
import torch

import gcbench
from gcbench.core import codec
from gcbench.core.compressor import Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError
from gcbench.core.exchange import Exchange, Lane

NOTHING = torch.empty(0)
FIRST = Key(0, 0, 0)


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def round_trip(x: torch.Tensor, name: str = "fp8", **fields) -> torch.Tensor:
    method = gcbench.get_compressor(name, **fields)
    return method.decompress(method.compress(x))


def relative_error(x: torch.Tensor, name: str) -> float:
    error = (x.double() - round_trip(x, name)).square().sum()
    return float(error / x.double().square().sum())


def value_of(code: int) -> float:
    """The table of the format: 1 bit of sign, 4 of exponent with bias 7, 3 of fraction."""
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    size = fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def test_the_bytes_on_the_wire():
    """With a = 448 the codes are those of the values themselves; ties go to the even code."""
    method = gcbench.get_compressor("fp8", granularity=8)
    x = torch.tensor([448.0, -1.0, 17.0, 19.0, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 0.0, 3.0])
    # 17 and 19 lie between 16, 18 and 20; half of 2^-9 ties to 0; 1.5 * 2^-9 to 2 * 2^-9.
    codes = [0x7E, 0xB8, 0x58, 0x5A, 0x01, 0x00, 0x02, 0x00, 0x7E]
    segments = Segments.of([(9,)], 8)
    payload = codec.encode(method, x, Context(segments, NOTHING, FIRST))
    packed = bytes(codes) + struct.pack("<2f", 448.0, 3.0)
    assert bytes(payload.to_bytes().tolist()) == packed
    expected = [448.0, -1.0, 16.0, 20.0, 2.0**-9, 0.0, 2.0**-8, 0.0, 3.0]
    torch.testing.assert_close(
        codec.decode(method, payload, Context(segments, NOTHING)),
        torch.tensor(expected),
        rtol=2e-7,
        atol=0,
    )
    assert 8 * gcbench.get_compressor("fp8").compress(normal(1 << 16)).payload.nbytes == 8.125 * (
        1 << 16
    )


def test_every_code():
    """All 256: decoded by the table of the format; NaN's two, 0x7f and 0xff, are refused."""
    method = gcbench.get_compressor("fp8", granularity=1)
    for code in range(256):
        payload = Payload((torch.tensor([code], dtype=torch.uint8), torch.tensor([448.0])))
        if code & 0x7F == 0x7F:
            with pytest.raises(PayloadError, match="NaN"):
                codec.decode(method, payload, Context(Segments((0, 1)), NOTHING))
        else:
            decoded = codec.decode(method, payload, Context(Segments((0, 1)), NOTHING))
            assert float(decoded) == pytest.approx(value_of(code), rel=2e-7, abs=0)


def test_scales_that_no_encoder_sends():
    method = gcbench.get_compressor("fp8", granularity=1)
    one = Segments((0, 1))
    for scale in (float("nan"), float("inf"), -1.0, 1e-38):
        payload = Payload((torch.tensor([0x7E], dtype=torch.uint8), torch.tensor([scale])))
        with pytest.raises(PayloadError, match="scale"):
            codec.decode(method, payload, Context(one, NOTHING))
    silent = Payload((torch.tensor([0x7E], dtype=torch.uint8), torch.tensor([0.0])))
    with pytest.raises(PayloadError, match="scale 0"):
        codec.decode(method, silent, Context(one, NOTHING))


def test_block_maxima_are_exact():
    """At every magnitude of float32 from 2^-100 on; a block of smaller ones is zeros."""
    x = normal(256 * 229).view(229, 256)
    x = (x / x.abs().amax(1, keepdim=True)).mul(
        torch.exp2(torch.arange(-100.0, 129.0) - 1)[:, None]
    )
    x = x.reshape(-1)
    there = round_trip(x).view(229, 256)
    rows, top = x.view(229, 256), x.view(229, 256).abs().amax(1)
    largest = rows.abs().argmax(1, keepdim=True)
    selected = top >= 2.0**-100
    assert 200 < int(selected.sum()) < 229
    assert torch.equal(there.gather(1, largest)[selected], rows.gather(1, largest)[selected])
    assert not there[~selected].any()
    assert there.isfinite().all()


def test_beside_int8():
    """The figures of the card."""
    x = normal(1 << 20)
    assert relative_error(x, "fp8") == pytest.approx(6.8e-4, rel=0.02)
    assert relative_error(x, "fp8") / relative_error(x, "int8") == pytest.approx(14, rel=0.02)
    x = x**5
    assert relative_error(x, "fp8") == pytest.approx(2.8e-4, rel=0.05)
    assert relative_error(x, "int8") == pytest.approx(3.1e-4, rel=0.05)
    apart = {name: ((x - round_trip(x, name)) / x).abs() for name in ("fp8", "int8")}
    assert float(apart["fp8"].median()) < 0.03
    assert float(apart["int8"].median()) == 1.0  # sent as 0


def test_the_bound_is_reached():
    """Half a step above a power of two, and half a denormal step, lose what the bound says."""
    method = gcbench.get_compressor("fp8")
    for worst in (1 + 2.0**-4, 2.0**-10):
        x = torch.tensor([448.0] + [worst] * 200)
        error = float((x.double() - round_trip(x)).square().sum())
        bound = method.claims.error_bound(x, Context(Segments.of([(201,)], 256)))
        assert 0.8 * bound < error <= bound


def test_workers_are_added_in_float32(simulated, clock):
    """448 + 4 x 1 over five workers: in e4m3 the ones vanish beside 448 already at the second."""
    xs = [torch.tensor([v, 448.0]) for v in (448.0, 1.0, 1.0, 1.0, 1.0)]
    world = simulated(5)
    lane = Lane(gcbench.get_compressor("fp8"), "allgather", 0, Segments.of([(2,)], 256))
    clock.start_step()
    mean = Exchange(world, [lane], 0, clock).mean(xs, step=1)
    torch.testing.assert_close(mean, torch.tensor([452 / 5, 448.0]), rtol=1e-6, atol=0)
