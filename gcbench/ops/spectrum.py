"""Operations in the frequency domain: spectra of segments, their largest bins, and the wire format.

A segment of d elements has d // 2 + 1 complex bins, X_k = sum_j x_j exp(-2 pi i j k / d) / sqrt(d);
an empty one has none. The bins of all segments lie one after the other, real and imaginary part
side by side: float32, shape (bins, 2). Parseval: ||x||^2 = sum_k w_k |X_k|^2, where w_k = 2 for a
bin that stands for its conjugate too, 1 for the first and, if d is even, the last.

Segments are scaled by a power of two before a transform and back after it, so that values near
either end of float32's range lose nothing; what leaves it is an infinity in a spectrum (a range
float then saturates) and the largest float in a gradient. A segment whose peak is below 2^-100
counts as zero. The rounding of a transform is the library's (`gcbench.ops.transform`).

A payload of K kept bins in all has three parts, int32: a bitmap of 1 bit a bin or, with width 2, of
1 bit a real number, the two of a bin being equal; 2 K codes of `gcbench.ops.rangefloat`, packed,
real and imaginary part side by side; and the grid of each nonempty segment's codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gcbench.compressor import Layout, Segments
from gcbench.errors import PayloadError
from gcbench.ops.backend import op
from gcbench.ops.rangefloat import grouped_grids, range_pack, range_unpack
from gcbench.ops.reference import TINY, into, packed_words, segment_absmax, segment_moments
from gcbench.ops.selection import (
    KeptRun,
    kept_groups,
    kept_total,
    largest_elements,
    pack_positions,
    unpack_positions,
)
from gcbench.ops.transform import real_forward, real_inverse

FLOAT_MAX = torch.finfo(torch.float32).max
PEAK = 2.0**13
"""Segments are scaled to peaks of 1 to 4 times this: fp16 then neither overflows (65504) nor rounds
what is above 2^-27 of the peak by more than 2^-11."""
HALF_ERROR = 2.0**-11
"""Relative rounding of fp16."""
FLOAT_ERROR = 2.0**-20
"""Relative rounding of a transform and its inverse in float32, with room to spare: 2^-20.8 is the
most that was seen; and what fp16 adds for elements far below the peak."""


# ---- transforms ----------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def spectrum_runs(segments: Segments, theta: float) -> tuple[KeptRun, ...]:
    """Return the runs of `segments` in bins, with keep = max(1, round((1 - theta) bins)).

    `theta`, in [0, 1), is the decimal number that was typed; halves are rounded to even.
    """
    share, start = 1 - Fraction(repr(float(theta))), 0
    runs = []
    for which, _, length in segments.runs:
        bins = length // 2 + 1 if length else 0
        keep = max(1, round(share * bins)) if bins else 0
        runs.append(KeptRun(start, which.stop - which.start, bins, keep))
        start += runs[-1].rows * bins
    return tuple(runs)


def spectrum_bins(runs: Sequence[KeptRun]) -> int:
    """Return the number of bins of all segments."""
    return sum(run.rows * run.length for run in runs)


class _Layout(NamedTuple):
    """How the segments of a bucket and their bins lie, runs of empty segments left out."""

    bins: Segments
    """The bins of each segment, as floats, two a bin."""
    elements: list[int]
    """Elements of each run."""
    floats: list[int]
    """Floats of each run's bins."""
    alike: list[tuple[int, list[int]]]
    """The lengths that segments have, and the runs of each."""


@lru_cache(maxsize=32)
def _layout(segments: Segments) -> _Layout:
    sizes = [2 * (d // 2 + 1) if d else 0 for d in segments.lengths]
    runs = [(which.stop - which.start, d) for which, _, d in segments.runs if d]
    alike: dict[int, list[int]] = {}
    for i, (_, d) in enumerate(runs):
        alike.setdefault(d, []).append(i)
    return _Layout(
        Segments(tuple(accumulate(sizes, initial=0))),
        [rows * d for rows, d in runs],
        [rows * 2 * (d // 2 + 1) for rows, d in runs],
        list(alike.items()),
    )


def _each(values: Tensor, segments: Segments) -> Tensor:
    """Return one value a segment, shape (m,), for each of its elements, shape (n,)."""
    lengths = torch.tensor(segments.lengths, dtype=torch.int64).to(values.device)
    return values.repeat_interleave(lengths, output_size=segments.numel)


@op
def spectrum_scaled(
    x: Tensor,
    segments: Segments,
    peak: float,
    tiny: float,
    *,
    half: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `x` over the unit of its segment, float32, shape (n,), and units, float32, (m,).

    A unit is the power of two below the segment's largest magnitude, in [2^-110, 2^126], over
    `peak`, a power of two from 1 to 2^13. Segments whose largest is below `tiny` become zeros.
    With `half` and that peak the result is rounded to fp16.
    """
    largest = segment_absmax(x, segments)
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)
    unit = power.clamp_(2.0**-110, 2.0**126) / peak
    scaled = x / _each(unit, segments)
    if half:
        scaled = scaled.half().float()
    return into(out, scaled.masked_fill_(_each(largest < tiny, segments), 0.0)), unit


@op
def spectrum_unscaled(
    bins: Tensor, unit: Tensor, segments: Segments, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return bins times their unit, float32, shape (2 bins,), and |X|^2 before that, (bins,).

    `bins`: float32, shape (2 bins,), which `segments` cover; `unit`: float32, shape (m,). `out`:
    where to write the former, which may be `bins`.
    """
    real, imag = bins.view(-1, 2).unbind(1)
    energy = (real * real).add_(imag * imag)
    return into(out, bins * _each(unit, segments)), energy


@op
def spectrum_restored(
    x: Tensor, unit: Tensor, segments: Segments, *, out: Tensor | None = None
) -> Tensor:
    """Return `x`, float32, shape (n,), times its units, shape (m,), cut to finite floats.

    `out`: where to write, which may be `x`.
    """
    return into(out, (x * _each(unit, segments)).clamp_(-FLOAT_MAX, FLOAT_MAX))


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _by_length(
    x: Tensor,
    before: list[int],
    after: list[int],
    alike: list[tuple[int, list[int]]],
    transform: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Return `transform(rows, length)` of all runs of `x`, flat, float32; equal lengths at once.

    `before`, `after`: sizes of the runs in `x` and in the result, one nonempty run after the other.
    """
    pieces = list(torch.split(x, before))
    for length, runs in alike:
        rows = _joined([pieces[i] for i in runs])
        out = transform(rows, length).view(-1)
        for i, piece in zip(runs, torch.split(out, [after[i] for i in runs]), strict=True):
            pieces[i] = piece
    return _joined(pieces or [x])


def spectrum_forward(x: Tensor, segments: Segments, *, half: bool = False) -> tuple[Tensor, Tensor]:
    """Return the bins of `x`, float32, shape (bins, 2), and their energies, float32, (bins,).

    `x`: float32, shape (n,); with `half` its scaled values are rounded to fp16 first. Energies are
    |X|^2 in a unit of their segment: they compare within it, and never overflow.
    """

    def forward(rows: Tensor, length: int) -> Tensor:
        return torch.view_as_real(real_forward(rows.view(-1, length)))

    layout = _layout(segments)
    scaled, unit = spectrum_scaled(x, segments, PEAK, TINY, half=half)
    bins = _by_length(scaled, layout.elements, layout.floats, layout.alike, forward)
    bins, energy = spectrum_unscaled(bins, unit, layout.bins, out=bins)
    return bins.view(-1, 2), energy


def spectrum_inverse(bins: Tensor, segments: Segments) -> Tensor:
    """Return the tensor with these bins, float32, shape (n,), finite.

    `bins`: float32, finite, shape (bins, 2).
    """

    def inverse(rows: Tensor, length: int) -> Tensor:
        pairs = rows.view(-1, length // 2 + 1, 2)
        return real_inverse(torch.view_as_complex(pairs), length)

    layout = _layout(segments)
    scaled, unit = spectrum_scaled(bins.reshape(-1), layout.bins, 1.0, 0.0)
    x = _by_length(scaled, layout.floats, layout.elements, layout.alike, inverse)
    return spectrum_restored(x, unit, segments, out=x)


def spectrum_weight(segments: Segments) -> Tensor:
    """Return how often each bin counts in its segment's energy: 1 or 2, float64, shape (bins,)."""
    weights = [torch.empty(0, dtype=torch.float64)]
    for which, _, length in segments.runs:
        if length:
            row = torch.full((length // 2 + 1,), 2.0, dtype=torch.float64)
            row[0] = row[-1] = 1.0
            if length % 2 and length > 1:
                row[-1] = 2.0
            weights.append(row.repeat(which.stop - which.start))
    return torch.cat(weights)


def spectrum_largest(energy: Tensor, runs: Sequence[KeptRun]) -> Tensor:
    """Return the bins of largest energy of each segment, int64, shape (K,), increasing.

    `energy`: float32, not negative, shape (bins,). Of equal ones the lowest bins.
    """
    return largest_elements(energy, runs)[0]


def spectrum_error(
    x: Tensor, segments: Segments, kept: Tensor, values: Tensor, *, half: bool
) -> float:
    """Return a bound on ||x - x'||^2, x' having `values`, (K, 2), at the bins `kept`, (K,).

    With P the projection on these bins, q = values - P spectrum(x) and h the relative rounding of
    the input and the transforms: ||x||^2 - (||P x|| - h ||x||)^2 + (||q|| + h ||x||)^2 for each
    segment, since dropped bins and errors of kept ones are orthogonal.
    """
    bins = spectrum_forward(x, segments, half=half)[0][kept].double().clamp_(-FLOAT_MAX, FLOAT_MAX)
    weight = spectrum_weight(segments).to(x.device)[kept]
    lengths = torch.tensor([d // 2 + 1 if d else 0 for d in segments.lengths], device=x.device)
    owner = torch.arange(len(segments), device=x.device).repeat_interleave(lengths)[kept]
    square = segment_moments(x, segments)[1]
    rounding = square.sqrt() * (HALF_ERROR * half + FLOAT_ERROR)

    def norm(rows: Tensor) -> Tensor:
        energy = weight * rows.square().sum(1)
        return torch.zeros_like(square).index_add_(0, owner, energy).sqrt_()

    kept_norm = (norm(bins) - rounding).clamp_(min=0)
    return float((square - kept_norm**2 + (norm(values.double() - bins) + rounding) ** 2).sum())


# ---- the wire ------------------------------------------------------------------------------------


def spectrum_layout(runs: Sequence[KeptRun], bits: int, width: int) -> Layout:
    """Return the parts of a payload: see the module docstring."""
    codes = packed_words(2 * kept_total(runs), bits)
    grids = grouped_grids(kept_groups(runs))
    sizes = packed_words(width * spectrum_bins(runs), 1), codes, grids
    return tuple((torch.int32, size) for size in sizes)


def _pairs(kept: Tensor) -> Tensor:
    """Return where the two parts of each kept bin lie, int64, shape (2 K,)."""
    return torch.stack((2 * kept, 2 * kept + 1), 1).view(-1)


def spectrum_pack(
    bins: Tensor, kept: Tensor, runs: Sequence[KeptRun], bits: int, mantissa: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of a payload that holds the bins `kept`, int64, shape (K,), increasing."""
    (bitmap,) = pack_positions(_pairs(kept) if width == 2 else kept, width * len(bins), "bitmap")
    values = torch.view_as_real(torch.view_as_complex(bins)[kept]).view(-1)
    return bitmap, *range_pack(values, kept_groups(runs, 2), bits, mantissa)


def spectrum_unpack(
    parts: Sequence[Tensor],
    runs: Sequence[KeptRun],
    bits: int,
    mantissa: int,
    width: int,
    name: str,
) -> tuple[Tensor, Tensor]:
    """Return the kept bins, int64, shape (K,), and their values, float32, shape (K, 2), finite.

    `parts` have the declared layout.

    Raises:
        PayloadError: no `spectrum_pack` gives these parts; the message begins with `name`.
    """
    bitmap, words, grids = parts
    wide = [
        run._replace(start=width * run.start, length=width * run.length, keep=width * run.keep)
        for run in runs
    ]
    kept = unpack_positions([bitmap], width * spectrum_bins(runs), "bitmap", wide, name)
    if width == 2:
        pairs, kept = kept, kept[::2] // 2
        if not torch.equal(pairs, _pairs(kept)):
            raise PayloadError(f"{name}: a bitmap that keeps half a bin")
    values = range_unpack(words, grids, kept_groups(runs, 2), bits, mantissa, name)
    return kept, values.view(-1, 2)
