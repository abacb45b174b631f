"""Host code of levels.cu: the codes of QSGD; Elias streams of them stay with torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.backend import Kernels
from gcbench.ops.bitstream import (
    omega_dense_read,
    omega_dense_write,
    omega_sparse_read,
    omega_sparse_write,
)
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import KeyArgument, blocks_for, f32, i32, i64, launcher
from gcbench.ops.cuda.statistics import segment_absmax, segment_moments
from gcbench.ops.quantize import (
    BAD_CODES,
    BAD_NORMS,
    check_norms,
    check_words,
    level_bits,
    one_by_one,
)
from gcbench.ops.reference import check_bits, into, packed_words


def _together(bits: int) -> int:
    """Return how many codes the kernel for this width takes at once.

    Raises:
        ValueError: a width that codes cannot have.
    """
    check_bits(bits)
    return 8 if bits <= 4 else 4 if bits <= 8 else 2


def level_norms(x: Tensor, segments: Segments, norm: str, levels: int) -> Tensor:
    """Serve `ops.level_norms`."""
    m, x = len(segments), tables.checked(x, torch.float32, segments.numel)
    run = launcher(x.device).launch
    if m and norm == "max" and tables.longest(segments) <= tables.SHORT:
        norms = torch.empty(m, device=x.device, dtype=torch.float32)
        args = (x, tables.table(segments, x.device), i64(m), i32(levels), norms)
        run("levels", "level_norms", tables.grid(m), tables.THREADS, args)
        return norms
    squares = None
    if norm == "max":
        norms = segment_absmax(x, segments)
    else:
        squares = segment_moments(x, segments)[1]
        norms = torch.empty(m, device=x.device, dtype=torch.float32)
    if m:
        finish = (squares, i64(m), i32(levels), norms)
        grid = blocks_for(m, tables.THREADS)
        run("levels", "level_finish", grid, tables.THREADS, finish)
    return norms


def level_codes(
    x: Tensor,
    norms: Tensor,
    levels: int,
    segments: Segments,
    key: Key,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.level_codes`."""
    n, m, argument = segments.numel, len(segments), KeyArgument.of(key)
    x, norms = tables.checked(x, torch.float32, n), tables.checked(norms, torch.float32, m)
    out = tables.output(out, torch.int32, n, x.device)
    if n:
        table = tables.table(segments, x.device)
        args = (x, i64(n), table, i64(m), norms, i32(levels), argument, out)
        grid = tables.grid(tables.tiles_of(n))
        launcher(x.device).launch("levels", "level_codes", grid, tables.THREADS, args)
    return out


def level_encode(
    x: Tensor,
    norms: Tensor,
    levels: int,
    coding: str,
    segments: Segments,
    key: Key,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.level_encode`."""
    if coding != "fixed":
        write = omega_dense_write if coding == "omega-dense" else omega_sparse_write
        return into(out, write(level_codes(x, norms, levels, segments, key), levels))
    n, m, bits, argument = segments.numel, len(segments), level_bits(levels), KeyArgument.of(key)
    x, norms = tables.checked(x, torch.float32, n), tables.checked(norms, torch.float32, m)
    out = tables.output(out, torch.int32, packed_words(n, bits), x.device)
    if n:
        table, kernel = tables.table(segments, x.device), f"level_encode_{_together(bits)}"
        args = (x, i64(n), table, i64(m), norms, i32(levels), i32(bits), argument, out)
        grid = tables.grid(tables.tiles_of(n))
        launcher(x.device).launch("levels", kernel, grid, tables.THREADS, args)
    return out


def _raise(bad: Tensor) -> None:
    """Raise what a kernel has found."""
    fault = tables.raised(bad)
    if fault is not None:
        raise PayloadError(BAD_NORMS if fault == 1 else BAD_CODES)


def level_decode(
    words: Tensor,
    norms: Tensor,
    norm: str,
    levels: int,
    coding: str,
    segments: Segments,
    *,
    onto: Tensor | None = None,
    count: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.level_decode`."""
    n, m, bits = segments.numel, len(segments), level_bits(levels)
    if coding != "fixed":
        check_norms(norms, m)
        read = omega_dense_read if coding == "omega-dense" else omega_sparse_read
        words, together = read(words, n, levels), 1
    else:
        check_words(words, norms, n, bits, m)
        together = _together(bits)
    words, norms = words.contiguous(), norms.contiguous()
    onto = None if onto is None else tables.checked(onto, torch.float32, n)
    out = tables.output(out, torch.float32, n, norms.device)
    if not m:
        return out
    bad, reached = tables.flag(norms.device), None
    if norm == "max":  # a segment has its own largest magnitude
        reached = torch.zeros(m, dtype=torch.uint8, device=norms.device)
    run, level = launcher(norms.device).launch, i32(levels)
    if n:
        table, kernel = tables.table(segments, norms.device), f"level_decode_{together}"
        more = (onto, f32(count), out, reached, bad)
        args = (words, i64(n), table, i64(m), norms, level, i32(bits), *more)
        run("levels", kernel, tables.grid(tables.tiles_of(n)), tables.THREADS, args)
    one = tables.SegmentSummands(number=1)
    one.high[0] = norms.data_ptr()
    check = (one, i64(m), level, reached, bad)
    run("levels", "level_check", blocks_for(m, tables.THREADS), tables.THREADS, check)
    _raise(bad)
    return out


def level_mean(
    payloads: Sequence[tuple[Tensor, Tensor, int]],
    norm: str,
    levels: int,
    coding: str,
    segments: Segments,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.level_mean`; a stream is read in order, and each is added when it has been."""
    if coding != "fixed":
        return into(out, one_by_one(level_decode, payloads, norm, levels, coding, segments))
    n, m, bits, device = segments.numel, len(segments), level_bits(levels), payloads[0][0].device
    for words, norms, _ in payloads:
        check_words(words, norms, n, bits, m)
    parts = [(words, (norms,), count) for words, norms, count in payloads]
    size = packed_words(n, bits)
    launches, _kept = tables.segment_summands(parts, torch.int32, size, m, device)
    out = tables.output(out, torch.float32, n, device)
    if not m:
        return out
    bad, before, reached = tables.flag(device), None, None
    if norm == "max":
        reached = torch.zeros((len(payloads), m), dtype=torch.uint8, device=device)
    run, kernel = launcher(device).launch, f"level_mean_{_together(bits)}"
    table, grid = tables.table(segments, device), tables.grid(tables.tiles_of(n))
    for k, (part, divisor) in enumerate(launches):
        marks = None if reached is None else reached[k * tables.MOST_PAYLOADS :]
        if n:
            sizes = (i64(n), table, i64(m), i32(levels), i32(bits))
            args = (part, *sizes, before, divisor, out, marks, bad)
            run("levels", kernel, grid, tables.THREADS, args)
        check = (part, i64(m), i32(levels), marks, bad)
        run("levels", "level_check", blocks_for(m, tables.THREADS), tables.THREADS, check)
        before = out
    _raise(bad)
    return out


KERNELS: Kernels = {
    "level_norms": level_norms,
    "level_codes": level_codes,
    "level_encode": level_encode,
    "level_decode": level_decode,
    "level_mean": level_mean,
}
