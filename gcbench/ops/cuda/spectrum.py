"""Host code of spectrum.cu.

`transform.fold` has no kernel: it is used for transforms on the CPU alone (`transform.by_halves`).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gcbench.core.compressor import Segments
from gcbench.ops.cuda import statistics, tables
from gcbench.ops.cuda.launch import blocks_for, f32, i32, i64, launcher
from gcbench.ops.dispatch import Kernel
from gcbench.ops.spectrum import Rows

CHUNK = 4096
"""Bins of a sum per block."""

_tables: Any = WeakIdKeyDictionary()
"""The tables of each `Rows`, by device."""


class _Spectra(Structure):
    """The kernels' `Spectra`: values, bins, number of bins and weight of each; their number."""

    _fields_ = (
        ("values", c_void_p * tables.MOST_PAYLOADS),
        ("bins", c_void_p * tables.MOST_PAYLOADS),
        ("totals", c_int64 * tables.MOST_PAYLOADS),
        ("weights", c_float * tables.MOST_PAYLOADS),
        ("number", c_int32),
    )


def _places(rows: Rows | None, device: torch.device) -> Tensor | None:
    """Return the table of `rows` on a device; the copy is cached."""
    if rows is None:
        return None
    copies = _tables.setdefault(rows, {})
    if device not in copies:
        copies[device] = rows.table.to(device)
    copy: Tensor = copies[device]
    return copy


def _tiles(segments: Segments) -> int:
    """Return the number of tiles if each segment starts a new tile."""
    return int(segments.table[1, -1])


def scaled(
    x: Tensor,
    segments: Segments,
    peak: float,
    tiny: float,
    half: bool,
    rows: Rows | None,
    places: int,
    unit: Tensor,
    out: Tensor,
) -> None:
    """Run `spectrum.scaled`."""
    m, device = len(segments), x.device
    if not m:
        return
    largest, table = torch.empty_like(unit), tables.table(segments, device)
    statistics.absmax(x, segments, largest)
    numbers = f32(peak), f32(tiny), i32(half)
    args = (x, table, i64(m), largest, *numbers, _places(rows, device), unit, out)
    grid = tables.grid(max(1, _tiles(segments)))  # empty segments have units, too
    launcher(device).launch("spectrum", "spectrum_scaled", grid, tables.THREADS, args)


def unscaled(
    bins: Tensor,
    unit: Tensor,
    segments: Segments,
    rows: Rows | None,
    places: int,
    out: Tensor,
    energy: Tensor,
) -> None:
    """Run `spectrum.unscaled`."""
    m, device = len(segments), bins.device
    if segments.numel:
        table = tables.table(segments, device)
        args = (bins, unit, table, i64(m), _places(rows, device), out, energy)
        grid = tables.grid(_tiles(segments))
        launcher(device).launch("spectrum", "spectrum_unscaled", grid, tables.THREADS, args)


def restored(
    x: Tensor, unit: Tensor, segments: Segments, rows: Rows | None, places: int, out: Tensor
) -> None:
    """Run `spectrum.restored`."""
    m, device = len(segments), x.device
    if segments.numel:
        args = (x, unit, tables.table(segments, device), i64(m), _places(rows, device), out)
        grid = tables.grid(_tiles(segments))
        launcher(device).launch("spectrum", "spectrum_restored", grid, tables.THREADS, args)


def mean(
    values: Sequence[Tensor],
    indices: Sequence[Tensor],
    totals: Sequence[int],
    weights: Sequence[float],
    bins: int,
    out: Tensor,
) -> None:
    """Run `spectrum.mean`; bins out of range or order cause a device-side trap."""
    most = tables.MOST_PAYLOADS
    for first in range(0, len(values) if bins else 0, most):
        part = _Spectra(number=len(values[first : first + most]))
        for i in range(part.number):
            k = first + i
            part.values[i], part.bins[i] = values[k].data_ptr(), indices[k].data_ptr()
            part.totals[i], part.weights[i] = totals[k], weights[k]
        args = (part, i64(bins), i32(first > 0), out)
        grid = blocks_for(bins, CHUNK)
        launcher(out.device).launch("spectrum", "spectrum_mean", grid, tables.THREADS, args)


KERNELS: dict[str, Kernel] = {
    "spectrum.mean": mean,
    "spectrum.restored": restored,
    "spectrum.scaled": scaled,
    "spectrum.unscaled": unscaled,
}
