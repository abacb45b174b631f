"""Host code of ternary.cu."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.backend import Kernels
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import KeyArgument, i32, i64, launcher
from gcbench.ops.reference import packed_words, ternary_bits


def ternary_encode(
    x: Tensor,
    limit: Tensor | None,
    scale: Tensor,
    segments: Segments,
    key: Key,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.ternary_encode`."""
    n, m, argument = segments.numel, len(segments), KeyArgument.of(key)
    x, scale = tables.checked(x, torch.float32, n), tables.checked(scale, torch.float32, m)
    limit = None if limit is None else tables.checked(limit, torch.float32, m)
    out = tables.output(out, torch.int32, packed_words(n, 2), x.device)
    if n:
        args = (x, i64(n), tables.table(segments, x.device), i64(m), limit, scale, argument, out)
        grid = tables.grid(tables.tiles_of(n))
        launcher(x.device).launch("ternary", "ternary_encode", grid, tables.THREADS, args)
    return out


def _payloads(
    payloads: Sequence[tuple[Tensor, int]], n: int, bits: int | None, device: torch.device
) -> tuple[tables.Payloads, list[Tensor]]:
    """Return the kernels' argument, and what it points into."""
    argument, kept = tables.Payloads(number=len(payloads)), []
    for i, (words, count) in enumerate(payloads):
        width = bits or ternary_bits(count)
        if words.dtype != torch.int32 or words.shape != (packed_words(n, width),):
            raise PayloadError(f"ternary payloads of {n} codes in {width} bits: a length is wrong")
        if words.device != device:
            raise PayloadError(f"ternary payload on {words.device}: {device} expected")
        kept.append(words.contiguous())
        argument.words[i] = kept[i].data_ptr()
        argument.bits[i] = width
        argument.tops[i] = 2 * count
    return argument, kept


def _check(bad: Tensor, payloads: Sequence[tuple[Tensor, int]]) -> None:
    number = tables.raised(bad)
    if number is not None:
        count = payloads[number][1]
        raise PayloadError(
            f"ternary payload of {count} worker(s), number {number}: a code above {2 * count}"
        )


def _few(payloads: Sequence[tuple[Tensor, int]], n: int) -> Sequence[tuple[Tensor, int]]:
    """Return payloads of the same sum, no more than one launch takes."""
    while len(payloads) > tables.MOST_PAYLOADS:
        most = tables.MOST_PAYLOADS
        parts = [payloads[i : i + most] for i in range(0, len(payloads), most)]
        payloads = [ternary_merge(part, n) for part in parts]
    return payloads


def ternary_mean(
    payloads: Sequence[tuple[Tensor, int]],
    scale: Tensor,
    segments: Segments,
    *,
    bits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.ternary_mean`."""
    n, m, device = segments.numel, len(segments), scale.device
    scale = tables.checked(scale, torch.float32, m)
    if not (scale.isfinite() & (scale >= 0)).all():
        raise PayloadError("ternary payload: scales must be finite and not negative")
    payloads = _few(payloads, n)
    argument, _kept = _payloads(payloads, n, bits, device)
    out = tables.output(out, torch.float32, n, device)
    if n:
        bad = tables.flag(device)
        workers = i32(sum(count for _, count in payloads))
        table = tables.table(segments, device)
        args = (argument, workers, scale, i64(n), table, i64(m), out, bad)
        grid = tables.grid(tables.tiles_of(n))
        launcher(device).launch("ternary", "ternary_mean", grid, tables.THREADS, args)
        _check(bad, payloads)
    return out


def ternary_merge(
    payloads: Sequence[tuple[Tensor, int]], n: int, *, out: Tensor | None = None
) -> tuple[Tensor, int]:
    """Serve `ops.ternary_merge`."""
    payloads = _few(payloads, n)
    device, workers = payloads[0][0].device, sum(count for _, count in payloads)
    argument, _kept = _payloads(payloads, n, None, device)
    width = ternary_bits(workers)
    out = tables.output(out, torch.int32, packed_words(n, width), device)
    if n:
        bad = tables.flag(device)
        args = (argument, i64(n), i32(width), out, bad)
        grid = tables.grid(tables.tiles_of(n))
        launcher(device).launch("ternary", "ternary_merge", grid, tables.THREADS, args)
        _check(bad, payloads)
    return out, workers


KERNELS: Kernels = {
    "ternary_encode": ternary_encode,
    "ternary_mean": ternary_mean,
    "ternary_merge": ternary_merge,
}
