"""Host code of rangefloat.cu."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gcbench.core.errors import PayloadError
from gcbench.ops.backend import Kernels
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import i32, i64, launcher
from gcbench.ops.rangefloat import Groups, grouped_grids, grouped_values, range_check
from gcbench.ops.reference import packed_words

PART = 8192
"""Values of a group whose range one warp looks for."""


class _Table(NamedTuple):
    """Where groups are."""

    edges: Tensor
    """(2, m + 1): the first value of each group and how many there are, and the parts before it."""
    parts: int
    shared: bool
    """Whether a group has more than one part."""


@lru_cache(maxsize=64)
def _table(groups: tuple[tuple[int, int], ...], device: torch.device) -> _Table:
    """Return the table of some groups; it is made and copied to the device once."""
    rows, length = torch.tensor(groups, dtype=torch.int64).view(-1, 2).unbind(1)
    lengths = length.repeat_interleave(rows)
    edges = torch.zeros((2, len(lengths) + 1), dtype=torch.int64)
    edges[0, 1:] = lengths.cumsum(0)
    edges[1, 1:] = (-(-lengths // PART)).cumsum(0)
    shared = any(length > PART for _, length in groups)
    return _Table(edges.to(device), int(edges[1, -1]), shared)


def range_pack(
    values: Tensor,
    groups: Groups,
    bits: int,
    mantissa: int,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Serve `ops.range_pack`."""
    range_check(bits, mantissa)
    n, m, device = grouped_values(groups), grouped_grids(groups), values.device
    values = tables.checked(values, torch.float32, n)
    grids = torch.empty(m, dtype=torch.int32, device=device)
    words = tables.output(out, torch.int32, packed_words(n, bits), device)
    if n:
        edges, parts, shared = _table(tuple(groups), device)
        make = torch.zeros if shared else torch.empty
        peaks = make(2 * m, dtype=torch.int32, device=device)
        run, threads = launcher(device).launch, tables.THREADS
        ranges = (values, edges, i64(m), peaks)
        run("rangefloat", "range_peaks", tables.grid(parts), threads, ranges)
        args = (values, i64(n), edges, i64(m), peaks, i32(bits), i32(mantissa), grids, words)
        run("rangefloat", "range_encode", tables.grid(tables.tiles_of(n)), threads, args)
    return words, grids


def range_unpack(
    words: Tensor,
    grids: Tensor,
    groups: Groups,
    bits: int,
    mantissa: int,
    name: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.range_unpack`."""
    range_check(bits, mantissa)
    n, m, device = grouped_values(groups), grouped_grids(groups), words.device
    words = tables.checked(words, torch.int32, packed_words(n, bits))
    grids = tables.checked(grids, torch.int32, m)
    out = tables.output(out, torch.float32, n, device)
    if n:
        bad, edges = tables.flag(device), _table(tuple(groups), device).edges
        args = (words, grids, i64(n), edges, i64(m), i32(bits), i32(mantissa), out, bad)
        grid = tables.grid(tables.tiles_of(n))
        launcher(device).launch("rangefloat", "range_unpack", grid, tables.THREADS, args)
        number = tables.raised(bad)
        if number is not None:
            reason = {
                1: "a range that no values have",
                2: f"a bit is set after the last of {n} codes",
                3: "a payload's values are not finite",
            }[number]
            raise PayloadError(f"{name}: {reason}")
    return out


KERNELS: Kernels = {"range_pack": range_pack, "range_unpack": range_unpack}
