"""Operations in the frequency domain: spectra of segments, their largest bins, and the wire format.

A segment of d elements is padded with zeros to a fast length L
(`gcbench.ops.transform.padded_length`); without `pad`, L = d. It has L // 2 + 1 complex bins,
X_k = sum_j x_j exp(-2 pi i j k / L) / sqrt(L); an empty segment has none. The bins of all segments
are concatenated, with adjacent real and imaginary parts: float32, shape (bins, 2). Parseval:
||x||^2 = sum_k w_k |X_k|^2, where w_k = 1 for the first bin and, if L is even, the last, and 2 for
the others, which also represent their conjugates. The inverse drops the padding and the error in
it.

Segments are scaled by a power of two before a transform and back after it, so that values near the
limits of float32 lose no precision. Values beyond its range become infinite in a spectrum (a range
float then saturates) and the largest float in a gradient. A segment whose peak is below 2^-100
counts as zero. The rounding errors of a transform depend on the library
(`gcbench.ops.transform`).

A payload of K kept bins has three int32 parts: a bitmap with 1 bit per bin or, with width 2, 1 bit
per real number, where the two bits of a bin are equal; 2 K packed codes of
`gcbench.ops.rangefloat`, with adjacent real and imaginary parts; and the grid of each nonempty
segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gcbench.core.compressor import Layout, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops import rangefloat, statistics
from gcbench.ops.dispatch import operation, output, vector
from gcbench.ops.packing import packed_words
from gcbench.ops.rangefloat import Groups, grouped_grids
from gcbench.ops.selection import (
    KeptRun,
    increasing,
    kept_groups,
    kept_total,
    largest_elements,
    pack_positions,
    unpack_positions,
)
from gcbench.ops.statistics import FLOAT_MAX as FLOAT_MAX  # which `fft` names, too
from gcbench.ops.statistics import TINY
from gcbench.ops.transform import padded_length, real_forward, real_inverse

PEAK = 2.0**13
"""Segments are scaled to peaks of 1 to 4 times this. They then do not overflow in fp16 (65504), and
values above 2^-27 of the peak have a relative rounding error of at most 2^-11."""
HALF_ERROR = 2.0**-11
"""Relative rounding error of fp16."""


# ---- memory layout of segments -------------------------------------------------------------------


@lru_cache(maxsize=32)
def padded_lengths(segments: Segments, pad: bool = True) -> tuple[int, ...]:
    """Return the padded length L of each segment."""
    return tuple(padded_length(d) if pad else d for d in segments.lengths)


def _bins(length: int) -> int:
    return length // 2 + 1 if length else 0


@lru_cache(maxsize=32)
def runs_of(segments: Segments, theta: float, pad: bool = True) -> tuple[KeptRun, ...]:
    """Return the runs of `segments` in bins, with keep = max(1, round((1 - theta) bins)).

    `theta` is in [0, 1), interpreted as its shortest decimal representation; halves are rounded to
    even.
    """
    share, start = 1 - Fraction(repr(float(theta))), 0
    lengths, runs = padded_lengths(segments, pad), []
    for which, *_ in segments.runs:
        bins = _bins(lengths[which.start])
        keep = max(1, round(share * bins)) if bins else 0
        runs.append(KeptRun(start, which.stop - which.start, bins, keep))
        start += runs[-1].rows * bins
    return tuple(runs)


def count_bins(runs: Sequence[KeptRun]) -> int:
    """Return the number of bins of all segments."""
    return sum(run.rows * run.length for run in runs)


@dataclass(frozen=True)
class Rows:
    """Positions of segments as rows of another buffer, padded and possibly in another order."""

    starts: tuple[int, ...]
    """Index of the first element of each segment's row."""
    widths: tuple[int, ...]
    """Elements per row: those of the segment, then zeros."""

    @cached_property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(self.widths)

    @cached_property
    def table(self) -> Tensor:
        """The row table of kernels, int64, shape (2, m), on the CPU: starts, widths."""
        return torch.tensor([self.starts, self.widths], dtype=torch.int64)


def _rows(segments: Segments, starts: Sequence[int], widths: Sequence[int]) -> Rows | None:
    """Return the `Rows`; None if they equal the segments."""
    rows = Rows(tuple(starts), tuple(widths))
    alike = rows.starts == segments.offsets[:-1] and rows.widths == segments.lengths
    return None if alike else rows


class _Plan(NamedTuple):
    """The memory layout for transforming the segments of a bucket.

    Segments of equal length become adjacent rows of one batched transform.
    """

    bins: Segments
    """The bins of the segments, counted in floats, two per bin."""
    rows: Rows | None
    """The segments as rows grouped by length; None if they already have this layout."""
    bin_rows: Rows | None
    """The same for bins."""
    transforms: list[tuple[int, slice, slice]]
    """Per length: the length, and the slices of its rows and of their bins."""


@lru_cache(maxsize=32)
def _plan(segments: Segments, pad: bool) -> _Plan:
    lengths = padded_lengths(segments, pad)
    sizes = [2 * _bins(length) for length in lengths]
    alike: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        alike.setdefault(length, []).append(i)
    starts, bin_starts = [0] * len(lengths), [0] * len(lengths)
    transforms, start, bin_start = [], 0, 0
    for length, those in alike.items():
        size = 2 * _bins(length)
        for row, i in enumerate(those):
            starts[i], bin_starts[i] = start + row * length, bin_start + row * size
        stop, bin_stop = start + len(those) * length, bin_start + len(those) * size
        if length:
            transforms.append((length, slice(start, stop), slice(bin_start, bin_stop)))
        start, bin_start = stop, bin_stop
    bins = Segments(tuple(accumulate(sizes, initial=0)))
    return _Plan(bins, _rows(segments, starts, lengths), _rows(bins, bin_starts, sizes), transforms)


# ---- transforms ----------------------------------------------------------------------------------


def _each(values: Tensor, segments: Segments) -> Tensor:
    """Repeat one value per segment, shape (m,), for each of its elements, shape (n,)."""
    lengths = torch.tensor(segments.lengths, dtype=torch.int64).to(values.device)
    return values.repeat_interleave(lengths, output_size=segments.numel)


def _places(segments: Segments, rows: Rows, device: torch.device) -> Tensor:
    """Return the index of each element of the segments in the rows' buffer, int64, shape (n,)."""
    shift = rows.table[0] - torch.tensor(segments.offsets[:-1], dtype=torch.int64)
    return _each(shift.to(device), segments).add_(torch.arange(segments.numel, device=device))


def _size(rows: Rows | None, segments: Segments) -> int:
    """Return the size of the rows' buffer, or without `rows` that of the segments.

    Raises:
        ValueError: the number of rows is not that of the segments.
    """
    if rows is None:
        return segments.numel
    if len(rows.starts) != len(segments):
        raise ValueError(
            f"{len(rows.starts)} rows for {len(segments)} segments: expected one row per segment"
        )
    return rows.numel


@operation()
def _scaled(
    x: Tensor,
    segments: Segments,
    peak: float,
    tiny: float,
    half: bool,
    rows: Rows | None,
    unit: Tensor,
    out: Tensor,
) -> None:
    largest = statistics.absmax(x, segments)
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)
    unit.copy_(power.clamp_(2.0**-110, 2.0**126) / peak)
    scaled = x / _each(unit, segments)
    if half:
        scaled = scaled.half().float()
    scaled = scaled.masked_fill_(_each(largest < tiny, segments), 0.0)
    if rows is None:
        out.copy_(scaled)
    else:
        out.zero_()
        out[_places(segments, rows, x.device)] = scaled


def scaled(
    x: Tensor,
    segments: Segments,
    peak: float,
    tiny: float,
    *,
    half: bool = False,
    rows: Rows | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `x` divided by its segment's unit, float32, shape (n,), and the units, float32, (m,).

    A unit is the largest power of two that is at most the segment's largest magnitude, clamped to
    [2^-110, 2^126], divided by `peak`, a power of two from 1 to 2^13. Segments whose largest
    magnitude is below `tiny` become zeros. With `half` the result is rounded to fp16; `peak` must
    then be 2^13. `rows`: positions of the segments in the result, which then has shape
    (rows.numel,).
    """
    x = vector(x, torch.float32, segments.numel)
    unit = output(None, torch.float32, len(segments), x.device)
    out = output(out, torch.float32, _size(rows, segments), x.device)
    _scaled(x, segments, peak, tiny, half, rows, unit, out)
    return out, unit


@operation()
def _unscaled(
    bins: Tensor,
    unit: Tensor,
    segments: Segments,
    rows: Rows | None,
    out: Tensor,
    energy: Tensor,
) -> None:
    if rows is not None:
        bins = bins[_places(segments, rows, bins.device)]
    real, imag = bins.view(-1, 2).unbind(1)
    energy.copy_((real * real).add_(imag * imag))
    torch.mul(bins, _each(unit, segments), out=out)


def unscaled(
    bins: Tensor,
    unit: Tensor,
    segments: Segments,
    *,
    rows: Rows | None = None,
    out: Tensor | None = None,
    energy: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return bins times their unit, float32, shape (2 bins,), and |X|^2 before scaling, (bins,).

    `bins`: float32, two per bin, covered by `segments`; `unit`: float32, shape (m,). `rows`:
    positions of the segments in `bins`. `out`: output tensor for the product, which may be `bins`
    without `rows`. `energy`: output tensor for |X|^2.

    Raises:
        ValueError: an odd number of floats.
    """
    n, device = segments.numel, bins.device
    if n % 2:
        raise ValueError(f"segments of {n} floats: expected two per bin")
    bins = vector(bins, torch.float32, _size(rows, segments), "bins")
    unit = vector(unit, torch.float32, len(segments), "unit")
    out = output(out, torch.float32, n, device)
    energy = output(energy, torch.float32, n // 2, device, "energy")
    _unscaled(bins, unit, segments, rows, out, energy)
    return out, energy


@operation()
def _restored(x: Tensor, unit: Tensor, segments: Segments, rows: Rows | None, out: Tensor) -> None:
    if rows is not None:
        x = x[_places(segments, rows, x.device)]
    torch.mul(x, _each(unit, segments), out=out).clamp_(-FLOAT_MAX, FLOAT_MAX)


def restored(
    x: Tensor,
    unit: Tensor,
    segments: Segments,
    *,
    rows: Rows | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return `x`, float32, times its segment's unit, shape (n,), clamped to finite floats.

    `unit`: float32, shape (m,). `rows`: positions of the segments in `x`, which then has shape
    (rows.numel,). `out`: the output tensor, which may be `x` without `rows`.
    """
    x = vector(x, torch.float32, _size(rows, segments))
    unit = vector(unit, torch.float32, len(segments), "unit")
    out = output(out, torch.float32, segments.numel, x.device)
    _restored(x, unit, segments, rows, out)
    return out


def forward(
    x: Tensor, segments: Segments, *, half: bool = False, pad: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the bins of `x`, float32, shape (bins, 2), and their energies, float32, (bins,).

    `x`: float32, shape (n,); with `half` its scaled values are rounded to fp16 first. Energies are
    |X|^2 of the scaled segment: comparable within a segment, and never overflowing.
    """
    plan = _plan(segments, pad)
    laid, unit = scaled(x, segments, PEAK, TINY, half=half, rows=plan.rows)
    if len(plan.transforms) == 1:  # use the transform's result as the buffer
        length = plan.transforms[0][0]
        bins = torch.view_as_real(real_forward(laid.view(-1, length))).view(-1)
    else:
        bins = laid.new_empty(plan.bins.numel)
        for length, rows, span in plan.transforms:
            spectra = torch.view_as_complex(bins[span].view(-1, _bins(length), 2))
            real_forward(laid[rows].view(-1, length), out=spectra)
    out = bins if plan.bin_rows is None else None
    bins, energy = unscaled(bins, unit, plan.bins, rows=plan.bin_rows, out=out)
    return bins.view(-1, 2), energy


def inverse(bins: Tensor, segments: Segments, *, pad: bool = True) -> Tensor:
    """Return the tensor that has these bins, float32, shape (n,), clamped to finite floats.

    `bins`: float32, finite, shape (bins, 2).
    """
    plan = _plan(segments, pad)
    laid, unit = scaled(bins.reshape(-1), plan.bins, 1.0, 0.0, rows=plan.bin_rows)
    if len(plan.transforms) == 1:
        length = plan.transforms[0][0]
        spectra = torch.view_as_complex(laid.view(-1, _bins(length), 2))
        x = real_inverse(spectra, length).view(-1)
    else:
        x = laid.new_empty(segments.numel if plan.rows is None else plan.rows.numel)
        for length, rows, span in plan.transforms:
            spectra = torch.view_as_complex(laid[span].view(-1, _bins(length), 2))
            real_inverse(spectra, length, out=x[rows].view(-1, length))
    out = x if plan.rows is None else None
    return restored(x, unit, segments, rows=plan.rows, out=out)


def _invalid_bins(number: int, arguments: Mapping[str, Any]) -> IndexError:
    return IndexError(f"bins must increase and be in [0, {arguments['bins']})")


@operation(_invalid_bins)
def _mean(
    values: Sequence[Tensor],
    indices: Sequence[Tensor],
    totals: Sequence[int],
    weights: Sequence[float],
    bins: int,
    out: Tensor,
) -> None:
    out.zero_()
    for value, places, weight in zip(values, indices, weights, strict=True):
        if not increasing(places, bins):
            raise _invalid_bins(1, {"bins": bins})
        out[places] += value * weight


def mean(
    sparse: Sequence[tuple[Tensor, Tensor]],
    weights: Sequence[float],
    bins: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of sparse spectra, added in order: float32, (bins, 2).

    `sparse`: per spectrum its bins, int64, shape (K,), increasing, and their values, float32, shape
    (K, 2); `weights`: one number per spectrum. `out`: the output tensor.

    Raises:
        IndexError: bins do not increase or are out of range; on a GPU a device-side trap.
        ValueError: there are no spectra, or the number of weights differs.
    """
    if not sparse:
        raise ValueError("mean needs at least one payload")
    if len(weights) != len(sparse):
        raise ValueError(f"{len(weights)} weights for {len(sparse)} spectra: expected one each")
    totals = [indices.numel() for indices, _ in sparse]
    indices = [vector(tensor, torch.int64, tensor.numel(), "bins") for tensor, _ in sparse]
    values = [
        vector(tensor, torch.float32, 2 * total, "values").view(total, 2)
        for (_, tensor), total in zip(sparse, totals, strict=True)
    ]
    device = values[0].device
    out = output(out, torch.float32, 2 * bins, device).view(bins, 2)
    _mean(values, indices, totals, list(weights), bins, out)
    return out


def weight(segments: Segments, pad: bool = True) -> Tensor:
    """Return the weight of each bin in its segment's energy, 1 or 2: float64, shape (bins,)."""
    lengths = padded_lengths(segments, pad)
    weights = [torch.empty(0, dtype=torch.float64)]
    for which, *_ in segments.runs:
        length = lengths[which.start]
        if length:
            row = torch.full((length // 2 + 1,), 2.0, dtype=torch.float64)
            row[0] = row[-1] = 1.0
            if length % 2 and length > 1:
                row[-1] = 2.0
            weights.append(row.repeat(which.stop - which.start))
    return torch.cat(weights)


def largest(energy: Tensor, runs: Sequence[KeptRun]) -> Tensor:
    """Return the bins of largest energy of each segment, int64, shape (K,), increasing.

    `energy`: float32, not negative, shape (bins,). Ties are broken by lowest bin.
    """
    return largest_elements(energy, runs)[0]


# ---- the wire ------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def layout(runs: tuple[KeptRun, ...], bits: int, width: int) -> Layout:
    """Return the layout of a payload, see the module docstring.

    `bits`: bits per code; `width`: bits per bin in the bitmap, 1 or 2.
    """
    codes = packed_words(2 * kept_total(runs), bits)
    grids = grouped_grids(kept_groups(runs))
    sizes = packed_words(width * count_bins(runs), 1), codes, grids
    return tuple((torch.int32, size) for size in sizes)


@lru_cache(maxsize=64)
def _wire(runs: tuple[KeptRun, ...], width: int) -> tuple[tuple[KeptRun, ...], Groups, int]:
    """Return the runs in bits of the bitmap, the groups of codes, and the bitmap's size in bits."""
    wide = tuple(
        run._replace(start=width * run.start, length=width * run.length, keep=width * run.keep)
        for run in runs
    )
    return wide, kept_groups(runs, 2), width * count_bins(runs)


def _pairs(indices: Tensor) -> Tensor:
    """Return the indices of the two floats of each kept bin, int64, shape (2 K,)."""
    return torch.stack((2 * indices, 2 * indices + 1), 1).view(-1)


def pack(
    bins: Tensor,
    indices: Tensor,
    runs: Sequence[KeptRun],
    bits: int,
    mantissa: int,
    width: int,
    *,
    grids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode the bins `indices`, int64, shape (K,), increasing; return the parts of the payload.

    `bins`: float32, shape (bins, 2); `bits`, `mantissa`: of the range float; `width`: bits per bin
    in the bitmap. `grids`: the grid of each nonempty segment, int32; None: compute them.
    """
    _, groups, size = _wire(tuple(runs), width)
    (bitmap,) = pack_positions(_pairs(indices) if width == 2 else indices, size, "bitmap")
    # 64-bit integers are gathered faster than complex numbers.
    values = bins.view(torch.int64).view(-1).index_select(0, indices).view(torch.float32)
    fixed = None if grids is None else grids.to(values.device)
    return bitmap, *rangefloat.pack(values, groups, bits, mantissa, fixed=fixed)


def unpack(
    parts: Sequence[Tensor],
    runs: Sequence[KeptRun],
    bits: int,
    mantissa: int,
    width: int,
    name: str,
) -> tuple[Tensor, Tensor]:
    """Return the kept bins, int64, shape (K,), and their values, float32, shape (K, 2), finite.

    `parts`: as `layout` declares them; the other arguments as for `pack`.

    Raises:
        PayloadError: `pack` never returns such parts; the message starts with `name`.
    """
    bitmap, words, grids = parts
    wide, groups, size = _wire(tuple(runs), width)
    indices = unpack_positions([bitmap], size, "bitmap", wide, name)
    if width == 2:
        pairs, indices = indices, indices[::2] // 2
        if not torch.equal(pairs, _pairs(indices)):
            raise PayloadError(f"{name}: the bitmap has only one of the two bits of a bin")
    values = rangefloat.unpack(words, grids, groups, bits, mantissa, name)
    return indices, values.view(-1, 2)
