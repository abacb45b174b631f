"""mxfp8, mxfp4 and nvfp4: all codes, ties, scales, saturation, errors of the specification."""

from __future__ import annotations

import math

import pytest
import torch

import gcbench
from gcbench.core import codec
from gcbench.core.compressor import Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops import blockfloat, packing
from gcbench.ops.blockfloat import E2M1, E4M3

N = 1 << 19
NAMES = ("mxfp8", "mxfp4", "nvfp4")
NORMAL = torch.randn(N, generator=torch.Generator().manual_seed(0))
LAPLACE = torch.distributions.Laplace(0.0, 1.0).icdf(
    torch.rand(N, generator=torch.Generator().manual_seed(1)).clamp(1e-7, 1 - 1e-7)
)


def context(method: gcbench.Compressor, n: int, step: int = 0) -> Context:
    return Context(Segments.of([(n,)], method.granularity), torch.empty(0), Key(3, step, 0))


def codes_of(method: gcbench.Compressor, x: torch.Tensor) -> torch.Tensor:
    words = codec.encode(method, x, context(method, len(x))).parts[0]
    return words if words.dtype == torch.uint8 else packing.unpack(words, 4, len(x))


@pytest.mark.parametrize(
    ("name", "normal", "laplace"),
    [("mxfp8", 8.6e-4, 1.01e-3), ("mxfp4", 0.0132, 0.0161), ("nvfp4", 0.0090, 0.0086)],
)
def test_the_error(name, normal, laplace):
    """NMSE computed independently (methods of block floating point), to two digits."""
    method = gcbench.get_compressor(name)
    for x, expected in ((NORMAL, normal), (LAPLACE, laplace)):
        error = method.decompress(method.compress(x)) - x
        assert float(error @ error / (x @ x)) == pytest.approx(expected, rel=0.015)


def test_beside_int8():
    """On normal values int8 in blocks of 256 has 17 times less error, in fewer bits."""
    errors = []
    for name in ("mxfp8", "int8"):
        method = gcbench.get_compressor(name)
        error = method.decompress(method.compress(NORMAL)) - NORMAL
        errors.append(float(error @ error))
    assert errors[0] / errors[1] == pytest.approx(17.5, rel=0.05)


def test_all_codes_of_e2m1():
    """6 sets the scale to 1, so the block's values are the codes' own."""
    x = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    method = gcbench.get_compressor("mxfp4")
    assert codes_of(method, x).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15]
    assert torch.equal(method.decompress(method.compress(x)), x)
    assert codec.encode(method, x, context(method, 15)).parts[1].tolist() == [127]


def test_ties_go_to_the_even_code_and_above_the_top_saturates():
    x = torch.tensor([7.9, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 0.26, -0.25])
    expected = [7, 0, 2, 2, 4, 4, 6, 6, 14, 1, 0]
    assert codes_of(gcbench.get_compressor("mxfp4"), x).tolist() == expected


@pytest.mark.parametrize("element", [E2M1, E4M3], ids=["e2m1", "e4m3"])
def test_nearest_is_the_nearest_value(element):
    """Against a search over all values in float64; e4m3 also against torch's conversion."""
    v = NORMAL[:20000].abs() * element.top / 3
    v = torch.cat([v, torch.tensor([0.0, 2.0**-12, element.top, 2 * element.top])])
    table = element.table(v.device).double()
    codes = blockfloat.nearest(v, element).long()
    distance = (table[codes] - v.double()).abs()
    assert torch.equal(distance, (table - v.double().unsqueeze(1)).abs().amin(1))
    if element is E4M3:
        converted = v.clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(codes.to(torch.uint8), converted)


@pytest.mark.parametrize("name", NAMES)
def test_decoded_values_are_fixed_points(name):
    method = gcbench.get_compressor(name)
    for scale in (1.0, 2.0**90, 2.0**-90):
        once = method.decompress(method.compress(NORMAL[:4096] * scale))
        assert torch.equal(method.decompress(method.compress(once)), once)


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_is_unbiased_for_what_does_not_saturate(name):
    """The mean of 400 codings of 4,096 elements, against the declared target and variance.

    A deviation of the sum of squares, chi-square with 4,096 degrees of freedom, by 5 deviations.
    """
    method, x, steps = gcbench.get_compressor(name, rounding="stochastic"), NORMAL[:4096], 400
    ctx = context(method, 4096)
    target, variance = method.claims.target(x, ctx).double(), method.claims.variance(x, ctx)
    total = torch.zeros(4096, dtype=torch.float64)
    for step in range(steps):
        here = context(method, 4096, step)
        total += codec.decode(method, codec.encode(method, x, here), here)
    random = variance > 1e-12
    z = (total / steps - target)[random] / (variance[random] / steps).sqrt()
    assert float(z.square().mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / 4096) * 1.2)
    assert torch.allclose((total / steps)[~random].float(), target[~random].float(), atol=1e-5)


def test_two_scales_of_nvfp4():
    """Block maxima 6 and 3 of a tensor with a = 6: scales 448 and 224, whose codes are 126, 118."""
    x = torch.zeros(32)
    x[0], x[16] = 6.0, -3.0
    method = gcbench.get_compressor("nvfp4")
    words, scales, tops = codec.encode(method, x, context(method, 32)).parts
    assert scales.tolist() == [126, 118]
    assert tops.tolist() == [6.0]
    assert torch.equal(method.decompress(method.compress(x)), x)
    assert packing.unpack(words, 4, 32)[[0, 16]].tolist() == [7, 15]


def test_the_least_scale_of_nvfp4():
    """A block far below its tensor's largest, or of zeros, has the scale 2^-9, and never 0."""
    x = torch.zeros(48)
    x[0], x[16] = 1e6, 1e-9
    method = gcbench.get_compressor("nvfp4")
    ctx = context(method, 48)
    words, scales, tops = codec.encode(method, x, ctx).parts
    assert scales.tolist() == [126, 1, 1]
    with pytest.raises(PayloadError, match="nvfp4"):
        codec.decode(method, Payload((words, scales * scales.new_tensor([1, 1, 0]), tops)), ctx)


@pytest.mark.parametrize(
    ("name", "number", "index", "value"),
    [
        ("mxfp8", 0, 5, 127),
        ("mxfp8", 0, 5, 255),
        ("mxfp8", 1, 0, 255),
        ("mxfp8", 1, 1, 0),
        ("mxfp8", 1, 1, 18),
        ("mxfp4", 1, 0, 253),
        ("nvfp4", 1, 0, 127),
        ("nvfp4", 1, 3, 0),
        ("nvfp4", 2, 0, math.inf),
        ("nvfp4", 2, 0, -1.0),
        ("nvfp4", 2, 0, 0.0),
    ],
)
def test_payloads_that_no_encoder_sends_are_refused(name, number, index, value):
    method = gcbench.get_compressor(name)
    ctx = context(method, 2048)
    parts = [part.clone() for part in codec.encode(method, NORMAL[:2048], ctx).parts]
    parts[number][index] = value
    with pytest.raises(PayloadError, match=name):
        codec.decode(method, Payload(tuple(parts)), ctx)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_torchao_has_the_same_values(name):
    """Its `to_mx` with floor scales, as in the OCP specification."""
    pytest.importorskip("torchao", reason="torchao, an oracle, is not installed")
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    element = torch.float8_e4m3fn if name == "mxfp8" else torch.float4_e2m1fn_x2
    x = NORMAL[: 1 << 16] * 3
    theirs = MXTensor.to_mx(x.view(-1, 1024), element, 32).dequantize(torch.float32).view(-1)
    method = gcbench.get_compressor(name)
    assert torch.equal(method.decompress(method.compress(x)), theirs)
