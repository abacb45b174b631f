"""Host code of half.cu."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.errors import PayloadError
from gcbench.ops.backend import Kernels
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import i64, launcher
from gcbench.ops.half import NOT_FINITE

_SUFFIX = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def half_encode(x: Tensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.half_encode`."""
    n, device = x.numel(), x.device
    x, out = tables.checked(x, torch.float32, n), tables.output(out, dtype, n, device)
    if n:
        kernel, grid = f"half_encode_{_SUFFIX[dtype]}", tables.grid(tables.tiles_of(n))
        launcher(device).launch("half", kernel, grid, tables.THREADS, (x, i64(n), out))
    return out


def half_decode(codes: Tensor, name: str, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.half_decode`."""
    return half_mean([(codes, 1)], name, out=out)


def half_mean(
    payloads: Sequence[tuple[Tensor, int]], name: str, *, out: Tensor | None = None
) -> Tensor:
    """Serve `ops.half_mean`."""
    first = payloads[0][0]
    n, dtype, device = first.numel(), first.dtype, first.device
    launches, _kept = tables.summands(payloads, dtype, n, device)
    out = tables.output(out, torch.float32, n, device)
    if n:
        bad, before = tables.flag(device), None
        kernel, grid = f"half_mean_{_SUFFIX[dtype]}", tables.grid(tables.tiles_of(n))
        for part, divisor in launches:
            args = (part, i64(n), before, divisor, out, bad)
            launcher(device).launch("half", kernel, grid, tables.THREADS, args)
            before = out
        if tables.raised(bad):
            raise PayloadError(f"{name}: {NOT_FINITE}")
    return out


KERNELS: Kernels = {
    "half_decode": half_decode,
    "half_encode": half_encode,
    "half_mean": half_mean,
}
