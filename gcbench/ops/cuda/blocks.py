"""Host code of blocks.cu."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.backend import Kernels
from gcbench.ops.blocks import BAD_CODE, BAD_SCALE
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import KeyArgument, blocks_for, f32, i32, i64, launcher
from gcbench.ops.cuda.statistics import segment_absmax


def int8_encode(
    x: Tensor, segments: Segments, rounding: str, key: Key, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Serve `ops.int8_encode`."""
    n, m, argument = segments.numel, len(segments), KeyArgument.of(key)
    x = tables.checked(x, torch.float32, n)
    codes = tables.output(out, torch.int8, n, x.device)
    if not m:
        return codes, torch.empty(0, device=x.device, dtype=torch.float32)
    run, table = launcher(x.device).launch, tables.table(segments, x.device)
    stochastic = i32(rounding == "stochastic")
    if tables.longest(segments) <= tables.SHORT:
        scales = torch.empty(m, device=x.device, dtype=torch.float32)
        fused = (x, table, i64(m), stochastic, argument, codes, scales)
        run("blocks", "int8_blocks", tables.grid(m), tables.THREADS, fused)
        return codes, scales
    scales = segment_absmax(x, segments)
    args = (x, i64(n), table, i64(m), scales, stochastic, argument, codes)
    run("blocks", "int8_encode", tables.grid(tables.tiles_of(n)), tables.THREADS, args)
    run("blocks", "int8_scales", blocks_for(m, tables.THREADS), tables.THREADS, (scales, i64(m)))
    return codes, scales


def int8_decode(
    codes: Tensor,
    scales: Tensor,
    segments: Segments,
    *,
    onto: Tensor | None = None,
    count: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.int8_decode`."""
    n, m = segments.numel, len(segments)
    codes, scales = tables.checked(codes, torch.int8, n), tables.checked(scales, torch.float32, m)
    onto = None if onto is None else tables.checked(onto, torch.float32, n)
    out = tables.output(out, torch.float32, n, scales.device)
    if not m:
        return out
    bad = tables.flag(scales.device)
    table = tables.table(segments, scales.device)
    args = (codes, scales, i64(n), table, i64(m), onto, f32(count), out, bad)
    grid = max(1, tables.grid(tables.tiles_of(n)))
    launcher(scales.device).launch("blocks", "int8_decode", grid, tables.THREADS, args)
    fault = tables.raised(bad)
    if fault is not None:
        raise PayloadError(BAD_SCALE if fault == 1 else BAD_CODE)
    return out


def int8_mean(
    payloads: Sequence[tuple[Tensor, Tensor, int]],
    segments: Segments,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.int8_mean`."""
    n, m, device = segments.numel, len(segments), payloads[0][0].device
    parts = [(codes, (scales,), count) for codes, scales, count in payloads]
    launches, _kept = tables.segment_summands(parts, torch.int8, n, m, device)
    out = tables.output(out, torch.float32, n, device)
    if m:
        bad, before, table = tables.flag(device), None, tables.table(segments, device)
        grid = max(1, tables.grid(tables.tiles_of(n)))
        for part, divisor in launches:
            args = (part, i64(n), table, i64(m), before, divisor, out, bad)
            launcher(device).launch("blocks", "int8_mean", grid, tables.THREADS, args)
            before = out
        fault = tables.raised(bad)
        if fault is not None:
            raise PayloadError(BAD_SCALE if fault == 1 else BAD_CODE)
    return out


KERNELS: Kernels = {
    "int8_encode": int8_encode,
    "int8_decode": int8_decode,
    "int8_mean": int8_mean,
}
