"""Host code of signs.cu."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import Structure, c_int32, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from gcbench.core.compressor import TILE, Key, Segments
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import KeyArgument, blocks_for, f32, f64, i32, i64, launcher, u32
from gcbench.ops.dispatch import Flag, Kernel
from gcbench.ops.packing import LANES

WARPS = 8
"""Warps per block; a segment of at most this many tiles is short and encoded in one pass."""
MEAN_THREADS = 32 * 16
"""Threads per block that sums the tiles of a long segment."""


# ---- packed signs --------------------------------------------------------------------------------


def pack(x: Tensor, n: int, bits: int, out: Tensor) -> None:
    """Run `sign.pack`."""
    if n:
        kernel, grid = f"sign_pack_{bits}", tables.grid(tables.tiles_of(n))
        launcher(x.device).launch("signs", kernel, grid, tables.THREADS, (x, i64(n), out))


def pack_above(x: Tensor, factor: float, segments: Segments, square: Tensor, out: Tensor) -> None:
    """Run `sign.pack_above`."""
    n, m, device = segments.numel, len(segments), x.device
    if not n:
        return
    run, threads = launcher(device).launch, tables.THREADS
    parts = tables.table(segments, device), i64(m)
    limit = torch.empty(m, device=device, dtype=torch.float32)
    limits = (*parts, square, f64(factor), limit)
    run("signs", "sign_limits", blocks_for(m, threads), threads, limits)
    args = (x, i64(n), *parts, limit, out)
    run("signs", "sign_pack_above", tables.grid(tables.tiles_of(n)), threads, args)


def decode(words: Tensor, n: int, bits: int, name: str, out: Tensor) -> Flag | None:
    """Run `sign.decode`."""
    if not n:
        return None
    bad, grid = tables.flag(words.device), tables.grid(tables.tiles_of(n))
    args = (words, i64(n), i32(bits), out, bad)
    launcher(words.device).launch("signs", "sign_decode", grid, tables.THREADS, args)
    return Flag(bad)


class _Ballots(Structure):
    """The kernels' `Ballots`: words, number of votes and bits per code of each; their number."""

    _fields_ = (
        ("words", c_void_p * tables.MOST_PAYLOADS),
        ("counts", c_int32 * tables.MOST_PAYLOADS),
        ("bits", c_int32 * tables.MOST_PAYLOADS),
        ("number", c_int32),
    )


def vote(
    words: Sequence[Tensor],
    counts: Sequence[int],
    bits: Sequence[int],
    voters: int,
    n: int,
    name: str,
    width: int,
    quorum: int,
    toss: bool,
    key: Key,
    out: Tensor,
) -> Flag | None:
    """Run `sign.vote`."""
    number, size, device = len(words), out.numel(), out.device
    if not n:
        return None
    parts = []
    for start in range(0, number, tables.MOST_PAYLOADS):
        stop = min(start + tables.MOST_PAYLOADS, number)
        part = _Ballots(number=stop - start)
        for i in range(start, stop):
            part.words[i - start] = words[i].data_ptr()
            part.counts[i - start] = counts[i]
            part.bits[i - start] = bits[i]
        parts.append(part)
    wide, run, bad = 2 in bits, launcher(device).launch, tables.flag(device)

    def least(votes: int) -> int:
        """Return the minimum sum of bits, or of codes, for which the sum of signs is `votes`."""
        return voters + votes if wide else (voters + votes + 1) // 2

    if not wide and width == 1 and not toss and voters == number < tables.MOST_PAYLOADS:
        votes = (parts[0], i64(n), i64(size), u32(least(0)), out, bad)
        run("signs", "sign_majority", blocks_for(size, tables.THREADS), tables.THREADS, votes)
    else:
        used = (2 * voters if wide else voters).bit_length()
        sums = None
        if len(parts) > 1:
            sums = torch.empty(used * LANES * tables.tiles_of(n), dtype=torch.int32, device=device)
        win = least(quorum if width == 2 else int(toss))
        lose = least(1 - quorum if width == 2 else 0)
        grid = tables.grid(tables.tiles_of(n))
        for i, part in enumerate(parts):
            last = out if i == len(parts) - 1 else None
            sizes = (i64(n), i32(used), i32(wide), i32(i == 0), sums)
            rule = (u32(win), u32(lose), i32(width), i32(toss), KeyArgument.of(key))
            args = (part, *sizes, *rule, last, bad)
            run("signs", "sign_vote", grid, tables.THREADS, args)
    return Flag(bad)


# ---- signs with values ---------------------------------------------------------------------------


class _Plan(NamedTuple):
    """Assignment of tiles to warps, int64 each; None if there is no such segment."""

    short: Tensor | None
    """For short segments, one entry per warp, `WARPS` per block: `WARPS` times the index of the
    segment, plus the index of the tile in it. All segments of a block have the same number of
    tiles; a warp without a tile has minus this number."""
    tiles: Tensor | None
    """(2, tiles), for the tiles of long segments: index of the segment, and first element."""
    long: Tensor | None
    """(2, segments), for long segments: index of the segment, and number of `tiles` before it."""


_plans: weakref.WeakKeyDictionary[Segments, dict[torch.device, _Plan]] = weakref.WeakKeyDictionary()


def plan_of(segments: Segments) -> _Plan:
    """Return the plan of these segments, on the CPU."""
    offsets = segments.table[0]
    tiles = -(-offsets.diff() // TILE)
    blocks = []
    for count in range(1, WARPS + 1):
        which = (tiles == count).nonzero()
        if len(which):
            beside = WARPS // count
            grid = torch.full((-(-len(which) // beside), WARPS), -count)
            places = which * WARPS + torch.arange(count)
            full = torch.full((len(grid) * beside, count), -count)
            full[: len(which)] = places
            grid[:, : beside * count] = full.view(len(grid), -1)
            blocks.append(grid.view(-1))
    which = (tiles > WARPS).nonzero().view(-1)
    if not len(which):
        return _Plan(torch.cat(blocks) if blocks else None, None, None)
    counts = tiles[which]
    before = counts.cumsum(0) - counts
    owners = which.repeat_interleave(counts)
    place = torch.arange(len(owners)) - before.repeat_interleave(counts)
    return _Plan(
        torch.cat(blocks) if blocks else None,
        torch.stack([owners, offsets[owners] + place * TILE]),
        torch.stack([which, before]),
    )


def _plan(segments: Segments, device: torch.device) -> _Plan:
    """Return `plan_of` on a device; it is cached."""
    plans = _plans.setdefault(segments, {})
    if device not in plans:
        plan = plan_of(segments)
        plans[device] = _Plan(*(None if part is None else part.to(device) for part in plan))
    return plans[device]


def encode(
    x: Tensor,
    residual: Tensor | None,
    segments: Segments,
    name: str,
    words: Tensor,
    low: Tensor | None,
    high: Tensor,
    lost: Tensor | None,
) -> Flag | None:
    """Run `sign.encode`."""
    n, device = segments.numel, x.device
    words.zero_()
    high.zero_()
    if low is not None:
        low.zero_()
    if not n:
        return None
    bad = tables.flag(device)
    kind = "scaled" if low is None else "class"
    plan, offsets = _plan(segments, device), tables.table(segments, device)
    run, threads = launcher(device).launch, tables.THREADS
    if plan.short is not None:
        grid = plan.short.numel() // WARPS
        short = (x, residual, offsets, plan.short, i64(n), words, low, high, lost, bad)
        run("signs", f"{kind}_short", grid, 32 * WARPS, short)
    if plan.tiles is not None and plan.long is not None:
        number = plan.tiles.shape[1]
        grid, tiles = tables.grid(number), (offsets, plan.tiles, i64(number))
        # The second half of each row is scratch for the next level of sums.
        rows = 1 if low is None else 3
        sums = torch.empty((rows, 2 * number), dtype=torch.float64, device=device)
        stride = i64(2 * number)
        args = (x, residual, *tiles, i64(n), words, sums, stride)
        run("signs", f"{kind}_sums", grid, threads, args)
        means = (offsets, plan.long, sums, i64(number), stride, low, high, bad)
        run("signs", f"{kind}_means", plan.long.shape[1], MEAN_THREADS, means)
        if lost is not None:
            run("signs", "sign_lost", grid, threads, (x, residual, *tiles, low, high, lost))
    return None if lost is None else Flag(bad)


def values(
    words: Tensor,
    low: Tensor | None,
    high: Tensor,
    segments: Segments,
    name: str,
    total: Tensor | None,
    count: float,
    out: Tensor,
) -> Flag | None:
    """Run `sign.values`; payloads are checked before the first value is written."""
    n, m, device = segments.numel, len(segments), words.device
    if not m:
        return None
    bad, run, threads = tables.flag(device), launcher(device).launch, tables.THREADS
    grid, bits = tables.grid(tables.tiles_of(n)), (words, i64(n))
    parts = (tables.table(segments, device), i64(m))
    classes = None
    if low is not None:
        classes = torch.zeros(m, dtype=torch.int32, device=device)
        if n:
            run("signs", "sign_classes", grid, threads, (*bits, *parts, classes))
    one = tables.SegmentSummands(number=1)
    one.parts[0], one.high[0] = words.data_ptr(), high.data_ptr()
    one.low[0] = None if low is None else low.data_ptr()
    check = (one, i64(n), *parts, classes, bad)
    run("signs", "sign_check", blocks_for(max(m, LANES), threads), threads, check)
    if n:
        args = (*bits, *parts, low, high, total, f32(count), out, bad)
        run("signs", "sign_values", grid, threads, args)
    return Flag(bad)


def mean(
    words: Sequence[Tensor],
    low: Sequence[Tensor] | None,
    high: Sequence[Tensor],
    counts: Sequence[int],
    segments: Segments,
    name: str,
    out: Tensor,
) -> Flag | None:
    """Run `sign.mean`."""
    n, m, device = segments.numel, len(segments), out.device
    if not m:
        return None
    bad, run, threads = tables.flag(device), launcher(device).launch, tables.THREADS
    grid, parts = tables.grid(tables.tiles_of(n)), (tables.table(segments, device), i64(m))
    masks = before = None
    if low is not None:
        masks = torch.zeros((len(words), m), dtype=torch.int32, device=device)
    for k, (part, divisor) in enumerate(tables.segment_summands(words, low, high, counts)):
        classes = None if masks is None else masks[k * tables.MOST_PAYLOADS :]
        if n:
            args = (part, i64(n), *parts, classes, before, divisor, out)
            run("signs", "sign_mean", grid, threads, args)
        check = (part, i64(n), *parts, classes, bad)
        run("signs", "sign_check", blocks_for(max(m, LANES), threads), threads, check)
        before = out
    return Flag(bad)


KERNELS: dict[str, Kernel] = {
    "sign.decode": decode,
    "sign.encode": encode,
    "sign.mean": mean,
    "sign.pack": pack,
    "sign.pack_above": pack_above,
    "sign.values": values,
    "sign.vote": vote,
}
