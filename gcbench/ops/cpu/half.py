"""Native 16-bit floating-point formats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.errors import PayloadError
from gcbench.ops.cpu.library import c, output, summands
from gcbench.ops.half import NOT_FINITE


def half_encode(x: Tensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.half_encode`."""
    n, x = x.numel(), x.contiguous()
    out = output(out, dtype, n)
    c.gc_half_encode(
        c.gc_tensor_address(x, torch.float32, n),
        n,
        dtype is torch.bfloat16,
        c.gc_tensor_address(out, dtype, n),
        torch.get_num_threads(),
    )
    return out


def half_decode(codes: Tensor, name: str, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.half_decode`."""
    return half_mean([(codes, 1)], name, out=out)


def half_mean(
    payloads: Sequence[tuple[Tensor, int]], name: str, *, out: Tensor | None = None
) -> Tensor:
    """Serve `ops.half_mean`."""
    dtype, n = payloads[0][0].dtype, payloads[0][0].numel()
    arguments, _kept = summands(payloads, ((dtype, n),))
    out = output(out, torch.float32, n)
    bad = c.gc_half_mean(
        *arguments,
        n,
        dtype is torch.bfloat16,
        c.gc_tensor_address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    if bad:
        raise PayloadError(f"{name}: {NOT_FINITE}")
    return out


KERNELS = {"half_decode": half_decode, "half_encode": half_encode, "half_mean": half_mean}
