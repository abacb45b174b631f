"""Host code of levels.cu: QSGD's codes. Plain torch writes and reads their Elias streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.ops.cuda import statistics, tables
from gcbench.ops.cuda.launch import KeyArgument, blocks_for, f32, i32, i64, launcher
from gcbench.ops.dispatch import Flag, Kernel


def _together(bits: int) -> int:
    """Return the number of codes of this width that a thread handles at once; 0: int32 codes."""
    return 1 if bits == 0 else 8 if bits <= 4 else 4 if bits <= 8 else 2


def norms(x: Tensor, segments: Segments, two: bool, levels: int, out: Tensor) -> None:
    """Run `levels.norms`; if all segments are short, one kernel does it."""
    m, run = len(segments), launcher(x.device).launch
    if not m:
        return
    if not two and tables.longest(segments) <= tables.SHORT:
        args = (x, tables.table(segments, x.device), i64(m), i32(levels), out)
        run("levels", "level_norms", tables.grid(m), tables.THREADS, args)
        return
    squares = None
    if two:
        total, squares = torch.empty((2, m), dtype=torch.float64, device=x.device)
        statistics.moments(x, segments, total, squares)
    else:
        statistics.absmax(x, segments, out)
    finish = (squares, i64(m), i32(levels), out)
    run("levels", "level_finish", blocks_for(m, tables.THREADS), tables.THREADS, finish)


def codes(x: Tensor, norms: Tensor, levels: int, segments: Segments, key: Key, out: Tensor) -> None:
    """Run `levels.codes`."""
    n, m, argument = segments.numel, len(segments), KeyArgument.of(key)
    if n:
        table = tables.table(segments, x.device)
        args = (x, i64(n), table, i64(m), norms, i32(levels), argument, out)
        grid = tables.grid(tables.tiles_of(n))
        launcher(x.device).launch("levels", "level_codes", grid, tables.THREADS, args)


def encode(
    x: Tensor,
    norms: Tensor,
    levels: int,
    bits: int,
    segments: Segments,
    key: Key,
    out: Tensor,
) -> None:
    """Run `levels.encode`."""
    n, m, argument = segments.numel, len(segments), KeyArgument.of(key)
    if n:
        table, kernel = tables.table(segments, x.device), f"level_encode_{_together(bits)}"
        args = (x, i64(n), table, i64(m), norms, i32(levels), i32(bits), argument, out)
        grid = tables.grid(tables.tiles_of(n))
        launcher(x.device).launch("levels", kernel, grid, tables.THREADS, args)


def decode(
    words: Tensor,
    bits: int,
    norms: Tensor,
    exact: bool,
    levels: int,
    segments: Segments,
    onto: Tensor | None,
    count: float,
    out: Tensor,
) -> Flag | None:
    """Run `levels.decode`."""
    n, m, device = segments.numel, len(segments), norms.device
    if not m:
        return None
    bad, reached = tables.flag(device), None
    if exact:  # the largest code must occur in every segment
        reached = torch.zeros(m, dtype=torch.uint8, device=device)
    run, level = launcher(device).launch, i32(levels)
    if n:
        table, kernel = tables.table(segments, device), f"level_decode_{_together(bits)}"
        more = (onto, f32(count), out, reached, bad)
        args = (words, i64(n), table, i64(m), norms, level, i32(bits), *more)
        run("levels", kernel, tables.grid(tables.tiles_of(n)), tables.THREADS, args)
    one = tables.SegmentSummands(number=1)
    one.high[0] = norms.data_ptr()
    check = (one, i64(m), level, reached, bad)
    run("levels", "level_check", blocks_for(m, tables.THREADS), tables.THREADS, check)
    return Flag(bad)


def mean(
    words: Sequence[Tensor],
    norms: Sequence[Tensor],
    counts: Sequence[int],
    bits: int,
    exact: bool,
    levels: int,
    segments: Segments,
    out: Tensor,
) -> Flag | None:
    """Run `levels.mean`."""
    n, m, device = segments.numel, len(segments), out.device
    if not m:
        return None
    bad, before, reached = tables.flag(device), None, None
    if exact:
        reached = torch.zeros((len(words), m), dtype=torch.uint8, device=device)
    run, kernel = launcher(device).launch, f"level_mean_{_together(bits)}"
    table, grid = tables.table(segments, device), tables.grid(tables.tiles_of(n))
    launches = tables.segment_summands(words, None, norms, counts)
    for k, (part, divisor) in enumerate(launches):
        marks = None if reached is None else reached[k * tables.MOST_PAYLOADS :]
        if n:
            sizes = (i64(n), table, i64(m), i32(levels), i32(bits))
            args = (part, *sizes, before, divisor, out, marks, bad)
            run("levels", kernel, grid, tables.THREADS, args)
        check = (part, i64(m), i32(levels), marks, bad)
        run("levels", "level_check", blocks_for(m, tables.THREADS), tables.THREADS, check)
        before = out
    return Flag(bad)


KERNELS: dict[str, Kernel] = {
    "levels.norms": norms,
    "levels.codes": codes,
    "levels.encode": encode,
    "levels.decode": decode,
    "levels.mean": mean,
}
