"""Statistics of segments (largest magnitude, moments), and element-wise use of segment values."""

from __future__ import annotations

import torch
from torch import Tensor

from gcbench.core.compressor import TILE, Segments
from gcbench.ops.dispatch import operation, output, vector

TINY = 2.0**-100
"""Segments with a smaller scale are sent as zeros. It is far below any gradient, and keeps products
of the codecs out of the denormal range."""
FLOAT_MAX = torch.finfo(torch.float32).max
MOMENTS_BLOCK = 256 * TILE
"""Elements to sum at a time, to bound the memory of the float64 intermediates."""


@operation()
def _absmax(x: Tensor, segments: Segments, out: Tensor) -> None:
    out.zero_()
    for which, rows in segments.views(x):
        if rows.shape[1]:
            out[which] = rows.abs().amax(1)


def absmax(x: Tensor, segments: Segments) -> Tensor:
    """Return max |x| of each segment, float32, shape (m,); 0 for an empty segment."""
    x = vector(x, torch.float32, segments.numel)
    out = output(None, torch.float32, len(segments), x.device)
    _absmax(x, segments, out)
    return out


def scale_(x: Tensor, values: Tensor, segments: Segments) -> Tensor:
    """Multiply `x`, shape (n,), in place by its segments' values, shape (m,); return `x`."""
    for which, rows in segments.views(x):
        rows.mul_(values[which].unsqueeze(1))
    return x


def clamp_(x: Tensor, limit: Tensor, segments: Segments) -> Tensor:
    """Clamp `x`, shape (n,), in place to [-limit, limit], one limit per segment; return `x`."""
    for which, rows in segments.views(x):
        bound = limit[which].unsqueeze(1)
        torch.clamp(rows, -bound, bound, out=rows)
    return x


# ---- blocks with one scale each ------------------------------------------------------------------


def shares(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Return x / a, float32, shape (n,), and a, float32, shape (m,), the max |x| of each segment.

    a is 0 if it is below `TINY`. x / a is 0 where a is 0 or not finite.
    """
    top = absmax(x, segments)
    divisor = torch.where((top >= TINY) & top.isfinite(), top, torch.inf)
    quotient = x.clone()
    for which, rows in segments.views(quotient):
        rows.div_(divisor[which].unsqueeze(1))
    return quotient.nan_to_num_(nan=0.0), torch.where(top < TINY, 0.0, top)


def valid_scales(scales: Tensor, least: float = TINY) -> bool:
    """Return whether each of `scales`, float32, (m,), is 0, or finite and at least `least`."""
    return bool((scales.isfinite() & ((scales == 0) | (scales >= least))).all())


def coded_in_zeros(codes: Tensor, scales: Tensor, segments: Segments, zero: int = 0) -> bool:
    """Return whether any element of a segment with scale 0 differs from `zero`.

    `codes`: codes or decoded values, shape (n,). `scales`: float32, shape (m,).
    """
    return any(
        bool(((scales[which] == 0).unsqueeze(1) & (rows != zero)).any())
        for which, rows in segments.views(codes)
    )


# ---- sums in a fixed order -----------------------------------------------------------------------


def _halve(tiles: Tensor) -> Tensor:
    """Sum the last axis, of length 2^k, by repeatedly adding its second half to its first."""
    while tiles.shape[-1] > 1:
        half = tiles.shape[-1] // 2
        tiles = tiles[..., :half] + tiles[..., half:]
    return tiles.squeeze(-1)


def _padded(rows: Tensor) -> Tensor:
    """Split rows, (m, n), into tiles of 1024, (m, ceil(n / 1024), 1024), padded with zeros.

    Rows of up to 512 become one tile of the next power of two: more zeros would not change sums.
    """
    n = rows.shape[1]
    width = TILE if n > TILE // 2 else 1 << max(0, n - 1).bit_length()
    short = -n % width
    if short:
        rows = torch.nn.functional.pad(rows, (0, short))
    return rows.view(len(rows), -1, width)


def _row_moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and the sum of squares of each row, (m, n) -> float64 (m,) each.

    Tiles of 1024 are summed by halving (element i with i + 512, then i + 256, ...), then the sums
    of the tiles in the same way until one is left. The order, and so the result, depends on neither
    device nor thread count.
    """
    tiles = _padded(rows)
    shape = tiles.shape[:2]
    flat = tiles.view(-1, tiles.shape[2])
    sums = [flat.new_zeros(0, dtype=torch.float64)] * 2
    parts: list[tuple[Tensor, Tensor]] = []
    for block in torch.split(flat, max(1, MOMENTS_BLOCK // tiles.shape[2])):
        wide = block.double()
        parts.append((_halve(wide), _halve(wide * wide)))
    if parts:
        sums = [torch.cat(column) for column in zip(*parts, strict=True)]
    total, square = (column.view(shape) for column in sums)
    while total.shape[1] > 1:
        total, square = _halve(_padded(total)), _halve(_padded(square))
    return (total.squeeze(1), square.squeeze(1)) if shape[1] else (total.sum(1), square.sum(1))


def row_sums(rows: Tensor) -> Tensor:
    """Return the sum of each row of float32, (m, n) -> float64 (m,).

    The order is that of `_row_moments`; the sums of tiles are in float32.
    """
    return _row_moments(_halve(_padded(rows)))[0]


@operation()
def _moments(x: Tensor, segments: Segments, total: Tensor, square: Tensor) -> None:
    total.zero_()
    square.zero_()
    for which, rows in segments.views(x):
        total[which], square[which] = _row_moments(rows)


def moments(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Return the sum and the sum of squares of each segment, float64, shape (m,) each.

    Squares of float32 are exact in float64. The order of additions is fixed (see `_row_moments`),
    so the result has the same bits on every device.
    """
    x = vector(x, torch.float32, segments.numel)
    total, square = (output(None, torch.float64, len(segments), x.device) for _ in range(2))
    _moments(x, segments, total, square)
    return total, square


def std(x: Tensor, segments: Segments) -> Tensor:
    """Return the population standard deviation about the mean, float32, shape (m,); 0 if empty."""
    total, square = moments(x, segments)
    n = torch.tensor(segments.lengths, dtype=torch.float64, device=x.device).clamp_(min=1)
    mean = total / n
    return (square / n - mean * mean).clamp_(min=0).sqrt().float()
