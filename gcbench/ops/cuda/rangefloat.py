"""Host code of rangefloat.cu."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import i32, i64, launcher
from gcbench.ops.dispatch import Flag, Kernel

PART = 8192
"""Values per part; a warp computes the range of a part, and a long group has several parts."""


class _Table(NamedTuple):
    """The kernels' table of groups."""

    edges: Tensor
    """(2, m + 1): the index of each group's first value, and the number of parts before it; the
    last column has the totals."""
    parts: int
    """The number of parts."""
    shared: bool
    """Whether a group has more than one part."""


@lru_cache(maxsize=64)
def _table(groups: tuple[tuple[int, int], ...], device: torch.device) -> _Table:
    """Return the table of groups on a device; it is cached."""
    rows, length = torch.tensor(groups, dtype=torch.int64).view(-1, 2).unbind(1)
    lengths = length.repeat_interleave(rows)
    edges = torch.zeros((2, len(lengths) + 1), dtype=torch.int64)
    edges[0, 1:] = lengths.cumsum(0)
    edges[1, 1:] = (-(-lengths // PART)).cumsum(0)
    shared = any(length > PART for _, length in groups)
    return _Table(edges.to(device), int(edges[1, -1]), shared)


def pack(
    values: Tensor,
    n: int,
    groups: tuple[tuple[int, int], ...],
    m: int,
    bits: int,
    mantissa: int,
    grids: Tensor,
    out: Tensor,
) -> None:
    """Run `rangefloat.pack`."""
    if not n:
        return
    device = values.device
    edges, parts, shared = _table(groups, device)
    make = torch.zeros if shared else torch.empty
    peaks = make(2 * m, dtype=torch.int32, device=device)
    run, threads = launcher(device).launch, tables.THREADS
    run("rangefloat", "range_peaks", tables.grid(parts), threads, (values, edges, i64(m), peaks))
    args = (values, i64(n), edges, i64(m), peaks, i32(bits), i32(mantissa), grids, out)
    run("rangefloat", "range_encode", tables.grid(tables.tiles_of(n)), threads, args)


def unpack(
    words: Tensor,
    grids: Tensor,
    groups: tuple[tuple[int, int], ...],
    n: int,
    m: int,
    bits: int,
    mantissa: int,
    name: str,
    out: Tensor,
) -> Flag | None:
    """Run `rangefloat.unpack`."""
    if not n:
        return None
    device = words.device
    bad, edges = tables.flag(device), _table(groups, device).edges
    args = (words, grids, i64(n), edges, i64(m), i32(bits), i32(mantissa), out, bad)
    grid = tables.grid(tables.tiles_of(n))
    launcher(device).launch("rangefloat", "range_unpack", grid, tables.THREADS, args)
    return Flag(bad)


KERNELS: dict[str, Kernel] = {"rangefloat.pack": pack, "rangefloat.unpack": unpack}
