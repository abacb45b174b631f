"""u8bit: levels by hand, the nearest level of every number, errors beside int8's."""

from __future__ import annotations

import struct

import pytest
import torch

import gcbench
from gcbench.core import codec
from gcbench.core.compressor import Context, Payload, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops import u8bit


def relative_error(x: torch.Tensor, name: str) -> float:
    method = gcbench.get_compressor(name, granularity="tensor")
    lost = method.decompress(method.compress(x)).double() - x
    return float(lost.square().sum() / x.double().square().sum())


def test_the_levels():
    """Zero, one, and the centers of 2, 4, ..., 64 equal parts of six decades."""
    levels = u8bit.LEVELS
    assert len(levels) == 128
    assert levels[[0, 127]].tolist() == [0, 1]
    for code, value in ((1, 3.25e-6), (2, 7.75e-6), (3, 2.125e-5), (63, 0.10703125)):
        assert float(levels[code]) == pytest.approx(value, rel=1e-7)
    assert float(levels[126]) == pytest.approx(1 - 0.9 / 128, rel=1e-7)
    for power in range(1, 7):
        inside = (levels > 10.0 ** (power - 7)) & (levels < 10.0 ** (power - 6))
        assert int(inside.sum()) == 2**power


def test_every_number_gets_its_nearest_level():
    """All halfway points and their neighbors, and numbers of all magnitudes."""
    limits = u8bit.LIMITS
    beside = [limits, limits.nextafter(torch.tensor(1.0)), limits.nextafter(torch.tensor(0.0))]
    spread = torch.logspace(-8, 0, 20001).clamp(max=1)
    x = torch.cat((*beside, spread, -spread, torch.ones(1)))
    method = gcbench.get_compressor("u8bit")
    distance = (x.abs().double()[:, None] - u8bit.LEVELS.double()).abs()
    lost = (method.decompress(method.compress(x)).double() - x.double()).abs()
    # LIMITS are rounded to float32, so an element at a limit may be sent to either side.
    torch.testing.assert_close(lost, distance.amin(1), rtol=0, atol=2.0**-23)
    codes = method.compress(x).payload.parts[0]
    exact = torch.bucketize(x.abs(), limits) * x.sign()
    assert torch.equal(codes, exact.to(torch.int8))


def test_the_bytes_on_the_wire():
    method = gcbench.get_compressor("u8bit")
    payload = method.compress(torch.tensor([-8.0, 4.0, 0.0, 1e-9])).payload
    assert bytes(payload.to_bytes().tolist()) == struct.pack("<4bf", -127, 91, 0, 0, 8.0)


@pytest.mark.parametrize(
    ("code", "scale"), [(1, 0.0), (-128, 1.0), (1, float("inf")), (1, float("nan")), (1, -1.0)]
)
def test_payloads_that_no_encoder_sends(code, scale):
    parts = (torch.tensor([code], dtype=torch.int8), torch.tensor([scale]))
    with pytest.raises(PayloadError):
        codec.decode(gcbench.get_compressor("u8bit"), Payload(parts), Context(Segments((0, 1))))


def test_beside_int8():
    """The numbers of the module's docstring: worse for normal input, better for heavy tails."""
    x = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    assert relative_error(x, "u8bit") == pytest.approx(2.4e-4, rel=0.1)
    assert relative_error(x, "u8bit") == pytest.approx(2 * relative_error(x, "int8"), rel=0.1)
    assert relative_error(x**5, "u8bit") == pytest.approx(5.3e-4, rel=0.15)
    assert relative_error(x**5, "int8") == pytest.approx(9.9e-3, rel=0.3)
