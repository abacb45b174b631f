"""Native blockwise 8-bit codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.blocks import BAD_CODE, BAD_SCALE
from gcbench.ops.cpu.library import c, new_float32, output, stream, summands


def int8_encode(
    x: Tensor, segments: Segments, rounding: str, key: Key, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Serve `ops.int8_encode`."""
    n, m, x = segments.numel, len(segments), x.contiguous()
    codes, scales = output(out, torch.int8, n), new_float32(m)
    c.gc_int8_encode(
        c.gc_tensor_address(x, torch.float32, n),
        n,
        segments.table.data_ptr(),
        m,
        rounding == "stochastic",
        *stream(key),
        c.gc_tensor_address(codes, torch.int8, n),
        scales.data_ptr(),
        torch.get_num_threads(),
    )
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
    codes, scales = codes.contiguous(), scales.contiguous()
    out = output(out, torch.float32, n)
    fault = c.gc_int8_decode(
        c.gc_tensor_address(codes, torch.int8, n),
        c.gc_tensor_address(scales, torch.float32, m),
        n,
        segments.table.data_ptr(),
        m,
        None if onto is None else c.gc_tensor_address(onto, torch.float32, n),
        count,
        c.gc_tensor_address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    if fault:
        raise PayloadError(BAD_SCALE if fault == 1 else BAD_CODE)
    return out


def int8_mean(
    payloads: Sequence[tuple[Tensor, Tensor, int]],
    segments: Segments,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.int8_mean`."""
    n, m = segments.numel, len(segments)
    arguments, _kept = summands(payloads, ((torch.int8, n), (torch.float32, m)))
    out = output(out, torch.float32, n)
    fault = c.gc_int8_mean(
        *arguments,
        n,
        segments.table.data_ptr(),
        m,
        c.gc_tensor_address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    if fault:
        raise PayloadError(BAD_SCALE if fault == 1 else BAD_CODE)
    return out


KERNELS = {"int8_encode": int8_encode, "int8_decode": int8_decode, "int8_mean": int8_mean}
