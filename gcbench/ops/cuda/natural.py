"""Host code of natural.cu."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gcbench.core.compressor import Key
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import KeyArgument, i64, launcher
from gcbench.ops.dispatch import Flag, Kernel


def encode(x: Tensor, n: int, key: Key, out: Tensor) -> None:
    """Run `natural.encode`."""
    argument = KeyArgument.of(key)
    if n:
        grid, args = tables.grid(tables.tiles_of(n)), (x, i64(n), argument, out)
        launcher(x.device).launch("natural", "natural_encode", grid, tables.THREADS, args)


def mean(
    words: Sequence[Tensor], counts: Sequence[int], workers: int, n: int, name: str, out: Tensor
) -> Flag | None:
    """Run `natural.mean`."""
    if not n:
        return None
    bad, before, grid = tables.flag(out.device), None, tables.grid(tables.tiles_of(n))
    for part, divisor in tables.summands(words, counts):
        args = (part, i64(n), before, divisor, out, bad)
        launcher(out.device).launch("natural", "natural_mean", grid, tables.THREADS, args)
        before = out
    return Flag(bad)


KERNELS: dict[str, Kernel] = {"natural.encode": encode, "natural.mean": mean}
