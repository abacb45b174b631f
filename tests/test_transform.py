"""Transforms of real rows of any length: values, rounding, and which lengths the library keeps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gcbench import ops
from gcbench.compressor import Segments
from gcbench.ops import spectrum, transform
from gcbench.ops.transform import real_forward, real_inverse

CHIRPED = (31, 34, 74, 97, 101, 194, 1009, 2018, 2 * 3 * 211, 4093, 15_866, 20_014, 50_021, 61_706)
"""Primes, twice a prime, a prime with small factors; even and odd."""
PLAIN = (1, 2, 3, 4, 5, 6, 8, 30, 125, 4096, 3375, 27_000)
"""Lengths without a prime above 13: with Cooley and Tukey's factors alone."""
BOUND = spectrum.FLOAT_ERROR


@pytest.fixture
def own(monkeypatch):
    """Transform rows of every length here."""
    monkeypatch.setattr(transform, "HALVES_FROM", 1)
    monkeypatch.setattr(transform, "PRIME_MAX", 13)
    monkeypatch.setattr(transform, "tables", transform.Kept(transform.build_tables))


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


def off(found: torch.Tensor, exact: np.ndarray) -> float:
    """The largest relative error of a row."""
    scale = np.linalg.norm(exact, axis=1)
    return float((np.linalg.norm(found.numpy() - exact, axis=1) / scale).max())


@pytest.mark.parametrize("d", [*CHIRPED, *PLAIN, 269_722])
def test_values_in_float64(d, own):
    """Error below half of what `spectrum_error` allows for a transform, whatever the input."""
    for name, x in inputs(d).items():
        if not x.any():
            continue
        rows = x.view(1, d)
        assert transform.own_length(1, d)
        found = real_forward(rows)
        assert found.dtype == torch.complex64
        assert found.shape == (1, d // 2 + 1)
        exact = spectra(rows)
        assert off(found, exact) < BOUND / 2, name
        back = real_inverse(torch.from_numpy(exact).to(torch.complex64), d)
        assert back.dtype == torch.float32
        assert back.shape == (1, d)
        assert off(back, rows.double().numpy()) < BOUND / 2, name


@pytest.mark.parametrize("d", [34, 101, 4096, 15_866])
def test_a_row_may_begin_anywhere(d, own):
    """Pairs of floats are complex numbers, even where the first is an odd element."""
    flat = torch.randn(d + 1, generator=torch.Generator().manual_seed(d))
    x = flat[1:].view(1, d)
    assert torch.equal(real_forward(x), real_forward(x.clone()))


@pytest.mark.parametrize("d", [*CHIRPED[:8], *PLAIN[:8]])
def test_first_and_last_bin_count_as_real(d, own):
    """As `torch.fft.irfft` has it: a payload may hold any number there."""
    bins = torch.randn(1, d // 2 + 1, dtype=torch.complex64)
    expected = np.fft.irfft(bins.to(torch.complex128).numpy(), d, norm="ortho")
    assert off(real_inverse(bins, d), expected) < BOUND


@pytest.mark.parametrize("d", [34, 4093, 20_014, 27_000])
def test_transforms_are_linear(d, own):
    x, y = torch.randn(2, 1, d, generator=torch.Generator().manual_seed(1))
    both = real_forward(2 * x - 3 * y)
    apart = 2 * real_forward(x) - 3 * real_forward(y)
    assert float((both - apart).norm() / both.norm()) < 2 * BOUND


@pytest.mark.parametrize("n", [1, 2, 17, 107, 108, 109, 1000, 4095, 269_721, 1_602_447])
def test_fast_lengths(n):
    """The least of the form, by trying them all."""
    found = transform.fast_length(n)

    def fits(size: int) -> bool:
        for p in (2, 3, 5, 7):
            while size % p == 0:
                size //= p
        return size == 1

    size = max(108, -(-n // 108) * 108)
    while not fits(size // 108):
        size += 108
    assert found == size


def test_which_lengths_are_transformed_here():
    """What the library is slow at: one row that is long, or has a large prime factor."""
    assert not transform.own_length(1, 4090), "2 * 5 * 409"
    assert transform.own_length(1, 4093)
    assert not transform.own_length(1, 4078), "2 * 2039"
    assert transform.own_length(1, 20_014)
    assert not transform.own_length(2, 20_014), "rows go at once"
    assert transform.own_length(1, 269_722)
    assert transform.own_length(1, 2**17)
    assert not transform.own_length(1, 2**17 - 2)
    assert not transform.own_length(2, 2**18)
    assert not transform.own_length(1, 25_000_009), "its tables are too large"
    assert transform.own_length(1, 25_557_032), "those of ResNet-50 are not"


@pytest.mark.parametrize("d", [20_014, 50_021, 2**18])
def test_sizes_of_tables(d):
    built = transform.build_tables(d)
    assert built.nbytes == transform.table_bytes(d) <= 25 * d


def test_tables_are_kept_while_there_is_room(monkeypatch, own):
    built = []

    def build(d):
        built.append(d)
        return transform.build_tables(d)

    kept = transform.Kept(build)
    first = transform.table_bytes(34)
    monkeypatch.setattr(transform, "TABLES_MAX", first + transform.table_bytes(38))
    for d in (34, 38, 34, 38, 34):
        assert kept(d).nbytes == transform.table_bytes(d)
    assert built == [34, 38]
    kept(31)  # 38 was used longest ago
    kept(34)
    assert built == [34, 38, 31]
    kept(38)
    assert built == [34, 38, 31, 38]


def test_equal_lengths_go_together_and_return_to_their_places(monkeypatch):
    """Segments of one length, wherever they lie, are the rows of one transform."""
    seen = []
    monkeypatch.setattr(
        spectrum, "real_forward", lambda rows: seen.append(rows.shape) or real_forward(rows)
    )
    segments = Segments.of([(40,), (7,), (0,), (40,), (40,), (1,), (7,), (40,)])
    x = torch.randn(segments.numel, generator=torch.Generator().manual_seed(2))
    bins, energy = ops.spectrum_forward(x, segments)
    assert [tuple(shape) for shape in seen] == [(4, 40), (2, 7), (1, 1)]
    start = 0
    for first, d in zip(segments.offsets, segments.lengths, strict=False):
        if d:
            exact = spectra(x[first : first + d].view(1, d))[0]
            own = torch.view_as_complex(bins[start : start + len(exact)])
            np.testing.assert_allclose(own.numpy(), exact, atol=1e-5)
            start += len(exact)
    assert start == len(bins) == len(energy)
    torch.testing.assert_close(ops.spectrum_inverse(bins, segments), x, rtol=0, atol=1e-5)


def test_a_bucket_without_elements():
    segments = Segments.of([(0,), (0,)])
    bins, energy = ops.spectrum_forward(torch.empty(0), segments)
    assert bins.shape == (0, 2)
    assert energy.shape == (0,)
    assert ops.spectrum_inverse(bins, segments).shape == (0,)


def test_bins_are_not_lost_where_a_gradient_would_be():
    """Below 2^-100 a gradient counts as zero, but not a bin: its values may add up with others."""
    bins = torch.zeros(5, 2)
    bins[0, 0] = 2.0**-110
    found = ops.spectrum_inverse(bins, Segments.of([(8,)]))
    torch.testing.assert_close(found, torch.full((8,), 2.0**-110 / math.sqrt(8)), rtol=1e-6, atol=0)
    assert not ops.spectrum_forward(found, Segments.of([(8,)]))[0].any()


def test_inputs_are_left_alone(own):
    """Results may be written over what lies between, never over what came."""
    for d in (1, 31, 34, 4096, 4095):
        segments = Segments.of([(d,)])
        x = inputs(d)["normal"]
        bins, _ = ops.spectrum_forward(x, segments)
        kept = bins.clone()
        ops.spectrum_inverse(bins, segments)
        assert torch.equal(x, inputs(d)["normal"])
        assert torch.equal(bins, kept)
