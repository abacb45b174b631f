"""Native statistics of segments."""

from __future__ import annotations

import torch
from torch import Tensor

from gcbench.core.compressor import Segments
from gcbench.ops.cpu.library import c, new_float32, new_float64


def segment_absmax(x: Tensor, segments: Segments) -> Tensor:
    """Serve `ops.segment_absmax`."""
    m, table, x = len(segments), segments.table, x.contiguous()
    out = new_float32(m)
    c.gc_segment_absmax(
        c.gc_tensor_address(x, torch.float32, segments.numel),
        table.data_ptr(),
        m,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def segment_moments(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Serve `ops.segment_moments`."""
    m, table, x = len(segments), segments.table, x.contiguous()
    total = new_float64(m)
    square = new_float64(m)
    c.gc_segment_statistics(
        c.gc_tensor_address(x, torch.float32, segments.numel),
        table.data_ptr(),
        m,
        None,
        total.data_ptr(),
        square.data_ptr(),
        torch.get_num_threads(),
    )
    return total, square


def ternary_scales(
    x: Tensor, segments: Segments, clip: float, *, at_limit: bool = False
) -> tuple[Tensor | None, Tensor]:
    """Serve `ops.ternary_scales`."""
    m, table, x = len(segments), segments.table, x.contiguous()
    scale = new_float32(m)
    limit = new_float32(m) if clip and not at_limit else None
    c.gc_ternary_scales(
        c.gc_tensor_address(x, torch.float32, segments.numel),
        table.data_ptr(),
        m,
        clip,
        at_limit,
        None if limit is None else limit.data_ptr(),
        scale.data_ptr(),
        torch.get_num_threads(),
    )
    return limit, scale


KERNELS = {
    "segment_absmax": segment_absmax,
    "segment_moments": segment_moments,
    "ternary_scales": ternary_scales,
}
