"""What lies around a Fourier transform, natively."""

from __future__ import annotations

import torch
from torch import Tensor

from gcbench.compressor import Segments
from gcbench.ops.cpu.library import address, c, output

SIGNATURES = {
    "gc_spectrum_scaled": "pplffippi",
    "gc_spectrum_unscaled": "ppplppi",
    "gc_spectrum_restored": "ppplpi",
    "gc_spectrum_pad": "ppllpi",
    "gc_spectrum_cut": "pplipi",
    "gc_spectrum_fold": "pplpi",
    "gc_spectrum_unfold": "ppllpi",
}


def spectrum_scaled(
    x: Tensor,
    segments: Segments,
    peak: float,
    tiny: float,
    *,
    half: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Serve `ops.spectrum_scaled`."""
    n, m, table, x = segments.numel, len(segments), segments.table, x.contiguous()
    unit = torch.empty(m, dtype=torch.float32)
    out = output(out, torch.float32, n)
    c.gc_spectrum_scaled(
        address(x, torch.float32, n),
        table.data_ptr(),
        m,
        peak,
        tiny,
        half,
        unit.data_ptr(),
        address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    return out, unit


def spectrum_unscaled(
    bins: Tensor, unit: Tensor, segments: Segments, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Serve `ops.spectrum_unscaled`."""
    n, m, table, bins = segments.numel, len(segments), segments.table, bins.contiguous()
    out = output(out, torch.float32, n)
    energy = torch.empty(n // 2, dtype=torch.float32)
    c.gc_spectrum_unscaled(
        address(bins, torch.float32, n),
        address(unit.contiguous(), torch.float32, m),
        table.data_ptr(),
        m,
        address(out, torch.float32, n),
        energy.data_ptr(),
        torch.get_num_threads(),
    )
    return out, energy


def spectrum_restored(
    x: Tensor, unit: Tensor, segments: Segments, *, out: Tensor | None = None
) -> Tensor:
    """Serve `ops.spectrum_restored`."""
    n, m, table, x = segments.numel, len(segments), segments.table, x.contiguous()
    out = output(out, torch.float32, n)
    c.gc_spectrum_restored(
        address(x, torch.float32, n),
        address(unit.contiguous(), torch.float32, m),
        table.data_ptr(),
        m,
        address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    return out


def _room(width: int, length: int) -> int:
    """Return `width`, the complex numbers of a tensor.

    Raises:
        ValueError: it is below `length`.
    """
    if width < length:
        raise ValueError(f"{width} complex numbers: at least {length} expected")
    return width


def spectrum_pad(x: Tensor, chirp: Tensor, width: int, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.spectrum_pad`."""
    length, x = len(x), x.contiguous()
    out = output(out, torch.complex64, _room(width, length))
    c.gc_spectrum_pad(
        address(x, torch.complex64, length),
        address(chirp, torch.complex64, length),
        length,
        width,
        address(out, torch.complex64, width),
        torch.get_num_threads(),
    )
    return out


def spectrum_cut(
    waves: Tensor, chirp: Tensor, *, conjugate: bool = False, out: Tensor | None = None
) -> Tensor:
    """Serve `ops.spectrum_cut`."""
    length, waves, out = len(chirp), waves.contiguous(), output(out, torch.complex64, len(chirp))
    c.gc_spectrum_cut(
        address(waves, torch.complex64, _room(len(waves), length)),
        address(chirp, torch.complex64, length),
        length,
        conjugate,
        address(out, torch.complex64, length),
        torch.get_num_threads(),
    )
    return out


def spectrum_fold(waves: Tensor, factors: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.spectrum_fold`."""
    h, waves = factors.shape[1] - 1, waves.contiguous()
    out = output(out, torch.complex64, h + 1)
    c.gc_spectrum_fold(
        address(waves, torch.complex64, _room(len(waves), h)),
        address(factors, torch.float32, 4 * (h + 1)),
        h,
        address(out, torch.complex64, h + 1),
        torch.get_num_threads(),
    )
    return out


def spectrum_unfold(
    bins: Tensor, factors: Tensor, width: int, *, out: Tensor | None = None
) -> Tensor:
    """Serve `ops.spectrum_unfold`."""
    h, bins = factors.shape[1] - 1, bins.contiguous()
    out = output(out, torch.complex64, _room(width, h))
    c.gc_spectrum_unfold(
        address(bins, torch.complex64, h + 1),
        address(factors, torch.float32, 4 * (h + 1)),
        h,
        width,
        address(out, torch.complex64, width),
        torch.get_num_threads(),
    )
    return out


KERNELS = {
    "spectrum_scaled": spectrum_scaled,
    "spectrum_unscaled": spectrum_unscaled,
    "spectrum_restored": spectrum_restored,
    "spectrum_pad": spectrum_pad,
    "spectrum_cut": spectrum_cut,
    "spectrum_fold": spectrum_fold,
    "spectrum_unfold": spectrum_unfold,
}
