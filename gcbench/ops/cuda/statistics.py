"""Host code of statistics.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from gcbench.core.compressor import Segments
from gcbench.ops.backend import Kernels
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import f32, i32, i64, launcher


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
    """Launch both kernels; outputs that are None are not written."""
    m, x = len(segments), tables.checked(x, torch.float32, segments.numel)
    if not m:
        return
    table = tables.table(segments, x.device)
    tiles = int(segments.table[1, -1])
    tops = torch.empty(tiles, dtype=torch.int32, device=x.device)
    sums = squares = None
    if moments:  # and room for sums of these sums
        sums, squares = torch.empty((2, 2 * tiles + 1), dtype=torch.float64, device=x.device)
    run = launcher(x.device).launch
    if tiles:
        args = (x, table, i64(m), tops, sums, squares)
        run("statistics", "tile_statistics", tables.grid(tiles), tables.THREADS, args)
    outputs = (absmax, total, square, f32(clip), i32(at_limit), limit, scale)
    more = (table, i64(m), tops, sums, squares, *outputs)
    run("statistics", "segment_statistics", m, tables.THREADS, more)


def segment_absmax(x: Tensor, segments: Segments) -> Tensor:
    """Serve `ops.segment_absmax`."""
    out = torch.empty(len(segments), dtype=torch.float32, device=x.device)
    _run(x, segments, moments=False, absmax=out)
    return out


def segment_moments(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Serve `ops.segment_moments`."""
    total = torch.empty(len(segments), dtype=torch.float64, device=x.device)
    square = torch.empty_like(total)
    _run(x, segments, moments=True, total=total, square=square)
    return total, square


def ternary_scales(
    x: Tensor, segments: Segments, clip: float, *, at_limit: bool = False
) -> tuple[Tensor | None, Tensor]:
    """Serve `ops.ternary_scales`."""
    scale = torch.empty(len(segments), dtype=torch.float32, device=x.device)
    limit = torch.empty_like(scale) if clip and not at_limit else None
    _run(
        x,
        segments,
        moments=bool(clip),
        clip=clip,
        at_limit=bool(clip) and at_limit,
        limit=limit,
        scale=scale,
    )
    return limit, scale


KERNELS: Kernels = {
    "segment_absmax": segment_absmax,
    "segment_moments": segment_moments,
    "ternary_scales": ternary_scales,
}
