"""Host code of spectrum.cu.

`ops.spectrum_fold` has no kernel: it serves transforms on the CPU alone (`transform.by_halves`).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gcbench.core.compressor import Segments
from gcbench.ops.backend import Kernels
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import blocks_for, f32, i32, i64, launcher
from gcbench.ops.cuda.statistics import segment_absmax
from gcbench.ops.spectrum import Rows

CHUNK = 4096
"""Bins of a sum that a block has."""

_tables: Any = WeakIdKeyDictionary()
"""Of each `Rows`, its table on each device."""


class _Spectra(Structure):
    """`Spectra` of the kernels: values, bins, how many, and the weight, of each sparse spectrum."""

    _fields_ = (
        ("values", c_void_p * tables.MOST_PAYLOADS),
        ("bins", c_void_p * tables.MOST_PAYLOADS),
        ("kept", c_int64 * tables.MOST_PAYLOADS),
        ("weights", c_float * tables.MOST_PAYLOADS),
        ("number", c_int32),
    )


def _places(
    rows: Rows | None, segments: Segments, device: torch.device
) -> tuple[Tensor | None, int]:
    """Return the table of `rows`, which is copied to the device once, and elements of their buffer.

    Raises:
        ValueError: there are not as many as segments.
    """
    if rows is None:
        return None, segments.numel
    if len(rows.starts) != len(segments):
        raise ValueError(
            f"{len(rows.starts)} rows for {len(segments)} segments: a row for each expected"
        )
    known = _tables.setdefault(rows, {})
    if device not in known:
        known[device] = rows.table.to(device)
    return known[device], rows.numel


def _tiles(segments: Segments) -> int:
    """Return the tiles of segments, each inside one."""
    return int(segments.table[1, -1])


def spectrum_scaled(
    x: Tensor,
    segments: Segments,
    peak: float,
    tiny: float,
    *,
    half: bool = False,
    rows: Rows | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Serve `ops.spectrum_scaled`."""
    m, device = len(segments), x.device
    x = tables.checked(x, torch.float32, segments.numel)
    places, n = _places(rows, segments, device)
    out = tables.output(out, torch.float32, n, device)
    unit = torch.empty(m, dtype=torch.float32, device=device)
    if m:
        largest, table = segment_absmax(x, segments), tables.table(segments, device)
        numbers = f32(peak), f32(tiny), i32(half)
        args = (x, table, i64(m), largest, *numbers, places, unit, out)
        grid = tables.grid(max(1, _tiles(segments)))  # empty segments have units, too
        launcher(device).launch("spectrum", "spectrum_scaled", grid, tables.THREADS, args)
    return out, unit


def spectrum_unscaled(
    bins: Tensor,
    unit: Tensor,
    segments: Segments,
    *,
    rows: Rows | None = None,
    out: Tensor | None = None,
    energy: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Serve `ops.spectrum_unscaled`.

    Raises:
        ValueError: an odd number of floats: a bin has two.
    """
    n, m, device = segments.numel, len(segments), bins.device
    if n % 2:
        raise ValueError(f"segments of {n} floats: an even number expected, two a bin")
    places, size = _places(rows, segments, device)
    bins = tables.checked(bins, torch.float32, size)
    unit = tables.checked(unit, torch.float32, m, device)
    out = tables.output(out, torch.float32, n, device)
    energy = tables.output(energy, torch.float32, n // 2, device)
    if n:
        args = (bins, unit, tables.table(segments, device), i64(m), places, out, energy)
        grid = tables.grid(_tiles(segments))
        launcher(device).launch("spectrum", "spectrum_unscaled", grid, tables.THREADS, args)
    return out, energy


def spectrum_restored(
    x: Tensor,
    unit: Tensor,
    segments: Segments,
    *,
    rows: Rows | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.spectrum_restored`."""
    n, m, device = segments.numel, len(segments), x.device
    places, size = _places(rows, segments, device)
    x = tables.checked(x, torch.float32, size)
    unit = tables.checked(unit, torch.float32, m, device)
    out = tables.output(out, torch.float32, n, device)
    if n:
        args = (x, unit, tables.table(segments, device), i64(m), places, out)
        grid = tables.grid(_tiles(segments))
        launcher(device).launch("spectrum", "spectrum_restored", grid, tables.THREADS, args)
    return out


def spectrum_mean(
    sparse: Sequence[tuple[Tensor, Tensor]],
    weights: Sequence[float],
    bins: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.spectrum_mean`; bins out of range or order end the kernel."""
    device, most = sparse[0][1].device, tables.MOST_PAYLOADS
    if len(weights) != len(sparse):
        raise ValueError(f"{len(weights)} weights for {len(sparse)} spectra: one for each expected")
    held = [
        (
            tables.checked(values, torch.float32, 2 * kept.numel(), device),
            tables.checked(kept, torch.int64, kept.numel(), device),
        )
        for kept, values in sparse
    ]
    out = tables.output(out, torch.float32, 2 * bins, device)
    if bins:
        for first in range(0, len(held), most):
            few = held[first : first + most]
            part = _Spectra(number=len(few))
            for i, (values, kept) in enumerate(few):
                part.values[i], part.bins[i] = values.data_ptr(), kept.data_ptr()
                part.kept[i], part.weights[i] = kept.numel(), weights[first + i]
            args = (part, i64(bins), i32(first > 0), out)
            grid = blocks_for(bins, CHUNK)
            launcher(device).launch("spectrum", "spectrum_mean", grid, tables.THREADS, args)
    return out.view(bins, 2)


KERNELS: Kernels = {
    "spectrum_mean": spectrum_mean,
    "spectrum_restored": spectrum_restored,
    "spectrum_scaled": spectrum_scaled,
    "spectrum_unscaled": spectrum_unscaled,
}
