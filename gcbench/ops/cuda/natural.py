"""Host code of natural.cu."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Key
from gcbench.core.errors import PayloadError
from gcbench.ops.backend import Kernels
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import KeyArgument, i64, launcher
from gcbench.ops.natural import BAD_CODE, NATURAL_BITS, natural_size
from gcbench.ops.reference import packed_words


def natural_encode(x: Tensor, key: Key, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.natural_encode`."""
    n, argument, device = x.numel(), KeyArgument.of(key), x.device
    x = tables.checked(x, torch.float32, n)
    out = tables.output(out, torch.int32, packed_words(n, NATURAL_BITS), device)
    if n:
        grid, args = tables.grid(tables.tiles_of(n)), (x, i64(n), argument, out)
        launcher(device).launch("natural", "natural_encode", grid, tables.THREADS, args)
    return out


def natural_decode(words: Tensor, n: int, name: str, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.natural_decode`."""
    return natural_mean([(words, 1)], n, name, out=out)


def natural_mean(
    payloads: Sequence[tuple[Tensor, int]], n: int, name: str, *, out: Tensor | None = None
) -> Tensor:
    """Serve `ops.natural_mean`."""
    size, device = natural_size(payloads, n), payloads[0][0].device
    launches, _kept = tables.summands(payloads, torch.int32, size, device)
    out = tables.output(out, torch.float32, n, device)
    if n:
        bad, before = tables.flag(device), None
        grid = tables.grid(tables.tiles_of(n))
        for part, divisor in launches:
            args = (part, i64(n), before, divisor, out, bad)
            launcher(device).launch("natural", "natural_mean", grid, tables.THREADS, args)
            before = out
        if tables.raised(bad):
            raise PayloadError(f"{name}: {BAD_CODE}")
    return out


KERNELS: Kernels = {
    "natural_decode": natural_decode,
    "natural_encode": natural_encode,
    "natural_mean": natural_mean,
}
