"""What lies around a Fourier transform."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gcbench.compressor import Segments
from gcbench.ops.spectrum import PEAK
from gcbench.ops.transform import build_tables
from kernel_cases import Call, nonfinite, segmentations, values


def cases(n: int) -> Iterator[Call]:
    for cut, segments in segmentations(n):
        unit = 2.0 ** torch.arange(-123.0, 113.0).repeat(len(segments) // 236 + 1)
        unit = unit.flip(0)[: len(segments)]
        pairs = Segments(tuple(2 * offset for offset in segments.offsets))
        for what, x in (*values(n), *nonfinite(n)):
            for half in (False, True):
                yield Call(
                    "spectrum_scaled",
                    f"{what} {cut} {half}",
                    (x, segments, PEAK, 2.0**-100),
                    {"half": half},
                )
            yield Call("spectrum_scaled", f"{what} {cut} bins", (x, segments, 1.0, 0.0))
            both = torch.stack((x, x.flip(0)), 1).view(-1)
            yield Call("spectrum_unscaled", f"{what} {cut}", (both, unit, pairs))
            yield Call("spectrum_restored", f"{what} {cut}", (x, unit, segments))
    # fp16 of every exponent, halfway cases among them
    steps = torch.arange(n) * 0x1FFF + 0x2D000000
    edges = torch.cat((steps.int().view(torch.float32) % 32768, torch.tensor([16384.0])))
    yield Call(
        "spectrum_scaled", "halves", (edges, Segments((0, n + 1)), PEAK, 0.0), {"half": True}
    )
    if not n:
        return
    factors = build_tables(2 * n).factors
    some = torch.randn(6 * n + 6, 2, generator=torch.Generator().manual_seed(n))
    chirp, numbers = torch.view_as_complex(some[:n]), torch.view_as_complex(some[n:])
    for width in (n, n + 1, 3 * n):
        waves, bins = numbers[:width], numbers[-n - 1 :]
        yield Call("spectrum_pad", f"to {width}", (bins[1:], chirp, width))
        for conjugate in (False, True):
            yield Call("spectrum_cut", f"{conjugate}", (waves, chirp), {"conjugate": conjugate})
        yield Call("spectrum_fold", f"of {width}", (waves, factors))
        yield Call("spectrum_unfold", f"to {width}", (bins, factors, width))
