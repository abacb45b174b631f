"""Host code of statistics.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from gcbench.core.compressor import Segments
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import f32, i32, i64, launcher
from gcbench.ops.dispatch import Kernel


def _run(
    x: Tensor,
    segments: Segments,
    *,
    moments: bool,
    absmax: Tensor | None = None,
    total: Tensor | None = None,
    square: Tensor | None = None,
    clip: float = 0.0,
    at_limit: bool = False,
    limit: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    """Launch the kernels for tiles and for segments; outputs that are None are not written."""
    m = len(segments)
    if not m:
        return
    table = tables.table(segments, x.device)
    tiles = int(segments.table[1, -1])
    tops = torch.empty(tiles, dtype=torch.int32, device=x.device)
    sums = squares = None
    if moments:  # the second half is scratch for the next level of sums
        sums, squares = torch.empty((2, 2 * tiles + 1), dtype=torch.float64, device=x.device)
    run = launcher(x.device).launch
    if tiles:
        args = (x, table, i64(m), tops, sums, squares)
        run("statistics", "tile_statistics", tables.grid(tiles), tables.THREADS, args)
    outputs = (absmax, total, square, f32(clip), i32(at_limit), limit, scale)
    more = (table, i64(m), tops, sums, squares, *outputs)
    run("statistics", "segment_statistics", m, tables.THREADS, more)


def absmax(x: Tensor, segments: Segments, out: Tensor) -> None:
    """Run `statistics.absmax`."""
    _run(x, segments, moments=False, absmax=out)


def moments(x: Tensor, segments: Segments, total: Tensor, square: Tensor) -> None:
    """Run `statistics.moments`."""
    _run(x, segments, moments=True, total=total, square=square)


def scales(
    x: Tensor, segments: Segments, clip: float, at_limit: bool, limit: Tensor | None, scale: Tensor
) -> None:
    """Run `ternary.scales`."""
    clipped = bool(clip)
    _run(
        x,
        segments,
        moments=clipped,
        clip=clip,
        at_limit=clipped and at_limit,
        limit=limit,
        scale=scale,
    )


KERNELS: dict[str, Kernel] = {
    "statistics.absmax": absmax,
    "statistics.moments": moments,
    "ternary.scales": scales,
}
