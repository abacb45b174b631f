"""Operations in the frequency domain: spectra of segments, their largest bins, and the wire format.

A segment of d elements is padded with zeros to the next length L that transforms fast
(`gcbench.ops.transform.padded_length`); without `pad`, L = d. It has L // 2 + 1 complex bins, X_k =
sum_j x_j exp(-2 pi i j k / L) / sqrt(L); an empty segment has none. The bins of all segments are
concatenated, real and imaginary part side by side: float32, shape (bins, 2). Parseval: ||x||^2 =
sum_k w_k |X_k|^2, where w_k = 2 for a bin that stands for its conjugate too, 1 for the first and,
if L is even, the last. The inverse drops the padding, and with it part of the error.

Segments are scaled by a power of two before a transform and back after it, so that values near
either end of float32's range lose no precision. Values beyond that range become infinite in a
spectrum (a range float then saturates) and the largest float in a gradient. A segment whose peak is
below 2^-100 counts as zero. The rounding errors of a transform are those of the library
(`gcbench.ops.transform`).

A payload of K kept bins in all has three parts, int32: a bitmap with 1 bit a bin or, with width 2,
1 bit a real number, the two of a bin being equal; 2 K packed codes of `gcbench.ops.rangefloat`,
real and imaginary part side by side; and the grid of each nonempty segment's codes.
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
    kept_groups,
    kept_total,
    largest_elements,
    pack_positions,
    unpack_positions,
)
from gcbench.ops.statistics import TINY
from gcbench.ops.transform import padded_length, real_forward, real_inverse

FLOAT_MAX = torch.finfo(torch.float32).max
PEAK = 2.0**13
"""Segments are scaled so that their peaks are 1 to 4 times this. In fp16 they then do not overflow
(65504), and values above 2^-27 of the peak have a relative rounding error of at most 2^-11."""
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

    `theta` is in [0, 1) and taken as the shortest decimal number that prints so; halves are rounded
    to even.
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
    """Where segments are placed as rows of another buffer, padded and possibly in another order."""

    starts: tuple[int, ...]
    """Index of the first element of each segment's row."""
    widths: tuple[int, ...]
    """Elements of each row: those of the segment, then zeros."""

    @cached_property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(self.widths)

    @cached_property
    def table(self) -> Tensor:
        """The table that kernels find rows by, int64, shape (2, m), on the CPU: starts, widths."""
        return torch.tensor([self.starts, self.widths], dtype=torch.int64)


def _rows(segments: Segments, starts: Sequence[int], widths: Sequence[int]) -> Rows | None:
    """Return the `Rows`; None if they are where the segments are already."""
    rows = Rows(tuple(starts), tuple(widths))
    alike = rows.starts == segments.offsets[:-1] and rows.widths == segments.lengths
    return None if alike else rows


class _Plan(NamedTuple):
    """The memory layout in which the segments of a bucket are transformed.

    Segments of one length are made neighbouring rows, which one batched transform takes.
    """

    bins: Segments
    """The bins of the segments, counted in floats, two a bin."""
    rows: Rows | None
    """The segments as rows grouped by length; None if they are in this layout already."""
    bin_rows: Rows | None
    """The bins likewise."""
    transforms: list[tuple[int, slice, slice]]
    """For each length: the length, and the slices of its rows and of their bins."""


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
    """Return the value of each element's segment, shape (n,), from `values`, shape (m,)."""
    lengths = torch.tensor(segments.lengths, dtype=torch.int64).to(values.device)
    return values.repeat_interleave(lengths, output_size=segments.numel)


def _places(segments: Segments, rows: Rows, device: torch.device) -> Tensor:
    """Return the index of each element of the segments in the rows' buffer, int64, shape (n,)."""
    shift = rows.table[0] - torch.tensor(segments.offsets[:-1], dtype=torch.int64)
    return _each(shift.to(device), segments).add_(torch.arange(segments.numel, device=device))


def _table(rows: Rows | None, segments: Segments) -> tuple[Tensor | None, int]:
    """Return the table of `rows`, on the CPU, and the size of their buffer.

    Raises:
        ValueError: the number of rows is not that of the segments.
    """
    if rows is None:
        return None, segments.numel
    if len(rows.starts) != len(segments):
        raise ValueError(
            f"{len(rows.starts)} rows for {len(segments)} segments: a row for each expected"
        )
    return rows.table, rows.numel


@operation()
def _scaled(
    x: Tensor,
    segments: Segments,
    peak: float,
    tiny: float,
    half: bool,
    rows: Rows | None,
    places: int,
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
    magnitude is below `tiny` become zeros. With `half` the result is rounded to fp16, for which
    `peak` must be 2^13. `rows`: where to put each segment; the result then has shape (rows.numel,).
    """
    table, n = _table(rows, segments)
    x = vector(x, torch.float32, segments.numel)
    unit = output(None, torch.float32, len(segments), x.device)
    out = output(out, torch.float32, n, x.device)
    _scaled(
        x.device,
        x=x,
        segments=segments,
        peak=peak,
        tiny=tiny,
        half=half,
        rows=rows,
        places=0 if table is None else table.data_ptr(),
        unit=unit,
        out=out,
    )
    return out, unit


@operation()
def _unscaled(
    bins: Tensor,
    unit: Tensor,
    segments: Segments,
    rows: Rows | None,
    places: int,
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
    """Return bins times their unit, float32, shape (2 bins,), and their |X|^2 before it, (bins,).

    `bins`: float32, two a bin, which `segments` cover; `unit`: float32, shape (m,). `rows`: where
    each segment lies in `bins`. `out`: where to write the product; it may be `bins` if there are no
    `rows`. `energy`: where to write |X|^2.

    Raises:
        ValueError: an odd number of floats, as a bin has two.
    """
    n, device = segments.numel, bins.device
    if n % 2:
        raise ValueError(f"segments of {n} floats: an even number expected, two a bin")
    table, size = _table(rows, segments)
    bins = vector(bins, torch.float32, size, "bins")
    unit = vector(unit, torch.float32, len(segments), "unit")
    out = output(out, torch.float32, n, device)
    energy = output(energy, torch.float32, n // 2, device, "energy")
    _unscaled(
        device,
        bins=bins,
        unit=unit,
        segments=segments,
        rows=rows,
        places=0 if table is None else table.data_ptr(),
        out=out,
        energy=energy,
    )
    return out, energy


@operation()
def _restored(
    x: Tensor, unit: Tensor, segments: Segments, rows: Rows | None, places: int, out: Tensor
) -> None:
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

    `unit`: float32, shape (m,). `rows`: where each segment lies in `x`, which then has shape
    (rows.numel,). `out`: where to write; it may be `x` if there are no `rows`.
    """
    table, size = _table(rows, segments)
    x = vector(x, torch.float32, size)
    unit = vector(unit, torch.float32, len(segments), "unit")
    out = output(out, torch.float32, segments.numel, x.device)
    _restored(
        x.device,
        x=x,
        unit=unit,
        segments=segments,
        rows=rows,
        places=0 if table is None else table.data_ptr(),
        out=out,
    )
    return out


def forward(
    x: Tensor, segments: Segments, *, half: bool = False, pad: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the bins of `x`, float32, shape (bins, 2), and their energies, float32, (bins,).

    `x`: float32, shape (n,); with `half` its scaled values are rounded to fp16 first. Energies are
    |X|^2 of the scaled segment: they can be compared within a segment, and never overflow.
    """
    plan = _plan(segments, pad)
    laid, unit = scaled(x, segments, PEAK, TINY, half=half, rows=plan.rows)
    if len(plan.transforms) == 1:  # the transform's result is used as the buffer
        length = plan.transforms[0][0]
        bins = torch.view_as_real(real_forward(laid.view(-1, length))).view(-1)
    else:
        bins = laid.new_empty(plan.bins.numel)
        for length, rows, own in plan.transforms:
            spectra = torch.view_as_complex(bins[own].view(-1, _bins(length), 2))
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
        for length, rows, own in plan.transforms:
            spectra = torch.view_as_complex(laid[own].view(-1, _bins(length), 2))
            real_inverse(spectra, length, out=x[rows].view(-1, length))
    out = x if plan.rows is None else None
    return restored(x, unit, segments, rows=plan.rows, out=out)


def _invalid_bins(found: int, given: Mapping[str, Any]) -> IndexError:
    return IndexError(f"bins do not increase, or one is not in [0, {given['bins']})")


@operation(_invalid_bins)
def _mean(
    values: Sequence[Tensor],
    kept: Sequence[Tensor],
    totals: Sequence[int],
    weights: Sequence[float],
    bins: int,
    out: Tensor,
) -> None:
    out.zero_()
    for own, places, weight in zip(values, kept, weights, strict=True):
        out[places] += own * weight


def mean(
    sparse: Sequence[tuple[Tensor, Tensor]],
    weights: Sequence[float],
    bins: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of sparse spectra, added in their order: float32, (bins, 2).

    `sparse`: for each spectrum its bins, int64, shape (K,), increasing, and their values, float32,
    shape (K, 2); `weights`: a number for each. `out`: where to write.

    Raises:
        IndexError: bins do not increase, or are out of range; on a GPU a device-side trap.
        ValueError: there is no spectrum, or another number of weights.
    """
    if not sparse:
        raise ValueError("the mean of no payloads: one at least expected")
    if len(weights) != len(sparse):
        raise ValueError(f"{len(weights)} weights for {len(sparse)} spectra: one for each expected")
    totals = [kept.numel() for kept, _ in sparse]
    kept = [vector(own, torch.int64, own.numel(), "bins") for own, _ in sparse]
    values = [
        vector(own, torch.float32, 2 * total, "values").view(total, 2)
        for (_, own), total in zip(sparse, totals, strict=True)
    ]
    device = values[0].device
    out = output(out, torch.float32, 2 * bins, device).view(bins, 2)
    _mean(
        device,
        values=values,
        kept=kept,
        totals=totals,
        weights=list(weights),
        bins=bins,
        out=out,
    )
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

    `energy`: float32, not negative, shape (bins,). Of equal energies the lowest bins are taken.
    """
    return largest_elements(energy, runs)[0]


# ---- the wire ------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def layout(runs: tuple[KeptRun, ...], bits: int, width: int) -> Layout:
    """Return the layout of a payload, which the module docstring describes.

    `bits`: of a code; `width`: bits a bin in the bitmap, 1 or 2.
    """
    codes = packed_words(2 * kept_total(runs), bits)
    grids = grouped_grids(kept_groups(runs))
    sizes = packed_words(width * count_bins(runs), 1), codes, grids
    return tuple((torch.int32, size) for size in sizes)


@lru_cache(maxsize=64)
def _wire(runs: tuple[KeptRun, ...], width: int) -> tuple[tuple[KeptRun, ...], Groups, int]:
    """Return the runs counted in bits of the bitmap, the groups of codes, and the bitmap's bits."""
    wide = tuple(
        run._replace(start=width * run.start, length=width * run.length, keep=width * run.keep)
        for run in runs
    )
    return wide, kept_groups(runs, 2), width * count_bins(runs)


def _pairs(kept: Tensor) -> Tensor:
    """Return the indices of the two floats of each kept bin, int64, shape (2 K,)."""
    return torch.stack((2 * kept, 2 * kept + 1), 1).view(-1)


def pack(
    bins: Tensor,
    kept: Tensor,
    runs: Sequence[KeptRun],
    bits: int,
    mantissa: int,
    width: int,
    *,
    grids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of a payload that holds the bins `kept`, int64, shape (K,), increasing.

    `bins`: float32, shape (bins, 2); `bits`, `mantissa`: the range float's; `width`: bits a bin in
    the bitmap. `grids`: the grid of each nonempty segment, int32; None: that of its own values.
    """
    _, groups, size = _wire(tuple(runs), width)
    (bitmap,) = pack_positions(_pairs(kept) if width == 2 else kept, size, "bitmap")
    # 64-bit integers are gathered faster than complex numbers.
    values = bins.view(torch.int64).view(-1).index_select(0, kept).view(torch.float32)
    given = None if grids is None else grids.to(values.device)
    return bitmap, *rangefloat.pack(values, groups, bits, mantissa, given=given)


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
        PayloadError: `pack` never returns such parts; the message begins with `name`.
    """
    bitmap, words, grids = parts
    wide, groups, size = _wire(tuple(runs), width)
    kept = unpack_positions([bitmap], size, "bitmap", wide, name)
    if width == 2:
        pairs, kept = kept, kept[::2] // 2
        if not torch.equal(pairs, _pairs(kept)):
            raise PayloadError(f"{name}: a bitmap with one of the two bits of a bin")
    values = rangefloat.unpack(words, grids, groups, bits, mantissa, name)
    return kept, values.view(-1, 2)
