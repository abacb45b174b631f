"""Operations in the frequency domain: spectra of segments, their largest bins, and the wire format.

A segment of d elements has d // 2 + 1 complex bins, X_k = sum_j x_j exp(-2 pi i j k / d) / sqrt(d);
an empty one has none. The bins of all segments lie one after the other, real and imaginary part
side by side: float32, shape (bins, 2). Parseval: ||x||^2 = sum_k w_k |X_k|^2, where w_k = 2 for a
bin that stands for its conjugate too, 1 for the first and, if d is even, the last.

Segments are scaled by a power of two before a transform and back after it, so that values near
either end of float32's range lose nothing; what leaves it is an infinity in a spectrum (a range
float then saturates) and the largest float in a gradient. A segment whose peak is below 2^-100
counts as zero. The rounding of a transform is the library's.

A payload of K kept bins in all has three parts, int32: a bitmap of 1 bit a bin or, with width 2, of
1 bit a real number, the two of a bin being equal; 2 K codes of `gcbench.ops.rangefloat`, packed,
real and imaginary part side by side; and the grid of each nonempty segment's codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from gcbench.compressor import Layout, Segments
from gcbench.errors import PayloadError
from gcbench.ops.rangefloat import grouped_grids, range_pack, range_unpack
from gcbench.ops.reference import TINY, packed_words, segment_moments
from gcbench.ops.selection import (
    KeptRun,
    kept_groups,
    kept_total,
    largest_elements,
    pack_positions,
    unpack_positions,
)

FLOAT_MAX = torch.finfo(torch.float32).max
PEAK = 2.0**13
"""Segments are scaled to peaks of 1 to 4 times this: fp16 then neither overflows (65504) nor rounds
what is above 2^-27 of the peak by more than 2^-11."""
HALF_ERROR = 2.0**-11
"""Relative rounding of fp16."""
FLOAT_ERROR = 2.0**-20
"""Relative rounding of a transform and its inverse in float32, with room to spare; and what fp16
adds for elements far below the peak."""


# ---- transforms ----------------------------------------------------------------------------------


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


def _unit(peak: Tensor) -> Tensor:
    """Return the power of two below each peak, kept where it and PEAK / unit are normal floats."""
    return (peak.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(2.0**-110, 2.0**126)


def spectrum_forward(x: Tensor, segments: Segments, *, half: bool = False) -> tuple[Tensor, Tensor]:
    """Return the bins of `x`, float32, shape (bins, 2), and their energies, float32, (bins,).

    `x`: float32, shape (n,); with `half` its scaled values are rounded to fp16 first. Energies are
    |X|^2 in a unit of their segment: they compare within it, and never overflow.
    """
    parts, energies = [x.new_empty(0, 2)], [x.new_empty(0)]
    for _, rows in segments.views(x):
        if rows.shape[1]:
            peak = rows.abs().amax(1, keepdim=True)
            unit = _unit(peak) / PEAK
            scaled = torch.where(peak < TINY, 0.0, rows / unit)
            if half:
                scaled = scaled.half().float()
            bins = torch.view_as_real(torch.fft.rfft(scaled, norm="ortho"))
            real, imag = bins.unbind(2)
            energies.append((real * real).add_(imag * imag).view(-1))
            parts.append((bins * unit.unsqueeze(2)).view(-1, 2))
    return torch.cat(parts), torch.cat(energies)


def spectrum_inverse(bins: Tensor, segments: Segments) -> Tensor:
    """Return the tensor with these bins, float32, shape (n,), finite.

    `bins`: float32, finite, shape (bins, 2).
    """
    x = bins.new_empty(segments.numel)
    start = 0
    for _, rows in segments.views(x):
        if rows.shape[1]:
            stop = start + len(rows) * (rows.shape[1] // 2 + 1)
            own = bins[start:stop].view(len(rows), -1, 2)
            unit = _unit(own.abs().amax((1, 2))).unsqueeze(1)
            scaled = torch.view_as_complex(own / unit.unsqueeze(2))
            rows[:] = torch.fft.irfft(scaled, rows.shape[1], norm="ortho") * unit
            start = stop
    return x.clamp_(-FLOAT_MAX, FLOAT_MAX)


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
    return bitmap, *range_pack(bins[kept].view(-1), kept_groups(runs, 2), bits, mantissa)


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
