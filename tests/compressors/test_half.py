"""float16 and bfloat16: rounding against independent arithmetic, range, and sums over workers."""

from __future__ import annotations

import math
import struct

import pytest
import torch

import gcbench
from gcbench.core import codec, memory
from gcbench.core.compressor import Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError, UsageError
from gcbench.core.exchange import Exchange, Lane

NOTHING = torch.empty(0)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST = {"fp16": 65504.0, "bf16": (2 - 2**-7) * 2.0**127}
FLOAT_MAX = (2 - 2**-23) * 2.0**127


def one(n: int) -> Segments:
    return Segments.of([(n,)])


def encode(name: str, x: torch.Tensor) -> Payload:
    return codec.encode(
        gcbench.get_compressor(name), x, Context(one(len(x)), NOTHING, Key(0, 0, 0))
    )


def round_trip(name: str, x: torch.Tensor) -> torch.Tensor:
    return codec.decode(
        gcbench.get_compressor(name), encode(name, x), Context(one(len(x)), NOTHING)
    )


def run(simulated, clock, name, collective, xs):
    world = simulated(len(xs))
    lane = Lane(gcbench.get_compressor(name), collective, 0, one(len(xs[0])))
    clock.start_step()
    mean = Exchange(world, [lane], 0, clock).mean(xs, step=1)
    clock.end_step()
    return mean, world


def spread(low: int, high: int, n: int = 4000) -> torch.Tensor:
    """Values of both signs, their exponents uniform on [low, high)."""
    generator = torch.Generator().manual_seed(n + low)
    exponent = torch.rand(n, generator=generator, dtype=torch.float64) * (high - low) + low
    sign = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
    return (sign * torch.exp2(exponent)).float()


def half_bytes(value: float) -> bytes:
    """Python's own binary16 in 2 bytes: correctly rounded, and no relation of torch."""
    return struct.pack("<e", max(-65504.0, min(65504.0, value)))


def brain_bytes(value: float) -> bytes:
    """The upper half of the float32's bits, rounded to nearest even in integers."""
    clipped = max(-LARGEST["bf16"], min(LARGEST["bf16"], value))
    bits = struct.unpack("<I", struct.pack("<f", clipped))[0]
    upper, rest = bits >> 16, bits & 0xFFFF
    up = rest > 0x8000 or (rest == 0x8000 and upper & 1)
    return (upper + up).to_bytes(2, "little")


@pytest.mark.parametrize(("name", "expected"), [("fp16", half_bytes), ("bf16", brain_bytes)])
def test_the_bytes_on_the_wire(name, expected):
    """Normal, denormal and clipped values, and ties both ways, against independent arithmetic."""
    ties = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 2**-25, 3 * 2**-25])
    edges = torch.tensor([0.0, -0.0, 65504.0, 65519.99, 65520.0, 1e30, FLOAT_MAX, 2**-14, 2**-24])
    x = torch.cat([ties, -ties, edges, -edges, spread(-27, 17), spread(-149, 128)])
    payload = encode(name, x)
    assert payload.parts[0].dtype == DTYPES[name]
    assert payload.nbytes == 2 * len(x)
    assert bytes(payload.to_bytes().tolist()) == b"".join(expected(float(value)) for value in x)


@pytest.mark.parametrize("name", DTYPES)
def test_every_finite_code_survives(name):
    """All 65536 codes: the finite ones come back as the same bits, denormals and -0 included."""
    codes = torch.arange(-(2**15), 2**15).to(torch.int16)
    method = gcbench.get_compressor(name)
    finite = codes[codes.view(DTYPES[name]).isfinite()]
    assert len(finite) == {"fp16": 65536 - 2 * 1024, "bf16": 65536 - 2 * 128}[name]
    values = codec.decode(
        method, Payload((finite.view(DTYPES[name]),)), Context(one(len(finite)), NOTHING)
    )
    again = encode(name, values)
    assert torch.equal(again.parts[0].view(torch.int16), finite)
    for code in codes[~codes.view(DTYPES[name]).isfinite()][::61]:
        with pytest.raises(PayloadError, match=f"{name}: .* not finite"):
            codec.decode(
                method, Payload((code.view(1).view(DTYPES[name]),)), Context(one(1), NOTHING)
            )


@pytest.mark.parametrize("name", DTYPES)
def test_nothing_infinite_is_sent(name):
    """Everything beyond the largest value saturates; a plain cast overflows there."""
    top = LARGEST[name]
    x = torch.tensor([FLOAT_MAX, 3.4e38, -FLOAT_MAX])
    assert x.to(DTYPES[name]).isinf().all(), "a plain cast must overflow for this to mean anything"
    assert round_trip(name, x).tolist() == [top, top, -top]
    x = torch.tensor([65504.0, 65520.0, 7e4, -1e30])
    assert round_trip("fp16", x).tolist() == [65504.0, 65504.0, 65504.0, -65504.0]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1.2, 1.4, 1.7, 2.0, 0.01])
def test_gaussian_error_is_the_analytic_one(name, scale):
    """u^2 / (8 ln 2) at every place of the scale in a binade, to within 1 % on both sides."""
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(1)) * scale
    x = x.double().float()
    error = float((x.double() - round_trip(name, x)).square().sum() / x.double().square().sum())
    analytic = {"fp16": 4.2996e-8, "bf16": 2.7517e-6}[name]
    assert gcbench.get_compressor(name).claims.gaussian_error == pytest.approx(analytic, rel=1e-4)
    assert error == pytest.approx(analytic, rel=0.01)


@pytest.mark.parametrize(
    ("name", "worst"),
    [
        ("fp16", [1 + 2**-11, 2**-14 + 2**-25, 2**-25, 3 * 2**-25, 7e4, 1e30]),
        ("bf16", [1 + 2**-8, 2**-126 + 2**-134, 2**-134, 3 * 2**-134, FLOAT_MAX]),
    ],
)
def test_error_bound_holds_and_is_reached(name, worst):
    """Per element over the whole range of float32; ties, denormals and clipping reach it."""
    method = gcbench.get_compressor(name)
    values = torch.cat([spread(-149, 128, 1000), spread(-30, 20, 1000), torch.tensor(worst)])
    for x in values.split(1):
        error = float((x.double() - round_trip(name, x).double()).square())
        assert error <= method.claims.error_bound(x, Context(one(1))) <= float(x.double().square())
    for value in worst:
        x = torch.tensor([value])
        error = float((x.double() - round_trip(name, x).double()).square())
        assert error >= 0.99 * method.claims.error_bound(x, Context(one(1))) > 0


def test_float16_loses_what_lies_below_its_denormals():
    """Half of 2^-24 ties to zero: such gradients need a larger scale, or bfloat16."""
    x = torch.tensor([2.0**-25, 1e-8, 1.01 * 2**-25])
    assert round_trip("fp16", x).tolist() == [0.0, 0.0, 2.0**-24]
    assert (round_trip("bf16", x) != 0).all()


@pytest.mark.parametrize("collective", ["twoshot", "allgather"])
@pytest.mark.parametrize("name", DTYPES)
def test_integers_meet_exactly(simulated, clock, name, collective):
    """Sums of bytes that are multiples of the number of workers: exact in every exchange."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-31, 32, (3000,), generator=generator).float()
    mean, world = run(simulated, clock, name, collective, [x, 3 * x, x, -x])
    assert torch.equal(mean, x)
    down = 4 * 2 * 3000 if collective == "allgather" else 2 * 3000
    for traffic in world.traffic:
        assert (traffic.payload_up, traffic.payload_down) == (2 * 3000, down)


def test_workers_are_added_in_float32(simulated, clock):
    """2048 + 1 is 2048 in float16, twice; float32 at the owner knows better."""
    xs = [torch.full((5,), value) for value in (2048.0, 1.0, 1.0)]
    exact = torch.full((5,), 2050.0) / 3
    assert torch.equal(run(simulated, clock, "fp16", "allgather", xs)[0], exact)
    # ... and rounds once more on the way down.
    assert torch.equal(run(simulated, clock, "fp16", "twoshot", xs)[0], exact.half().float())
    assert float(exact[0]) != float(exact.half()[0])


def test_a_sum_beyond_float16_is_no_fault(simulated, clock):
    """The sum of two workers overflows a half, their mean does not."""
    xs = [torch.tensor([1.0, 4e4])] * 2
    for collective in ("twoshot", "allgather"):
        assert run(simulated, clock, "fp16", collective, xs)[0].tolist() == [1.0, 4e4]


@pytest.mark.parametrize(("name", "least"), [("fp16", 2.0**-24), ("bf16", 2.0**-133)])
def test_division_comes_after_the_reduction(simulated, clock, name, least):
    """Each worker has the least denormal: divided first, it would be lost."""
    xs = [torch.tensor([least, 3 * least])] * 4
    assert torch.tensor([least / 4]).to(DTYPES[name]).item() == 0
    for collective in ("allgather", "twoshot"):
        mean, _ = run(simulated, clock, name, collective, xs)
        assert mean.tolist() == [least, 3 * least]


# ---- stochastic rounding -------------------------------------------------------------------------


def stochastic(x: torch.Tensor, key: Key) -> torch.Tensor:
    method = gcbench.get_compressor("bf16", rounding="stochastic")
    payload = codec.encode(method, x, Context(one(len(x)), NOTHING, key))
    return codec.decode(method, payload, Context(one(len(x)), NOTHING))


def test_stochastic_rounding_takes_a_neighbour():
    """Over the whole range one of the two bfloat16 around x, x itself where it is one."""
    x = torch.cat([spread(-149, 128), torch.tensor([0.0, 1.0, -3.0, FLOAT_MAX, -FLOAT_MAX])])
    there = stochastic(x, Key(0, 0, 0))
    bits = x.view(torch.int32)
    down = (bits & ~0xFFFF).view(torch.float32)
    up = ((bits & ~0xFFFF) + 0x10000).view(torch.float32)
    top = LARGEST["bf16"]
    assert ((there == down) | ((there == up) & (down != x)) | (there.abs() == top)).all()
    assert there[-2:].tolist() == [top, -top]
    assert (there == down).any()
    assert (there == up).any()
    assert there.isfinite().all()


def test_stochastic_rounding_goes_up_as_often_as_it_is_near():
    """P(up) = r / 2^16 at a quarter, three quarters and the ends, for both signs, denormals too."""
    n = 200_000
    for scale in (1.0, -(2.0**-130), 2.0**100):
        step = abs(scale) * 2**-7 if abs(scale) > 2.0**-126 else 2.0**-133
        for share in (0.0, 2.0**-16, 0.25, 0.75, 1 - 2.0**-16):
            x = torch.full((n,), scale + math.copysign(share * step, scale))
            ups = int((stochastic(x, Key(3, 1, 2)) != scale).sum())
            sd = math.sqrt(n * share * (1 - share))
            assert abs(ups - share * n) <= 5 * sd, (scale, share)


def test_the_residual_of_stochastic_bfloat16_is_refused():
    """The least float32 becomes 2^-133 in one of 2^16 draws: no bound by the input holds."""
    x = torch.full((1 << 20,), 2.0**-149)
    there = stochastic(x, Key(0, 0, 0))
    assert set(there.tolist()) == {0.0, 2.0**-133}
    assert float((there - x).double().square().sum()) > float(x.double().square().sum())
    method = gcbench.get_compressor("bf16", rounding="stochastic")
    with pytest.raises(UsageError, match="forced-residual"):
        memory.check_legal("residual", method)
    memory.check_legal("residual", gcbench.get_compressor("bf16"))
    with pytest.raises(UsageError, match="stochastic"):
        gcbench.get_compressor("bf16", rounding="up")
