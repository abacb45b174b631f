"""Host code of signs.cu."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import Structure, c_int32, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from gcbench.core.compressor import TILE, Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.backend import Kernels
from gcbench.ops.cuda import statistics, tables
from gcbench.ops.cuda.launch import KeyArgument, blocks_for, f32, f64, i32, i64, launcher, u32
from gcbench.ops.reference import LANES, packed_words
from gcbench.ops.sign import sign_voters, wrong

WARPS = 8
"""Warps of a block; a segment of no more tiles than that is encoded in one pass."""
MEAN_THREADS = 32 * 16
"""Threads of a block that adds up the tiles of a longer one."""


def _floats(tensor: Tensor, numel: int, device: torch.device) -> Tensor:
    return tables.checked(tensor, torch.float32, numel, device)


def _packed(words: Tensor, bits: int, n: int) -> Tensor:
    """Return `words`, contiguous.

    Raises:
        PayloadError: they are not int32, or not as many as n codes take.
    """
    expected = packed_words(n, bits)
    if words.dtype != torch.int32 or words.shape != (expected,):
        raise PayloadError(
            f"{tuple(words.shape)} words of {words.dtype} for {n} codes of {bits} bits: "
            f"{expected} of torch.int32 expected"
        )
    return words.contiguous()


def _check(bad: Tensor, name: str) -> None:
    """Raise what a kernel has found."""
    number = tables.raised(bad)
    if number is not None:
        raise wrong(name, number)


# ---- packed signs --------------------------------------------------------------------------------


def sign_pack(x: Tensor, bits: int = 1, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.sign_pack`."""
    n, device = x.numel(), x.device
    x, out = _floats(x, n, device), tables.output(out, torch.int32, packed_words(n, bits), device)
    if n:
        grid = tables.grid(tables.tiles_of(n))
        kernel = "sign_pack_1" if bits == 1 else "sign_pack_2"
        launcher(device).launch("signs", kernel, grid, tables.THREADS, (x, i64(n), out))
    return out


def sign_pack_above(
    x: Tensor, factor: float, segments: Segments, *, out: Tensor | None = None
) -> Tensor:
    """Serve `ops.sign_pack_above`."""
    n, device = segments.numel, x.device
    x, out = _floats(x, n, device), tables.output(out, torch.int32, packed_words(n, 2), device)
    if n:
        square = statistics.segment_moments(x, segments)[1]
        run, threads, m = launcher(device).launch, tables.THREADS, len(segments)
        parts, limit = (
            (tables.table(segments, device), i64(m)),
            torch.empty(m, device=device, dtype=torch.float32),
        )
        args = (*parts, square, f64(factor), limit)
        run("signs", "sign_limits", blocks_for(m, threads), threads, args)
        pack = (x, i64(n), *parts, limit, out)
        run("signs", "sign_pack_above", tables.grid(tables.tiles_of(n)), threads, pack)
    return out


def sign_decode(
    words: Tensor, bits: int, n: int, name: str, *, out: Tensor | None = None
) -> Tensor:
    """Serve `ops.sign_decode`."""
    words, device = _packed(words, bits, n), words.device
    out = tables.output(out, torch.float32, n, device)
    if n:
        bad = tables.flag(device)
        args = (words, i64(n), i32(bits), out, bad)
        grid = tables.grid(tables.tiles_of(n))
        launcher(device).launch("signs", "sign_decode", grid, tables.THREADS, args)
        _check(bad, name)
    return out


class _Ballots(Structure):
    """`Ballots` of the kernels: words, votes that each is worth, bits of a code, how many."""

    _fields_ = (
        ("words", c_void_p * tables.MOST_PAYLOADS),
        ("counts", c_int32 * tables.MOST_PAYLOADS),
        ("bits", c_int32 * tables.MOST_PAYLOADS),
        ("number", c_int32),
    )


def sign_vote(
    words: Sequence[Tensor],
    counts: Sequence[int],
    bits: Sequence[int],
    n: int,
    name: str,
    *,
    width: int,
    quorum: int = 1,
    coin: Key | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.sign_vote`."""
    voters, number, device = sign_voters(counts, name), len(words), words[0].device
    kept = [
        tables.checked(_packed(word, size, n), torch.int32, packed_words(n, size), device)
        for word, size in zip(words, bits, strict=True)
    ]
    size = packed_words(n, width)
    out = tables.output(out, torch.int32, size, device)
    if not n:
        return out
    parts = []
    for start in range(0, number, tables.MOST_PAYLOADS):
        stop = min(start + tables.MOST_PAYLOADS, number)
        part = _Ballots(number=stop - start)
        for i in range(start, stop):
            part.words[i - start] = kept[i].data_ptr()
            part.counts[i - start] = counts[i]
            part.bits[i - start] = bits[i]
        parts.append(part)
    wide, run, bad = 2 in bits, launcher(device).launch, tables.flag(device)

    def least(votes: int) -> int:
        """Return the sum of bits, or of codes, of a sum of signs of at least `votes`."""
        return voters + votes if wide else (voters + votes + 1) // 2

    quorum = min(quorum, voters)
    if not wide and width == 1 and coin is None and voters == number < tables.MOST_PAYLOADS:
        votes = (parts[0], i64(n), i64(size), u32(least(0)), out, bad)
        run("signs", "sign_majority", blocks_for(size, tables.THREADS), tables.THREADS, votes)
    else:
        used = (2 * voters if wide else voters).bit_length()
        sums = None
        if len(parts) > 1:
            sums = torch.empty(used * LANES * tables.tiles_of(n), dtype=torch.int32, device=device)
        win = least(quorum if width == 2 else 0 if coin is None else 1)
        lose = least(1 - quorum if width == 2 else 0)
        key = KeyArgument.of(coin) if coin is not None else KeyArgument()
        grid = tables.grid(tables.tiles_of(n))
        for i, part in enumerate(parts):
            last = out if i == len(parts) - 1 else None
            sizes = (i64(n), i32(used), i32(wide), i32(i == 0), sums)
            rule = (u32(win), u32(lose), i32(width), i32(coin is not None), key)
            args = (part, *sizes, *rule, last, bad)
            run("signs", "sign_vote", grid, tables.THREADS, args)
    _check(bad, name)
    return out


# ---- bits and means ------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """Which warp encodes what, int64 each; None where there is nothing of the kind."""

    short: Tensor | None
    """A number a warp, WARPS a block: WARPS times the segment, plus the tile in it. All segments
    of a block have as many tiles; warps that are left have minus this number."""
    tiles: Tensor | None
    """(2, tiles): the segment of each tile of the segments of more tiles, and its first element."""
    long: Tensor | None
    """(2, segments): these segments, and how many of these tiles lie before each."""


_plans: weakref.WeakKeyDictionary[Segments, dict[torch.device, _Plan]] = weakref.WeakKeyDictionary()


def plan_of(segments: Segments) -> _Plan:
    """Return which warp encodes what, on the CPU."""
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
    """Return `plan_of` on a device; it is copied there once."""
    known = _plans.setdefault(segments, {})
    if device not in known:
        made = plan_of(segments)
        known[device] = _Plan(*(None if part is None else part.to(device) for part in made))
    return known[device]


def _encode(
    x: Tensor,
    residual: Tensor | None,
    segments: Segments,
    classes: bool,
    left: Tensor | None,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the bits, the values of each segment (the last ones those of +1), and the flag."""
    n, m, device = segments.numel, len(segments), x.device
    x = _floats(x, n, device)
    if residual is not None:
        residual = _floats(residual, n, device)
    words = torch.zeros(packed_words(n, 1), dtype=torch.int32, device=device)
    values = list(torch.zeros((2 if classes else 1, m), device=device, dtype=torch.float32))
    low, high = values[0] if classes else None, values[-1]
    bad = tables.flag(device)
    if not n:
        return words, values, bad
    plan, offsets = _plan(segments, device), tables.table(segments, device)
    run, kind, threads = launcher(device).launch, "class" if classes else "scaled", tables.THREADS
    if plan.short is not None:
        grid = plan.short.numel() // WARPS
        short = (x, residual, offsets, plan.short, i64(n), words, low, high, left, bad)
        run("signs", f"{kind}_short", grid, 32 * WARPS, short)
    if plan.tiles is not None and plan.long is not None:
        number = plan.tiles.shape[1]
        grid, tiles = tables.grid(number), (offsets, plan.tiles, i64(number))
        # And room for sums of these sums.
        sums = torch.empty((3 if classes else 1, 2 * number), dtype=torch.float64, device=device)
        stride = i64(2 * number)
        args = (x, residual, *tiles, i64(n), words, sums, stride)
        run("signs", f"{kind}_sums", grid, threads, args)
        means = (offsets, plan.long, sums, i64(number), stride, low, high, bad)
        run("signs", f"{kind}_means", plan.long.shape[1], MEAN_THREADS, means)
        if left is not None:
            lost = (x, residual, *tiles, low, high, left)
            run("signs", "sign_lost", grid, threads, lost)
    return words, values, bad


def scaled_encode(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Serve `ops.scaled_encode`."""
    words, (scale,), _ = _encode(x, None, segments, False, None)
    return words, scale


def class_encode(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """Serve `ops.class_encode`."""
    words, (low, high), _ = _encode(x, None, segments, True, None)
    return words, low, high


def scaled_feedback(
    x: Tensor, residual: Tensor, segments: Segments, name: str, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Serve `ops.scaled_feedback`."""
    out = tables.output(out, torch.float32, segments.numel, x.device)
    words, (scale,), bad = _encode(x, residual, segments, False, out)
    _check(bad, name)
    return words, scale, out


def class_feedback(
    x: Tensor, residual: Tensor, segments: Segments, name: str, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Serve `ops.class_feedback`."""
    out = tables.output(out, torch.float32, segments.numel, x.device)
    words, (low, high), bad = _encode(x, residual, segments, True, out)
    _check(bad, name)
    return words, low, high, out


# ---- values --------------------------------------------------------------------------------------


def _values(
    words: Tensor,
    low: Tensor | None,
    high: Tensor,
    segments: Segments,
    name: str,
    total: Tensor | None,
    count: int,
    out: Tensor | None,
) -> Tensor:
    """Return what `words` stand for, or `total` + `count` times that, checked before."""
    n, m, device = segments.numel, len(segments), words.device
    words, high = _packed(words, 1, n), _floats(high, m, device)
    if total is not None:
        total = _floats(total, n, device)
    out = tables.output(out, torch.float32, n, device)
    if not m:
        return out
    bad, run, threads = tables.flag(device), launcher(device).launch, tables.THREADS
    grid, bits = tables.grid(tables.tiles_of(n)), (words, i64(n))
    parts = (tables.table(segments, device), i64(m))
    found = None
    if low is not None:
        low = _floats(low, m, device)
        found = torch.zeros(m, dtype=torch.int32, device=device)
        if n:
            run("signs", "sign_classes", grid, threads, (*bits, *parts, found))
    one = tables.SegmentSummands(number=1)
    one.parts[0], one.high[0] = words.data_ptr(), high.data_ptr()
    one.low[0] = None if low is None else low.data_ptr()
    check = (one, i64(n), *parts, found, bad)
    run("signs", "sign_check", blocks_for(max(m, LANES), threads), threads, check)
    if n:
        times = f32(1.0 if total is None else count)
        args = (*bits, *parts, low, high, total, times, out, bad)
        run("signs", "sign_values", grid, threads, args)
    _check(bad, name)
    return out


def scaled_decode(
    words: Tensor,
    scale: Tensor,
    segments: Segments,
    name: str,
    *,
    total: Tensor | None = None,
    count: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.scaled_decode`."""
    return _values(words, None, scale, segments, name, total, count, out)


def class_decode(
    words: Tensor,
    low: Tensor,
    high: Tensor,
    segments: Segments,
    name: str,
    *,
    total: Tensor | None = None,
    count: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.class_decode`."""
    return _values(words, low, high, segments, name, total, count, out)


def sign_mean(
    payloads: Sequence[tuple[Tensor, tuple[Tensor, ...], int]],
    segments: Segments,
    name: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.sign_mean`."""
    n, m, device = segments.numel, len(segments), payloads[0][0].device
    given = [(_packed(words, 1, n), values, count) for words, values, count in payloads]
    size = packed_words(n, 1)
    launches, _kept = tables.segment_summands(given, torch.int32, size, m, device)
    out = tables.output(out, torch.float32, n, device)
    if not m:
        return out
    bad, run, threads = tables.flag(device), launcher(device).launch, tables.THREADS
    grid, parts = tables.grid(tables.tiles_of(n)), (tables.table(segments, device), i64(m))
    found = before = None
    if len(payloads[0][1]) == 2:
        found = torch.zeros((len(payloads), m), dtype=torch.int32, device=device)
    for k, (part, divisor) in enumerate(launches):
        classes = None if found is None else found[k * tables.MOST_PAYLOADS :]
        if n:
            args = (part, i64(n), *parts, classes, before, divisor, out)
            run("signs", "sign_mean", grid, threads, args)
        check = (part, i64(n), *parts, classes, bad)
        run("signs", "sign_check", blocks_for(max(m, LANES), threads), threads, check)
        before = out
    _check(bad, name)
    return out


KERNELS: Kernels = {
    "class_decode": class_decode,
    "class_encode": class_encode,
    "class_feedback": class_feedback,
    "scaled_decode": scaled_decode,
    "scaled_encode": scaled_encode,
    "scaled_feedback": scaled_feedback,
    "sign_decode": sign_decode,
    "sign_mean": sign_mean,
    "sign_pack": sign_pack,
    "sign_pack_above": sign_pack_above,
    "sign_vote": sign_vote,
}
