"""FFT sparsification (Wang et al. 2020): its transform, selection, wire format and convergence."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import gcbench
from gcbench import ops
from gcbench.core import codec
from gcbench.core.compressor import Compressor, Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.transform import padded_length

KEY = Key(0, 0, 0)
FINE = {"half": False, "code_bits": 14, "mantissa": 9}
"""Codes so fine that what is left of the error is what the selection drops."""


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def one(n: int) -> Segments:
    return Segments.of([(n,)], "model")


def sent(method: Compressor, x: torch.Tensor, segments: Segments | None = None) -> torch.Tensor:
    segments = segments or one(len(x))
    return codec.decode(
        method, codec.encode(method, x, Context(segments, x, KEY)), Context(segments, x)
    )


def square(x: torch.Tensor) -> float:
    return float(x.double().square().sum())


def lost(method: Compressor, x: torch.Tensor, segments: Segments | None = None) -> float:
    """The share of the energy that the round trip loses."""
    return square(x - sent(method, x, segments)) / square(x)


def families(n: int) -> dict[str, torch.Tensor]:
    impulse = torch.zeros(n)
    impulse[n // 3] = 2.0
    ramp = torch.arange(n).float()
    return {
        "normal": normal(n, 16),
        "heavy": normal(n, 17) ** 5,
        "impulse": impulse,  # a flat spectrum: nothing stands out
        "constant": torch.full((n,), 0.7),
        "ramp": ramp,
        "chirp": torch.sin(ramp * ramp * math.pi / n),
        "mixed": normal(n, 18) * torch.logspace(-20, 20, n),
    }


# ---- the transform -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 31, 32, 33, 1023, 1024, 1025, 10_007])
def test_parseval_with_inner_bins_twice(n):
    """||x||^2 = sum w |X|^2, w = 2 but for the first and, of an even length, the last bin."""
    x = normal(n, n)
    bins, _ = ops.spectrum.forward(x, one(n))
    assert bins.shape == (n // 2 + 1, 2)
    energy = bins.double().square().sum(1)
    weight = ops.spectrum.weight(one(n))
    assert float(weight.sum()) == n, "n real numbers stand behind the bins"
    assert float((weight * energy).sum()) == pytest.approx(square(x), rel=1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 31, 32, 33, 1023, 1024, 1025, 10_007])
def test_the_inverse_gives_the_real_input_back(n):
    x = normal(n, n)
    back = ops.spectrum.inverse(ops.spectrum.forward(x, one(n))[0], one(n))
    assert back.dtype == torch.float32
    torch.testing.assert_close(back, x, rtol=0, atol=1e-5)


def test_the_transform_is_linear_and_runs_by_segment():
    shapes = [(40,), (0,), (1,), (33, 2), (33, 2), (7,)]
    segments = Segments.of(shapes)
    x, y = normal(segments.numel, 1), normal(segments.numel, 2)
    both, _ = ops.spectrum.forward(2 * x - 3 * y, segments)
    of_x, of_y = (ops.spectrum.forward(v, segments)[0] for v in (x, y))
    torch.testing.assert_close(both, 2 * of_x - 3 * of_y, rtol=0, atol=1e-5)
    start = 0
    for i, length in enumerate(segments.lengths):
        if length:
            local = x[segments.offsets[i] : segments.offsets[i + 1]].double().numpy()
            expected = np.fft.rfft(local) / math.sqrt(length)
            result = torch.view_as_complex(of_x[start : start + length // 2 + 1]).numpy()
            np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)
            start += length // 2 + 1
    assert start == len(of_x) == len(ops.spectrum.weight(segments))
    torch.testing.assert_close(ops.spectrum.inverse(of_x, segments), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("power", [-60, -3, 1, 40, 80])
@pytest.mark.parametrize("options", [{}, {"half": False}, {"granularity": 100}])
def test_any_unit_gives_the_same_codes(options, power):
    """x and 2^k x have the same bitmap and codes; the ranges move by k octaves. Nothing overflows.

    fp16 sees the scaled segment: it would make infinities of the plain 1e30.
    """
    method = gcbench.get_compressor("fft", **options)
    x = normal(1000, 3)
    segments = Segments.of([(1000,)], method.granularity)
    first = codec.encode(method, x, Context(segments, x, KEY))
    second = codec.encode(method, x * 2.0**power, Context(segments, x, KEY))
    assert torch.equal(first.parts[0], second.parts[0])
    assert torch.equal(first.parts[1], second.parts[1])
    octave = 1 << method.mantissa << method.code_bits
    assert torch.equal(first.parts[2] + power * octave, second.parts[2])
    decoded = codec.decode(method, first, Context(segments, x)) * 2.0**power
    assert torch.equal(codec.decode(method, second, Context(segments, x)), decoded)


def test_huge_and_tiny_inputs_stay_accurate_and_finite():
    method = gcbench.get_compressor("fft", theta=0.0)
    for scale in (1e30, 1e-25, 5e37):
        assert lost(method, normal(4096, 4).clamp_(-1, 1) * scale) < 1e-4
    largest = torch.finfo(torch.float32).max
    constant = torch.full((4096,), largest)  # its first bin is 64 times that
    decoded = sent(method, constant)
    assert decoded.isfinite().all()
    assert (decoded >= 0).all()
    assert (sent(method, torch.full((100,), 1e-35)) == 0).all(), "below 2^-100 is zero"


def test_fp16_rounds_the_scaled_gradient():
    """Peaks lie in [2^13, 2^15): half of 2^-11 of a value is lost, whatever its unit."""
    x = torch.tensor([1.0 + 2.0**-12, 3e-5, 0.0, 0.0])
    for unit in (1.0, 1e-20, 1e30):
        rounded = ops.spectrum.forward(x * unit, one(4), half=True)[0]
        plain = ops.spectrum.forward(x * unit, one(4))[0]
        back = ops.spectrum.inverse(rounded, one(4)) / unit
        torch.testing.assert_close(back, x, rtol=2.0**-11, atol=1e-7)
        difference = float((rounded - plain).abs().amax() / plain.abs().amax())
        assert 0 < difference <= 2.0**-11
    # One element's bin is the element: two codes with 21 bits of mantissa show what was rounded.
    exact = {"code_bits": 2, "mantissa": 21}
    x = torch.tensor([1.0 + 2.0**-11 + 2.0**-15])
    assert float(sent(gcbench.get_compressor("fft", **exact), x)) == 1.0 + 2.0**-10
    plain = gcbench.get_compressor("fft", half=False, **exact)
    assert float(sent(plain, x)) == pytest.approx(float(x), abs=2.0**-21)


def test_fp16_sees_what_is_far_below_the_peak():
    """Elements of 2^-26 of the peak keep 11 bits, as a peak of 2^13 and more leaves them room."""
    x = torch.full((100_000,), 2.0**-26)
    x[7] = 1.0
    back = ops.spectrum.inverse(ops.spectrum.forward(x, one(100_000), half=True)[0], one(100_000))
    assert math.sqrt(square(back - x)) < 1e-6  # without them 4.7e-6 would be lost


def test_results_beyond_float32_saturate():
    """Bins that all are the largest float add up to more than it: the sum is cut, not infinite."""
    method = gcbench.get_compressor("fft", theta=0.0)
    x = torch.zeros(8)
    x[0] = 1.0  # five equal bins
    bitmap, codes, grid = codec.encode(method, x, Context(one(8), x, KEY)).parts
    top = (255 << 5) - 1
    base = top - (int(grid) & 1023) + 1
    grid = torch.tensor([base << 10 | (int(grid) & 1023)], dtype=torch.int32)
    decoded = codec.decode(method, Payload((bitmap, codes, grid)), Context(one(8), x))
    assert float(decoded[0]) == torch.finfo(torch.float32).max
    assert float(decoded[1:].abs().amax()) < 1e36


@pytest.mark.parametrize("bitmap", ["complex", "real"])
def test_segments_are_coded_apart(bitmap):
    """Each segment has its own range: alone it decodes to what it decodes to among others."""
    method = gcbench.get_compressor("fft", bitmap=bitmap, granularity="tensor", theta=0.5)
    segments = Segments.of([(50,), (0,), (33,), (33,), (1,), (20,)])
    x = normal(segments.numel, 24)
    x *= torch.repeat_interleave(
        torch.tensor([1.0, 0, 1e20, 1e-20, 1e9, 3.0]), torch.tensor(segments.lengths)
    )
    together = sent(method, x, segments)
    for start, stop in itertools.pairwise(segments.offsets):
        if start < stop:
            apart = sent(method, x[start:stop])
            torch.testing.assert_close(together[start:stop], apart, rtol=1e-5, atol=0)
            assert 0 <= square(apart - x[start:stop]) < 0.5 * square(x[start:stop])


# ---- the selection -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_energies_go_where_they_are_wanted(backend):
    bins = torch.tensor([3.0, 4.0, 0.0, -2.0, 1.0, 1.0])
    out, energy = torch.zeros(6), torch.zeros(3)
    with ops.using(backend):
        result = ops.spectrum.unscaled(
            bins, torch.tensor([2.0]), Segments((0, 6)), out=out, energy=energy
        )
        assert [each.data_ptr() for each in result] == [out.data_ptr(), energy.data_ptr()]
        assert energy.tolist() == [25.0, 4.0, 2.0]
        assert out.tolist() == (2 * bins).tolist()
        with pytest.raises((ValueError, RuntimeError)):
            ops.spectrum.unscaled(bins, torch.tensor([2.0]), Segments((0, 6)), energy=energy[:2])


@pytest.mark.parametrize("theta", [0.0, 0.3, 0.5, 0.85, 0.9, 0.999])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 999, 1000])
def test_the_error_is_the_dropped_energy(n, theta):
    """With fine codes ||x - x'||^2 is what the dropped bins hold, inner ones counted twice."""
    method = gcbench.get_compressor("fft", theta=theta, **FINE)
    x = normal(n, n)
    bins = np.fft.rfft(x.double().numpy(), norm="ortho")
    weight = np.full(len(bins), 2.0)
    weight[0] = 1
    if n % 2 == 0:
        weight[-1] = 1
    keep = max(1, round((1 - Fraction(str(theta))) * len(bins)))
    order = np.lexsort((np.arange(len(bins)), -np.abs(bins)))
    dropped = order[keep:]
    expected = float((weight * np.abs(bins) ** 2)[dropped].sum())
    assert square(x - sent(method, x)) == pytest.approx(expected, rel=1e-4, abs=2e-6 * square(x))


@pytest.mark.parametrize(("rho", "selected"), [(0.15, 0.4346), (0.10, 0.3303), (0.01, 0.0561)])
def test_kept_energy_of_normal_values(rho, selected):
    """rho (1 + ln 1/rho): |X|^2 is exponential. n = 1e6: within 1 % on either side."""
    method = gcbench.get_compressor("fft", theta=1 - rho, **FINE)
    assert rho * (1 + math.log(1 / rho)) == pytest.approx(selected, abs=5e-5)
    error = lost(method, normal(1_000_000, 5))
    assert 1 - error == pytest.approx(selected, rel=0.01)


@pytest.mark.parametrize(
    ("options", "within"),
    [
        ({}, 0.005),
        ({"granularity": 4096}, 0.005),
        ({"theta": 0.5, "half": False}, 0.005),
        ({"theta": 0.5, "mantissa": 2}, 0.005),  # rounding is 1.4 % of it
    ],
)
def test_gaussian_error_is_the_analytic_one(options, within):
    method = gcbench.get_compressor("fft", **options)
    x = normal(1_000_000, 6)
    error = lost(method, x, Segments.of([(1_000_000,)], method.granularity))
    assert error == pytest.approx(method.claims.gaussian_error, rel=within)
    if method.theta == 0.85:
        assert method.claims.gaussian_error == pytest.approx(0.5654, abs=1e-4)


@pytest.mark.parametrize(("mantissa", "error"), [(4, 1.65e-4), (5, 4.1e-5), (6, 1.04e-5)])
def test_rounding_of_kept_bins(mantissa, error):
    """4^-m / 24 of the kept energy, the estimate in `gaussian_error`, to a twentieth."""
    x = normal(200_000, 7)
    options = {"theta": 0.85, "half": False}
    rough = lost(gcbench.get_compressor("fft", mantissa=mantissa, **options), x)
    dropped = lost(gcbench.get_compressor("fft", **FINE), x)
    assert (rough - dropped) / (1 - dropped) == pytest.approx(error, rel=0.05)
    assert 4.0**-mantissa / 24 == pytest.approx(error, rel=0.05)
    everything = gcbench.get_compressor("fft", theta=0.0, mantissa=mantissa)
    assert everything.claims.gaussian_error is None, "an estimate is not a closed form"


def autoregressive(n: int, factor: float) -> torch.Tensor:
    """x_i = factor x_{i-1} + noise."""
    noise = np.random.default_rng(8).standard_normal(n)
    x, last = np.empty(n), 0.0
    for i in range(n):
        last = x[i] = factor * last + noise[i]
    return torch.from_numpy(x).float()


def test_a_smooth_signal_favours_the_spectrum():
    """AR(1) with .9, 15 % kept: .89 of the energy against .56 of the largest elements.

    Of independent values the spectrum keeps .4346 and the elements .5575: the other way round.
    """
    method = gcbench.get_compressor("fft")
    for x, spectrum, elements in (
        (autoregressive(100_000, 0.9), 0.89, 0.56),
        (normal(100_000, 9), 0.4346, 0.5575),
    ):
        largest = x.abs().topk(15_000).values
        assert 1 - lost(method, x) == pytest.approx(spectrum, abs=0.01)
        assert square(largest) / square(x) == pytest.approx(elements, abs=0.01)


def test_real_and_imaginary_parts_chosen_apart_would_keep_more():
    """.5575 again, but the positions would cost a bit a part: the method keeps whole bins."""
    bins, _ = ops.spectrum.forward(normal(1_000_000, 10), one(1_000_000))
    parts = bins.view(-1)
    limit = parts.abs().kthvalue(round(0.85 * len(parts))).values
    assert square(parts[parts.abs() > limit]) / square(parts) == pytest.approx(0.5575, abs=0.003)


def test_the_largest_bins_go_by_magnitude_not_by_energy():
    """The first bin counts once: 1.2 of magnitude^2 beats the two times 1 of an inner bin."""
    n = 64
    i = torch.arange(n)
    inner = (2 / n) ** 0.5 * torch.cos(2 * math.pi * 5 * i / n)  # |X_5|^2 = 1/2, energy 1
    first = torch.full((n,), (0.6 / n) ** 0.5)  # |X_0|^2 = energy = .6
    method = gcbench.get_compressor("fft", theta=0.97, **FINE)  # K = 1 of 33
    torch.testing.assert_close(sent(method, inner + first), first, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(sent(method, inner + 0.9 * first), inner, rtol=1e-3, atol=1e-4)


def test_equal_bins_are_kept_from_the_lowest():
    """A segment of zeros has only equal bins; energies are compared as they are."""
    method = gcbench.get_compressor("fft", theta=0.9)
    payload = codec.encode(method, torch.zeros(100), Context(one(100), torch.empty(0), KEY))
    assert ops.packing.unpack(payload.parts[0], 1, 51).nonzero().view(-1).tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
    runs = ops.spectrum.runs_of(one(8), 0.5)
    assert ops.spectrum.largest(torch.tensor([1.0, 3, 2, 2, 2]), runs).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("theta", "n", "keep"),
    [(0.85, 1000, 75), (0.85, 30, 2), (0.5, 8, 2), (0.5, 12, 4), (0.99, 9, 1)],
)
def test_how_many_bins_are_kept(theta, n, keep):
    """max(1, round((1 - theta) B)), B = n // 2 + 1; halves to even: 2.5 -> 2, 3.5 -> 4."""
    (run,) = ops.spectrum.runs_of(one(n), theta)
    assert (run.length, run.keep) == (n // 2 + 1, keep)


# ---- zeros after a segment -----------------------------------------------------------------------

PRIME = 40_063
"""It is padded to 40,560, by 1.2 %."""


@pytest.mark.parametrize("theta", [0.0, 0.85])
def test_a_padded_gradient_by_hand(theta):
    """What is decoded is the beginning of the row whose spectrum was cut, as numpy has it."""
    method = gcbench.get_compressor("fft", theta=theta, **FINE)
    x, length = normal(PRIME, 25), padded_length(PRIME)
    assert length == 40_560
    bins = np.fft.rfft(np.pad(x.double().numpy(), (0, length - PRIME)), norm="ortho")
    keep = max(1, round((1 - Fraction(str(theta))) * len(bins)))
    bins[np.lexsort((np.arange(len(bins)), -np.abs(bins)))[keep:]] = 0
    expected = np.fft.irfft(bins, length, norm="ortho")[:PRIME]
    result = sent(method, x).double().numpy()
    assert np.linalg.norm(result - expected) < 2e-3 * np.linalg.norm(expected)
    (run,) = ops.spectrum.runs_of(one(PRIME), theta)
    assert (run.length, run.keep) == (length // 2 + 1, keep)
    payload = codec.encode(method, x, Context(one(PRIME), x, KEY))
    assert payload.parts[0].numel() == ops.packing.packed_words(length // 2 + 1, 1)


@pytest.mark.parametrize("family", [name for name in families(4) if name != "mixed"])
@pytest.mark.parametrize("options", [{}, {"theta": 0.0}, FINE, {"pad": False}])
def test_the_bound_holds_where_zeros_are_added(family, options):
    """A cut takes away some of the error: at most what lies in 1.2 % of the row."""
    method = gcbench.get_compressor("fft", **options)
    x = families(PRIME)[family]
    error, bound = square(x - sent(method, x)), method.claims.error_bound(x, Context(one(PRIME)))
    assert error <= bound < square(x)


def test_padding_changes_little():
    """A random gradient loses the same share with and without it; of smooth ones the end rings."""
    x = normal(PRIME, 26)
    padded, exact = (gcbench.get_compressor("fft", pad=pad) for pad in (True, False))
    assert lost(padded, x) == pytest.approx(lost(exact, x), rel=0.02)
    assert lost(padded, x) == pytest.approx(padded.claims.gaussian_error, rel=0.02)
    bits = codec.bits(padded, one(PRIME)) / codec.bits(exact, one(PRIME))
    assert bits == pytest.approx(40_560 / PRIME, abs=4e-3)  # whole lanes
    short = normal(4093, 27)
    assert torch.equal(sent(padded, short), sent(exact, short))


def test_one_more_prime_makes_no_other_wire():
    """Without `pad` the bins are those of the exact length, which the library transforms."""
    method = gcbench.get_compressor("fft", pad=False, theta=0.0, **FINE)
    x = normal(PRIME, 28)
    assert lost(method, x) < 1e-6
    assert ops.spectrum.count_bins(ops.spectrum.runs_of(one(PRIME), 0.0, False)) == PRIME // 2 + 1


# ---- odd and even lengths ------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 31, 32, 33, 1023, 1025])
def test_nothing_dropped_is_nearly_lossless(n):
    x = normal(n, n + 1)
    fine = gcbench.get_compressor("fft", theta=0.0, **FINE)
    assert lost(fine, x) < 1e-6  # 2^-20 / 24, and room
    assert lost(gcbench.get_compressor("fft", theta=0.0), x) < 2.0**-11


@pytest.mark.parametrize("n", [1, 2, 7, 8, 100, 101])
def test_first_and_last_bin(n):
    """A constant lives in the first bin; signs in turn, of even length, in the last one."""
    method = gcbench.get_compressor("fft", theta=0.999)
    torch.testing.assert_close(
        sent(method, torch.full((n,), -3.0)), torch.full((n,), -3.0), rtol=2.0**-6, atol=0
    )
    if n % 2 == 0:
        turns = torch.ones(n)
        turns[1::2] = -1
        torch.testing.assert_close(sent(method, turns), turns, rtol=2.0**-6, atol=0)


# ---- the wire ------------------------------------------------------------------------------------


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack by the text of `gcbench.ops.packing`, one code at a time; n is at most 1024."""
    lanes = -(-len(codes) // 32)
    words = [0] * (bits * lanes)
    for i, code in enumerate(codes.tolist()):
        # The lanes of the last, shorter tile: code i is in lane i % lanes, row i // lanes.
        lane, row = i % lanes, i // lanes
        for b in range(bits):
            k, shift = divmod(row * bits + b, 32)
            words[k * lanes + lane] |= (code >> b & 1) << shift
    return np.array(words, dtype=np.uint32).view(np.int32)


def float_steps(value: float, mantissa: int) -> int:
    return (int(np.abs(np.float32(value)).view(np.uint32)) + (1 << (22 - mantissa))) >> (
        23 - mantissa
    )


def by_hand(x: np.ndarray, theta: float, bits: int, mantissa: int, real: bool) -> list[np.ndarray]:
    """The three parts of a payload, computed with numpy in float64 from the text of the card."""
    scale = 2.0 ** (13 - math.floor(math.log2(np.abs(x).max())))
    rounded = (x * scale).astype(np.float16).astype(np.float64) / scale
    bins = np.fft.rfft(rounded) / math.sqrt(len(x))
    keep = max(1, round((1 - Fraction(str(theta))) * len(bins)))
    selected = np.sort(np.lexsort((np.arange(len(bins)), -np.abs(bins)))[:keep])
    bitmap = np.zeros(len(bins), dtype=np.int64)
    bitmap[selected] = 1
    values = np.stack([bins[selected].real, bins[selected].imag], axis=1).reshape(-1)
    up = float_steps(max(values.max(), 0), mantissa) + 1
    down = float_steps(min(values.min(), 0), mantissa) + 1
    most = 2**bits - 1
    base = max(1, up - most, down - most, math.ceil((up + down - most) / 2))
    positive = min(max(up - base, 0), most)
    eps = float(np.uint32(base << (23 - mantissa)).view(np.float32))
    codes = []
    for value in values:
        code = max(float_steps(value, mantissa) - base + 1, int(abs(value) >= eps / 2), 0)
        codes.append(code + positive if code and value < 0 else code)
    return [
        packed(np.repeat(bitmap, 2) if real else bitmap, 1),
        packed(np.array(codes), bits),
        np.array([base << bits | positive], dtype=np.int32),
    ]


@pytest.mark.parametrize("bitmap", ["complex", "real"])
@pytest.mark.parametrize(("n", "theta", "bits", "mantissa"), [(90, 0.7, 10, 5), (61, 0.4, 8, 4)])
def test_payload_by_hand(n, theta, bits, mantissa, bitmap):
    """Computed apart, with numpy. Inputs are such that no rounding is closer than .005 of a step,
    a hundred times the error of a transform in float32.
    """
    options = {"theta": theta, "code_bits": bits, "mantissa": mantissa, "bitmap": bitmap}
    method = gcbench.get_compressor("fft", **options)
    x = normal(n, 11) * 0.01
    payload = codec.encode(method, x, Context(one(n), x, KEY))
    expected = by_hand(x.double().numpy(), theta, bits, mantissa, bitmap == "real")
    for part, local in zip(payload.parts, expected, strict=True):
        assert part.dtype == torch.int32
        assert part.tolist() == local.tolist()


@pytest.mark.parametrize("granularity", ["model", "tensor", 4096, 100])
@pytest.mark.parametrize("bitmap", ["complex", "real"])
def test_bits_on_the_wire(granularity, bitmap):
    """Three parts whose sizes follow from the lengths alone; 2.0 and 2.5 bits for a large model."""
    method = gcbench.get_compressor("fft", granularity=granularity, bitmap=bitmap)
    shapes = [(64, 3, 5, 5), (64,), (0,), (1,), (300, 1000), (10,)]
    segments = Segments.of(shapes, granularity)
    payload = codec.encode(
        method, normal(segments.numel, 12), Context(segments, torch.empty(0), KEY)
    )
    lengths = [padded_length(n) for n in segments.lengths if n]
    bins = sum(n // 2 + 1 for n in lengths)
    selected = sum(max(1, round(0.15 * (n // 2 + 1))) for n in lengths)
    width = 2 if bitmap == "real" else 1
    expected = [
        ops.packing.packed_words(width * bins, 1),
        ops.packing.packed_words(2 * selected, 10),
    ]
    expected.append(sum(1 for n in segments.lengths if n))
    assert [part.numel() for part in payload.parts] == expected
    assert 8 * payload.nbytes == codec.bits(method, segments) == 32 * sum(expected)
    per_element = codec.bits(method, segments) / segments.numel
    if granularity != 100:
        assert per_element == pytest.approx(2.5 if bitmap == "real" else 2.0, rel=0.01)
    assert method.claims.nominal_bits == pytest.approx(1.5)
    assert 32 / method.claims.nominal_bits == pytest.approx(21.33, abs=0.01)


def flipped(payload: Payload, part: int, change) -> Payload:
    parts = [local.clone() for local in payload.parts]
    change(parts[part])
    return Payload(tuple(parts), payload.count)


@pytest.mark.parametrize("bitmap", ["complex", "real"])
def test_corrupt_payloads_raise(bitmap):
    method = gcbench.get_compressor("fft", bitmap=bitmap, granularity=100)
    x = normal(290, 13)
    segments = Segments.of([(290,)], 100)  # 51, 51 and 46 bins, of which 8, 8 and 7 are kept
    payload = codec.encode(method, x, Context(segments, x, KEY))
    bins = (2 if bitmap == "real" else 1) * 148
    flags = ops.packing.unpack(payload.parts[0], 1, bins).bool()
    zeros, ones = (~flags).nonzero().view(-1), flags.nonzero().view(-1)

    def moved(take: list[int], put: list[int]) -> Payload:
        bits = flags.clone()
        bits[take], bits[put] = False, True
        return Payload((ops.packing.pack(bits, 1), *payload.parts[1:]))

    step = 2 if bitmap == "real" else 1
    local = slice(0, step)
    cases = {
        "one bin too few": moved(ones[local].tolist(), []),
        "one bin too many": moved([], zeros[local].tolist()),
        "a bin of another segment": moved(ones[local].tolist(), zeros[-step:].tolist()),
        "a bit after the last": flipped(payload, 0, lambda w: w[-1:].bitwise_or_(-(2**31))),
        "a code after the last": flipped(payload, 1, lambda w: w[-1:].bitwise_or_(-(2**31))),
        "a range below zero": flipped(payload, 2, lambda w: w[1].neg_()),
        "a range of base 0": flipped(payload, 2, lambda w: w[1].bitwise_and_(1023)),
        "an infinite range": flipped(payload, 2, lambda w: w[1].fill_(255 << 15 | 5)),
        "an infinite code": flipped(payload, 2, lambda w: w[1].fill_((255 << 15) - 1024 | 1)),
        "a part too few": Payload(payload.parts[:2]),
        "no parts": Payload(()),
        "a word too many": Payload(
            (payload.parts[0], payload.parts[1].repeat(2), payload.parts[2])
        ),
        "floats": Payload((*payload.parts[:2], payload.parts[2].float())),
        "no workers": payload._replace(count=0),
    }
    if bitmap == "real":
        cases["half a bin"] = moved([int(ones[0])], [int(zeros[0])])
    for what, bad in cases.items():
        with pytest.raises(PayloadError, match=r"^fft: "):
            pytest.fail(f"{what}: {codec.decode(method, bad, Context(segments, x))}")


# ---- the mean ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"granularity": "tensor"}, {"bitmap": "real"}])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_the_mean_of_spectra_is_the_mean_of_decoded_gradients(options, workers):
    """One inverse transform for all workers, by linearity; mixed units and counts."""
    method = gcbench.get_compressor("fft", **options)
    segments = Segments.of([(50,), (0,), (333,), (1,), (1000,)], method.granularity)
    xs = [normal(segments.numel, seed) * 10.0**seed for seed in range(workers)]
    payloads = [codec.encode(method, x, Context(segments, x, KEY)) for x in xs]
    payloads[-1] = payloads[-1]._replace(count=3)  # a merged one
    weights = torch.tensor([payload.count for payload in payloads], dtype=torch.float64)
    decoded = torch.stack(
        [codec.decode(method, payload, Context(segments, xs[0])) for payload in payloads]
    )
    expected = (decoded.double() * weights[:, None]).sum(0) / weights.sum()
    result = codec.mean(method, payloads, Context(segments, xs[0]))
    torch.testing.assert_close(
        result.double(), expected, rtol=0, atol=2e-6 * float(decoded.abs().amax())
    )
    if workers == 1:
        assert torch.equal(result, decoded[0])


# ---- the bounds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families(4))
@pytest.mark.parametrize(
    "options", [{}, {"theta": 0.0}, FINE, {"granularity": 64}, {"code_bits": 4, "mantissa": 1}]
)
def test_error_bound(family, options):
    """It holds, below ||x||^2, and with fine codes there is nothing between it and the error."""
    method = gcbench.get_compressor("fft", **options)
    for n in (1, 2, 3, 100, 1001):
        x = families(n)[family]
        if not x.any():
            continue
        segments = Segments.of([(n,)], method.granularity)
        error, bound = (
            square(x - sent(method, x, segments)),
            method.claims.error_bound(x, Context(segments)),
        )
        assert error <= bound < square(x)
        # Of equal bins rounding chooses: one that counts once in the energy, or twice.
        ties = 2 / n if family == "impulse" or n == 3 else 0.0
        if options == FINE:
            assert bound - error < (1e-5 + ties) * square(x)
        if options in ({}, {"theta": 0.0}):
            assert bound - error < (2.5e-3 + ties) * square(x)  # 5 h of fp16, and the codes


@pytest.mark.parametrize("theta", [0.1, 0.5, 0.85, 0.95])
@pytest.mark.parametrize("family", families(4))
def test_assumption_3_2_holds_for_one_worker(theta, family):
    """||T(v) - v|| <= alpha ||v|| with alpha = sqrt(theta), up to the two bins that count once.

    The largest K of B bins hold K/B of sum |X|^2; the weights of the first and the last bin can
    cost two of them, so alpha^2 <= 1 - (K - 2) / (B - 2).
    """
    method = gcbench.get_compressor("fft", theta=theta, **FINE)
    for n in (256, 257):
        x = families(n)[family]
        (run,) = ops.spectrum.runs_of(one(n), theta)
        limit = 1 - (run.keep - 2) / (run.length - 2)
        assert limit <= theta + 3 / run.length
        assert lost(method, x) <= limit + 1e-5


def test_assumption_3_2_fails_for_workers_whose_gradients_cancel():
    """Two gradients of flat spectrum, all but opposite: each drops other bins than the other."""
    method = gcbench.get_compressor("fft")
    n = 256
    flat = families(n)["impulse"]
    xs = [flat + 1e-3 * normal(n, 19), -flat + 1e-3 * normal(n, 20)]
    mean = (xs[0] + xs[1]) / 2
    payloads = [codec.encode(method, x, Context(one(n), x, KEY)) for x in xs]
    error = square(codec.mean(method, payloads, Context(one(n), mean)) - mean) / square(mean)
    assert math.sqrt(error) > 10


# ---- convergence on a quadratic ------------------------------------------------------------------


def descend(thetas, rates, noise: float, seed: int) -> tuple[list[float], float, float]:
    """Descend f(x) = sum lambda_i x_i^2 / 2, L = 1, along compressed noisy gradients.

    Returns ||grad f||^2 at each step, f(x_0), and the largest ||T(v) - v|| / ||v||.
    """
    n = 64
    generator = torch.Generator().manual_seed(seed)
    curvature = torch.linspace(0.05, 1, n)
    x = torch.randn(n, generator=generator)
    start = float((curvature * x * x).sum()) / 2
    squares, alpha = [], 0.0
    for theta, rate in zip(thetas, rates, strict=True):
        method = gcbench.get_compressor("fft", theta=theta)
        gradient = curvature * x
        squares.append(square(gradient))
        v = gradient + noise / math.sqrt(n) * torch.randn(n, generator=generator)
        step = sent(method, v)
        alpha = max(alpha, math.sqrt(square(step - v) / square(v)))
        x = x - rate * step
    return squares, start, alpha


@pytest.mark.parametrize(("theta", "rate"), [(0.5, 0.05), (0.85, 0.01), (0.3, 0.1)])
def test_convergence_bound(theta, rate):
    """avg E||grad f||^2 <= 2 f_0 / (eta (1 - a) T) + sigma^2 (a + L eta (1 + a)^2) / (1 - a).

    For any a with ||T(v) - v|| <= a ||v|| and eta <= (1 - a) / (L (1 + a)^2): smoothness gives
    f_{t+1} <= f_t - eta <grad, T(v)> + L eta^2 ||T(v)||^2 / 2, where <grad, T(v) - v> is at most
    a (||grad||^2 + E||v||^2) / 2 and E||v||^2 = ||grad||^2 + sigma^2.
    """
    steps, noise = 120, 0.5
    squares, start, a = descend([theta] * steps, [rate] * steps, noise, 21)
    assert a <= math.sqrt(theta) + 0.03
    assert rate <= (1 - a) / (1 + a) ** 2, "the step that the bound is proved for"
    average = sum(squares) / steps
    bound = 2 * start / (rate * (1 - a) * steps)
    bound += noise**2 * (a + rate * (1 + a) ** 2) / (1 - a)
    assert bound / 100 < average <= bound


def test_falling_theta_converges():
    """Theorem 3.5: theta_t^2 = L eta_t with sum eta = inf, sum eta^2 < inf ends in no plateau.

    The same steps with theta = .85 throughout, and noise-free descent, as the two ends.
    """
    steps, noise = 160, 1.0
    rates = [0.5 / (1 + t / 10) for t in range(steps)]
    falling, *_ = descend([math.sqrt(rate) for rate in rates], rates, noise, 23)
    fixed, *_ = descend([0.85] * steps, rates, noise, 23)
    tail = slice(-40, None)
    assert sum(falling[tail]) / 40 < 0.03 * falling[0]
    assert sum(falling[tail]) < sum(fixed[tail])
    blocks = [sum(falling[k : k + 40]) for k in range(0, steps, 40)]
    assert all(later < earlier for earlier, later in itertools.pairwise(blocks))


# ---- a range that is given -----------------------------------------------------------------------


def spectrum_of(x: torch.Tensor) -> torch.Tensor:
    """Real and imaginary parts of the bins, (B, 2), float64."""
    return torch.view_as_real(torch.fft.rfft(x.double(), norm="ortho"))


@pytest.mark.parametrize("granularity", ["model", 64])
def test_the_range_that_a_message_has_gives_its_bytes(granularity):
    """With all values inside and the grid alike, a given range is the same code."""
    x = normal(64, 3)
    local = gcbench.get_compressor("fft", theta=0.5, granularity=granularity)
    _, values = local._open(codec.encode(local, x, Context(one(64), x, KEY)), one(64))
    low, high = float(values.min()), float(values.max())
    settings = gcbench.get_compressor("fft", theta=0.5, granularity=granularity, low=low, high=high)
    assert (
        codec.encode(settings, x, Context(one(64), x, KEY))
        .to_bytes()
        .equal(codec.encode(local, x, Context(one(64), x, KEY)).to_bytes())
    )


def test_what_is_outside_a_given_range_saturates():
    x = normal(4000, 4)
    method = gcbench.get_compressor("fft", theta=0.0, half=False, pad=False, low=-0.5, high=0.25)
    bins = spectrum_of(x)
    received = spectrum_of(sent(method, x))
    above, below = bins > 0.25 * (1 + 2.0**-5), bins < -0.5 * (1 + 2.0**-5)
    assert int(above.sum()) > 1000
    assert int(below.sum()) > 900
    torch.testing.assert_close(
        received[above], torch.full_like(received[above], 0.25), rtol=0, atol=1e-6
    )
    # One code may be to spare at the negative end: 2^-5 of it at most.
    assert float(received.min()) >= -0.5 * (1 + 2.0**-5) - 1e-6
    assert float(received[below].max()) <= -0.5 + 1e-6
    inside = ~(above | below)
    within = bins.abs() * 2.0**-5 + 1e-5  # a step at the ends; eps is 1e-5 of the range
    assert ((received - bins).abs() <= within)[inside].all()
    assert ((received - bins).abs() <= bins.abs() + 1e-6).all()  # nothing errs by more than itself
    assert (received.abs() <= 0.5 * (1 + 2.0**-5) + 1e-6).all()


def test_what_is_far_below_a_given_range_becomes_zero():
    method = gcbench.get_compressor("fft", low=-1e6, high=1e6)
    assert not sent(method, normal(1000, 5)).any()
    assert sent(method, 1e5 * normal(1000, 5)).any()


def test_a_payload_of_another_range_is_refused():
    x = normal(1000, 6)
    one_range = gcbench.get_compressor("fft", low=-1.0, high=1.0)
    payload = codec.encode(one_range, x, Context(one(1000), x, KEY))
    for other in ({"low": -2.0, "high": 1.0}, {"low": -1.0, "high": 4.0}):
        with pytest.raises(PayloadError, match="low=-"):
            codec.decode(gcbench.get_compressor("fft", **other), payload, Context(one(1000), x))
    local = codec.encode(gcbench.get_compressor("fft"), x, Context(one(1000), x, KEY))
    with pytest.raises(PayloadError, match=r"low=-1.0, high=1.0"):
        codec.decode(one_range, local, Context(one(1000), x))


def test_a_given_range_claims_no_contraction():
    """A gradient that grows beyond the range keeps a vanishing share of itself."""
    method = gcbench.get_compressor("fft", theta=0.0, low=-1.0, high=1.0)
    assert not method.claims.contractive
    assert method.claims.delta(one(1000)) is None
    assert method.claims.gaussian_error is None
    assert lost(method, 1e6 * normal(1000, 7)) > 0.99999


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_error_bound_with_a_given_range(scale):
    x = scale * normal(3000, 8)
    method = gcbench.get_compressor("fft", theta=0.5, low=-0.5, high=0.5)
    error = square(x - sent(method, x))
    assert (
        error <= method.claims.error_bound(x, Context(one(3000))) <= 1.1 * error + 1e-2 * square(x)
    )


def test_first_steps_with_their_own_range_then_a_given_one(tmp_path):
    from commands import invoke

    run = ("run", "--task", "digits", "--compressor", "fft", "--steps", 6, "--results", tmp_path)
    settings = invoke(*run, "--set", "low=0:null/3:-1e-9", "--set", "high=0:null/3:1e-9", "--json")
    later = invoke(*run, "--set", "low=0:null/6:-1e-9", "--set", "high=0:null/6:1e-9", "--json")
    plain = invoke(*run, "--json")
    assert later.json["params_sha256"] == plain.json["params_sha256"]  # no step reaches it
    assert settings.json["params_sha256"] != plain.json["params_sha256"]
    few = invoke(*run, "--set", "low=0:null/3:-1e-9", "--json")
    assert few.code == 2
    assert "give both, or neither" in few.err


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta": 1.0}, "theta=1.0"),
        ({"theta": -0.1}, "theta=-0.1"),
        ({"theta": math.nan}, "theta=nan"),
        ({"bitmap": "bits"}, "bitmap='bits'.*complex"),
        ({"code_bits": 1}, "bits=1, mantissa=5"),
        ({"mantissa": 14}, "mantissa=14"),
        ({"low": -1.0}, "low=-1.0, high=None: give both, or neither"),
        ({"low": 0.0, "high": 1.0}, "low=0.0, high=1.0"),
        ({"low": -1.0, "high": math.inf}, "high=inf"),
        ({"low": -1.0, "high": math.nan}, "high=nan"),
        ({"granularity": "layer"}, "granularity 'layer'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises((ValueError, gcbench.core.errors.UsageError), match=message):
        gcbench.get_compressor("fft", **options)


def test_declarations():
    method = gcbench.get_compressor("fft")
    assert method.collectives == ("allgather",)
    assert method.memory == "none"
    assert method.claims.contractive
    assert not method.claims.portable
    assert not method.claims.unbiased
    assert len({repr(gcbench.get_compressor("fft", **local)) for local in method.variants}) == 8
