"""What lies around a Fourier transform, natively."""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack

import torch
from torch import Tensor

from gcbench.core.compressor import Segments
from gcbench.ops.cpu.library import addresses, c, c_array, new_float32, output
from gcbench.ops.spectrum import Rows


def _places(rows: Rows | None, segments: Segments) -> tuple[int, int]:
    """Return where the table of `rows` lies, or 0, and the elements of their buffer.

    Raises:
        ValueError: there are not as many as segments.
    """
    if rows is None:
        return 0, segments.numel
    if len(rows.starts) != len(segments):
        raise ValueError(f"{len(rows.starts)} rows for {len(segments)} segments")
    return rows.table.data_ptr(), rows.numel


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
    m, table, x = len(segments), segments.table, x.contiguous()
    unit = new_float32(m)
    places, n = _places(rows, segments)
    out = output(out, torch.float32, n)
    c.gc_spectrum_scaled(
        c.gc_tensor_address(x, torch.float32, segments.numel),
        table.data_ptr(),
        m,
        peak,
        tiny,
        half,
        places,
        unit.data_ptr(),
        c.gc_tensor_address(out, torch.float32, n),
        torch.get_num_threads(),
    )
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
    """Serve `ops.spectrum_unscaled`."""
    n, m, table, bins = segments.numel, len(segments), segments.table, bins.contiguous()
    places, size = _places(rows, segments)
    out = output(out, torch.float32, n)
    energy = output(energy, torch.float32, n // 2)
    c.gc_spectrum_unscaled(
        c.gc_tensor_address(bins, torch.float32, size),
        c.gc_tensor_address(unit.contiguous(), torch.float32, m),
        table.data_ptr(),
        m,
        places,
        c.gc_tensor_address(out, torch.float32, n),
        c.gc_tensor_address(energy, torch.float32, n // 2),
        torch.get_num_threads(),
    )
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
    n, m, table, x = segments.numel, len(segments), segments.table, x.contiguous()
    places, size = _places(rows, segments)
    out = output(out, torch.float32, n)
    c.gc_spectrum_restored(
        c.gc_tensor_address(x, torch.float32, size),
        c.gc_tensor_address(unit.contiguous(), torch.float32, m),
        table.data_ptr(),
        m,
        places,
        c.gc_tensor_address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    return out


def spectrum_mean(
    sparse: Sequence[tuple[Tensor, Tensor]],
    weights: Sequence[float],
    bins: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.spectrum_mean`."""
    number = len(sparse)
    if len(weights) != number:
        raise ValueError(f"{len(weights)} weights for {number} spectra")
    every_kept, every_value = zip(*sparse, strict=True) if sparse else ((), ())
    totals = tuple(map(Tensor.numel, every_kept))
    (places, starts), _kept = addresses(
        (
            (every_kept, torch.int64, totals),
            (every_value, torch.float32, tuple(2 * total for total in totals)),
        )
    )
    out = torch.empty(bins, 2, dtype=torch.float32) if out is None else out
    bad = c.gc_spectrum_mean(
        starts,
        places,
        c_array(totals),
        pack(f"{number}f", *weights),
        number,
        c.gc_tensor_address(out, torch.float32, 2 * bins),
        bins,
        torch.get_num_threads(),
    )
    if bad:
        raise IndexError(f"bins do not increase, or one is not in [0, {bins})")
    return out


def spectrum_fold(
    waves: Tensor,
    factors: Tensor,
    scale: float,
    *,
    inverse: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.spectrum_fold`."""
    n, waves = len(waves), waves.contiguous()
    h = n - 1 if inverse else n
    if h < 1:
        raise ValueError(f"{n} complex numbers: at least {1 + inverse} expected")
    size = h if inverse else h + 1
    out = output(out, torch.complex64, size)
    c.gc_spectrum_fold(
        c.gc_tensor_address(waves, torch.complex64, n),
        c.gc_tensor_address(factors, torch.complex64, h // 2 + 1),
        scale,
        h,
        inverse,
        c.gc_tensor_address(out, torch.complex64, size),
        torch.get_num_threads(),
    )
    return out


KERNELS = {
    "spectrum_scaled": spectrum_scaled,
    "spectrum_unscaled": spectrum_unscaled,
    "spectrum_restored": spectrum_restored,
    "spectrum_mean": spectrum_mean,
    "spectrum_fold": spectrum_fold,
}
