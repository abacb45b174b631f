"""Host code of int8.cu."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.ops.cuda import statistics, tables
from gcbench.ops.cuda.launch import KeyArgument, blocks_for, f32, i32, i64, launcher
from gcbench.ops.dispatch import Flag, Kernel


def encode(
    x: Tensor, segments: Segments, stochastic: bool, key: Key, codes: Tensor, scales: Tensor
) -> None:
    """Run `int8.encode`; if all segments are short, one kernel reads them once."""
    n, m, argument, device = segments.numel, len(segments), KeyArgument.of(key), x.device
    if not m:
        return
    run, table, random = launcher(device).launch, tables.table(segments, device), i32(stochastic)
    if tables.longest(segments) <= tables.SHORT:
        fused = (x, table, i64(m), random, argument, codes, scales)
        run("int8", "int8_blocks", tables.grid(m), tables.THREADS, fused)
        return
    statistics.absmax(x, segments, scales)
    args = (x, i64(n), table, i64(m), scales, random, argument, codes)
    run("int8", "int8_encode", tables.grid(tables.tiles_of(n)), tables.THREADS, args)
    run("int8", "int8_scales", blocks_for(m, tables.THREADS), tables.THREADS, (scales, i64(m)))


def decode(
    codes: Tensor,
    scales: Tensor,
    segments: Segments,
    onto: Tensor | None,
    count: float,
    out: Tensor,
) -> Flag | None:
    """Run `int8.decode`."""
    n, m, device = segments.numel, len(segments), scales.device
    if not m:
        return None
    bad, table = tables.flag(device), tables.table(segments, device)
    args = (codes, scales, i64(n), table, i64(m), onto, f32(count), out, bad)
    grid = max(1, tables.grid(tables.tiles_of(n)))
    launcher(device).launch("int8", "int8_decode", grid, tables.THREADS, args)
    return Flag(bad)


def mean(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    counts: Sequence[int],
    segments: Segments,
    out: Tensor,
) -> Flag | None:
    """Run `int8.mean`."""
    n, m, device = segments.numel, len(segments), out.device
    if not m:
        return None
    bad, before, table = tables.flag(device), None, tables.table(segments, device)
    grid = max(1, tables.grid(tables.tiles_of(n)))
    for part, divisor in tables.segment_summands(codes, None, scales, counts):
        args = (part, i64(n), table, i64(m), before, divisor, out, bad)
        launcher(device).launch("int8", "int8_mean", grid, tables.THREADS, args)
        before = out
    return Flag(bad)


KERNELS: dict[str, Kernel] = {"int8.encode": encode, "int8.decode": decode, "int8.mean": mean}
