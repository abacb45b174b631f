"""Transforms of real rows: values, rounding, and the lengths to which rows are padded."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from gcbench import ops
from gcbench.core.compressor import Segments
from gcbench.ops import native, spectrum, transform
from gcbench.ops.transform import padded_length, real_forward, real_inverse

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 30, 31, 34, 74, 125, 194, 1009, 2018, 4096, 15_866, 27_000)
"""Odd and even ones, of which half is odd or even, with and without large prime factors."""
BOUND = transform.FLOAT_ERROR


@pytest.fixture
def local(monkeypatch):
    """Transform even rows of every length as complex numbers."""
    monkeypatch.setattr(transform, "HALVES_FROM", 1)


def inputs(d: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(d)
    normal = torch.randn(d, generator=generator)
    index = torch.arange(d, dtype=torch.float64)
    impulse = torch.zeros(d)
    impulse[d // 3] = 1.0
    last = torch.zeros(d)
    last[-1] = 1e4
    return {
        "normal": normal,
        "heavy": normal**5,
        "constant": torch.full((d,), 0.7),
        "impulse": impulse,
        "one huge": normal * 1e-4 + last,
        "turns": 1 - 2 * (torch.arange(d) % 2).float(),
        "tone": torch.sin(2 * math.pi * (d // 5) * index / d).float(),
        "chirp": torch.cos(math.pi * index * index / max(d, 1)).float(),
        "ramp": index.float(),
    }


def spectra(rows: torch.Tensor) -> np.ndarray:
    return np.fft.rfft(rows.double().numpy(), norm="ortho")


def off(result: torch.Tensor, exact: np.ndarray) -> float:
    """The largest relative error of a row."""
    scale = np.linalg.norm(exact, axis=1)
    return float((np.linalg.norm(result.numpy() - exact, axis=1) / scale).max())


@pytest.mark.parametrize("d", [*LENGTHS, 270_336])
def test_values_in_float64(d, local):
    """Error below half of what `transform_error` allows for a transform, whatever the input."""
    for name, x in inputs(d).items():
        if not x.any():
            continue
        rows = x.view(1, d)
        assert transform.by_halves(1, d, on_cpu=True) == (d % 2 == 0)
        result = real_forward(rows)
        assert result.dtype == torch.complex64
        assert result.shape == (1, d // 2 + 1)
        exact = spectra(rows)
        assert off(result, exact) < BOUND / 2, name
        back = real_inverse(torch.from_numpy(exact).to(torch.complex64), d)
        assert back.dtype == torch.float32
        assert back.shape == (1, d)
        assert off(back, rows.double().numpy()) < BOUND / 2, name


@pytest.mark.parametrize("d", [34, 74, 4096, 15_866])
def test_a_row_may_begin_anywhere(d, local):
    """Pairs of floats are complex numbers, even where the first is an odd element."""
    flat = torch.randn(d + 1, generator=torch.Generator().manual_seed(d))
    x = flat[1:].view(1, d)
    assert torch.equal(real_forward(x), real_forward(x.clone()))


@pytest.mark.parametrize("d", LENGTHS[:12])
def test_first_and_last_bin_count_as_real(d, local):
    """As `torch.fft.irfft` has it: a payload may hold any number there."""
    bins = torch.randn(1, d // 2 + 1, dtype=torch.complex64)
    expected = np.fft.irfft(bins.to(torch.complex128).numpy(), d, norm="ortho")
    assert off(real_inverse(bins, d), expected) < BOUND


@pytest.mark.parametrize("d", [34, 2018, 4093, 27_000])
def test_transforms_are_linear(d, local):
    x, y = torch.randn(2, 1, d, generator=torch.Generator().manual_seed(1))
    both = real_forward(2 * x - 3 * y)
    apart = 2 * real_forward(x) - 3 * real_forward(y)
    assert float((both - apart).norm() / both.norm()) < 2 * BOUND


def factors(n: int) -> set[int]:
    """The prime factors of n."""
    result, p = set(), 2
    while p * p <= n:
        while n % p == 0:
            result.add(p)
            n //= p
        p += 1
    return result | {n} - {1}


@pytest.mark.parametrize(
    ("d", "padded"),
    [
        (0, 0),
        (1, 1),
        (4093, 4093),  # a prime, but short
        (32_749, 32_749),
        (32_768, 32_768),
        (32_771, 33_000),
        (65_536, 65_536),  # no factor above 13
        (3**11, 3**11),  # nor here, though it is odd
        (61_706, 61_776),
        (269_722, 270_336),
        (1_068_298, 1_069_200),
        (25_557_032, 25_559_040),
    ],
)
def test_padded_lengths(d, padded):
    assert padded_length(d) == padded


def test_a_padded_length_is_the_next_that_is_fast():
    """By trying them all: multiples of 8 without a prime above 13, but with 11 or 13."""
    fast = [n for n in range(2**15, 2**17, 8) if max(factors(n)) <= 13 and {11, 13} & factors(n)]
    generator = torch.Generator().manual_seed(3)
    for d in torch.randint(2**15 + 1, 2**17 - 2000, (300,), generator=generator).tolist():
        expected = next(n for n in fast if n >= d)
        assert padded_length(d) == (expected if max(factors(d)) > 13 else d)
    waste = [stop / (start + 1) - 1 for start, stop in itertools.pairwise(fast)]
    assert max(waste) == pytest.approx(0.0204, abs=1e-4)


def test_which_rows_are_transformed_as_complex_numbers():
    """One that is long and even, on the CPU; of several the library does 16 in the time of one."""
    wanted = {
        (rows, d): transform.by_halves(rows, d, on_cpu=True)
        for rows in (1, 2)
        for d in (8190, 8191, 8192, 8193, 270_270)
    }
    assert [key for key, local in wanted.items() if local] == [(1, 8192), (1, 270_270)]
    assert not transform.by_halves(1, 270_270, on_cpu=False)


@pytest.mark.parametrize("d", [2, 4, 6, 8, 34, 4096, 61_776])
def test_factors_of_a_fold(d):
    result = transform.turns(d).to(torch.complex128).numpy()
    exact = -1j * np.exp(-2j * np.pi * np.arange(d // 4 + 1) / d)
    assert np.abs(result - exact).max() <= 2.0**-24
    assert result.shape == exact.shape


@pytest.mark.parametrize("d", [33_001, 61_706, 269_722])
def test_padded_spectra(d):
    """The bins are those of the row with zeros after it; the inverse cuts what lies there."""
    x = inputs(d)["normal"]
    segments, length = Segments.of([(d,)]), padded_length(d)
    row = np.zeros(length)
    row[:d] = x.double().numpy()
    exact = np.fft.rfft(row, norm="ortho")
    bins, energy = ops.spectrum.forward(x, segments)
    assert off(torch.view_as_complex(bins).unsqueeze(0), exact[None]) < BOUND / 2
    weight = ops.spectrum.weight(segments)
    assert float(weight.sum()) == length
    result = float((weight * bins.double().square().sum(1)).sum())
    assert result == pytest.approx(float(x.double().square().sum()), rel=1e-5)
    ratio = (energy / bins.square().sum(1))[bins.abs().amax(1) > 0.1]
    assert float(ratio.max() / ratio.min()) == pytest.approx(1, rel=1e-5)
    # Bins of no padded row: what comes back is the beginning of their row.
    random = torch.randn(len(bins), 2, generator=torch.Generator().manual_seed(d))
    whole = np.fft.irfft(torch.view_as_complex(random).numpy(), length, norm="ortho")
    back = ops.spectrum.inverse(random, segments)
    assert off(back.unsqueeze(0), whole[None, :d]) < BOUND / 2
    plain = ops.spectrum.forward(x, segments, pad=False)[0]
    error = off(torch.view_as_complex(plain).unsqueeze(0), spectra(x.view(1, d)))
    assert error < transform.transform_error(d) / 2 == transform.ROUGH_ERROR / 2
    assert transform.transform_error(length) == BOUND


def test_padded_segments_among_others():
    """Padded rows and rows that need no zeros, of one length, are transformed together."""
    lengths = [61_706, 40, 0, 61_776, 40, 61_706, 1]
    x = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(5))
    segments = Segments.of([(d,) for d in lengths])
    bins, _ = ops.spectrum.forward(x, segments)
    start = 0
    for first, d in zip(segments.offsets, lengths, strict=False):
        if d:
            row = np.pad(x[first : first + d].double().numpy(), (0, padded_length(d) - d))
            exact = np.fft.rfft(row, norm="ortho")
            result = torch.view_as_complex(bins[start : start + len(exact)])
            np.testing.assert_allclose(result.numpy(), exact, atol=1e-5)
            start += len(exact)
    assert start == len(bins)
    torch.testing.assert_close(ops.spectrum.inverse(bins, segments), x, rtol=0, atol=1e-5)


def test_equal_lengths_go_together_and_return_to_their_places(monkeypatch):
    """Segments of one length, wherever they lie, are the rows of one transform."""
    seen = []

    def watched(rows, **options):
        seen.append(rows.shape)
        return real_forward(rows, **options)

    monkeypatch.setattr(spectrum, "real_forward", watched)
    segments = Segments.of([(40,), (7,), (0,), (40,), (40,), (1,), (7,), (40,)])
    x = torch.randn(segments.numel, generator=torch.Generator().manual_seed(2))
    bins, energy = ops.spectrum.forward(x, segments)
    assert [tuple(shape) for shape in seen] == [(4, 40), (2, 7), (1, 1)]
    start = 0
    for first, d in zip(segments.offsets, segments.lengths, strict=False):
        if d:
            exact = spectra(x[first : first + d].view(1, d))[0]
            local = torch.view_as_complex(bins[start : start + len(exact)])
            np.testing.assert_allclose(local.numpy(), exact, atol=1e-5)
            start += len(exact)
    assert start == len(bins) == len(energy)
    torch.testing.assert_close(ops.spectrum.inverse(bins, segments), x, rtol=0, atol=1e-5)


def test_sums_of_spectra():
    """Weights of each, in their order; bins beyond the last, or out of order, are refused."""
    spectra = [
        (torch.tensor([0, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        (torch.tensor([2]), torch.tensor([[8.0, -8.0]])),
    ]
    expected = [[0.5, 1.0], [0.0, 0.0], [1.5 + 2.0, 2.0 - 2.0], [0.0, 0.0]]
    assert ops.spectrum.mean(spectra, [0.5, 0.25], 4).tolist() == expected
    available, reason = native.status()
    if not available:
        pytest.skip(reason)
    values = torch.ones(3, 2)
    with ops.using("cpu"):
        for bad in ([0, 1, 4], [0, 0, 1], [2, 1, 3], [-1, 0, 1]):
            with pytest.raises(IndexError, match=r"\[0, 4\)"):
                ops.spectrum.mean([(torch.tensor(bad), values)], [1.0], 4)
        with pytest.raises(ValueError, match="1 weights for 2 spectra"):
            ops.spectrum.mean(spectra, [1.0], 4)
        with pytest.raises(ValueError, match="1 rows for 2 segments"):
            ops.spectrum.scaled(
                values[:, 0], Segments((0, 1, 3)), 1.0, 0.0, rows=spectrum.Rows((0,), (3,))
            )


def test_a_bucket_without_elements():
    segments = Segments.of([(0,), (0,)])
    bins, energy = ops.spectrum.forward(torch.empty(0), segments)
    assert bins.shape == (0, 2)
    assert energy.shape == (0,)
    assert ops.spectrum.inverse(bins, segments).shape == (0,)


def test_bins_are_not_lost_where_a_gradient_would_be():
    """Below 2^-100 a gradient counts as zero, but not a bin: its values may add up with others."""
    bins = torch.zeros(5, 2)
    bins[0, 0] = 2.0**-110
    result = ops.spectrum.inverse(bins, Segments.of([(8,)]))
    torch.testing.assert_close(
        result, torch.full((8,), 2.0**-110 / math.sqrt(8)), rtol=1e-6, atol=0
    )
    assert not ops.spectrum.forward(result, Segments.of([(8,)]))[0].any()


def test_inputs_are_left_alone(local):
    """Results may be written over what lies between, never over what came."""
    for d in (1, 31, 34, 4096, 4095):
        segments = Segments.of([(d,)])
        x = inputs(d)["normal"]
        bins, _ = ops.spectrum.forward(x, segments)
        selected = bins.clone()
        ops.spectrum.inverse(bins, segments)
        assert torch.equal(x, inputs(d)["normal"])
        assert torch.equal(bins, selected)
