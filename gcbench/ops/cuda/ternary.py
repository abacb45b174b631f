"""Host code of ternary.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.ops import ternary
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import KeyArgument, i32, i64, launcher
from gcbench.ops.dispatch import UNRAISED, Flag, Kernel
from gcbench.ops.packing import packed_words


def encode(
    x: Tensor, limit: Tensor | None, scale: Tensor, segments: Segments, key: Key, out: Tensor
) -> None:
    """Run `ternary.encode`."""
    n, m, argument = segments.numel, len(segments), KeyArgument.of(key)
    if n:
        args = (x, i64(n), tables.table(segments, x.device), i64(m), limit, scale, argument, out)
        grid = tables.grid(tables.tiles_of(n))
        launcher(x.device).launch("ternary", "ternary_encode", grid, tables.THREADS, args)


def _payloads(words: Sequence[Tensor], bits: Sequence[int], tops: Sequence[int]) -> tables.Payloads:
    argument = tables.Payloads(number=len(words))
    for i, tensor in enumerate(words):
        argument.words[i], argument.bits[i], argument.tops[i] = tensor.data_ptr(), bits[i], tops[i]
    return argument


class _Few(NamedTuple):
    """Payloads of one launch, and the error flag of the merges that produced them."""

    words: Sequence[Tensor]
    bits: Sequence[int]
    tops: Sequence[int]
    fault: Tensor | None = None

    def flag(self, final: Tensor) -> Flag:
        """Return the flag of the final launch, or that of the merges if it has an error."""
        if self.fault is not None:
            final = torch.where(self.fault == UNRAISED, final, self.fault)
        return Flag(final, lambda number: number if number < 0 else number + 1)


def _few(words: Sequence[Tensor], bits: Sequence[int], tops: Sequence[int], n: int) -> _Few:
    """Merge payloads until they fit in one launch; their sum stays the same."""
    most = tables.MOST_PAYLOADS
    few = _Few(words, bits, tops)
    while n and len(few.words) > most:
        sums, widths, largest, flags = [], [], [], []
        for i in range(0, len(few.words), most):
            some = _Few(few.words[i : i + most], few.bits[i : i + most], few.tops[i : i + most])
            top = sum(some.tops)
            width = ternary.bits(top // 2)
            merged = torch.empty(packed_words(n, width), dtype=torch.int32, device=words[0].device)
            bad = _merged(some, n, width, merged)
            flags.append(torch.where(bad == UNRAISED, UNRAISED, bad + i))
            sums.append(merged)
            widths.append(width)
            largest.append(top)
        fault = torch.stack(flags).amin(0).int() if few.fault is None else few.fault
        few = _Few(sums, widths, largest, fault)
    return few


def _merged(few: _Few, n: int, width: int, out: Tensor) -> Tensor:
    """Launch `ternary_merge`, and return its flag."""
    bad = tables.flag(out.device)
    args = (_payloads(few.words, few.bits, few.tops), i64(n), i32(width), out, bad)
    grid = tables.grid(tables.tiles_of(n))
    launcher(out.device).launch("ternary", "ternary_merge", grid, tables.THREADS, args)
    return bad


def mean(
    words: Sequence[Tensor],
    bits: Sequence[int],
    tops: Sequence[int],
    workers: int,
    scale: Tensor,
    segments: Segments,
    out: Tensor,
) -> Flag | None:
    """Run `ternary.mean`."""
    n, m, device = segments.numel, len(segments), scale.device
    good = (scale.isfinite() & (scale >= 0)).all()
    few, bad = _few(words, bits, tops, n), torch.where(good, UNRAISED, -1).int().view(1)
    if n:
        argument, table = _payloads(few.words, few.bits, few.tops), tables.table(segments, device)
        args = (argument, i32(workers), scale, i64(n), table, i64(m), out, bad)
        grid = tables.grid(tables.tiles_of(n))
        launcher(device).launch("ternary", "ternary_mean", grid, tables.THREADS, args)
    return few.flag(bad)


def merge(
    words: Sequence[Tensor],
    bits: Sequence[int],
    tops: Sequence[int],
    n: int,
    width: int,
    out: Tensor,
) -> Flag | None:
    """Run `ternary.merge`."""
    if not n:
        return None
    few = _few(words, bits, tops, n)
    return few.flag(_merged(few, n, width, out))


KERNELS: dict[str, Kernel] = {
    "ternary.encode": encode,
    "ternary.mean": mean,
    "ternary.merge": merge,
}
