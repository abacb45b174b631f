"""What lies around a Fourier transform."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gcbench.core.compressor import Segments
from gcbench.ops.spectrum import PEAK, Rows
from gcbench.ops.transform import turns
from kernel_cases import Call, nonfinite, segmentations, values


def shuffled(segments: Segments, spare: int) -> Rows:
    """Return these segments in the order of their lengths, with zeros after nonempty ones."""
    widths = tuple(d + spare if d else 0 for d in segments.lengths)
    starts, start = [0] * len(segments), 0
    for i in sorted(range(len(segments)), key=lambda i: (segments.lengths[i], -i)):
        starts[i] = start
        start += widths[i]
    return Rows(tuple(starts), widths)


def sparse(n: int) -> Iterator[Call]:
    """Yield sums of sparse spectra of n bins."""
    generator = torch.Generator().manual_seed(n + 1)
    spectra = []
    for share in (0.15, 0.9, 0.0, 1.0):
        selected = (torch.rand(n, generator=generator) < share).nonzero().squeeze(1)
        spectra.append((selected, torch.randn(len(selected), 2, generator=generator)))
    for number in (1, 4):
        weights = [0.1 * (i + 1) for i in range(number)]
        yield Call("spectrum.mean", f"of {number}", (spectra[:number], weights, n))


def cases(n: int) -> Iterator[Call]:
    yield from sparse(n)
    for cut, segments in segmentations(n):
        unit = 2.0 ** torch.arange(-123.0, 113.0).repeat(len(segments) // 236 + 1)
        unit = unit.flip(0)[: len(segments)]
        pairs = Segments(tuple(2 * offset for offset in segments.offsets))
        rows, pair_rows = shuffled(segments, 5), shuffled(pairs, 0)
        for what, x in (*values(n), *nonfinite(n)):
            for half in (False, True):
                yield Call(
                    "spectrum.scaled",
                    f"{what} {cut} {half}",
                    (x, segments, PEAK, 2.0**-100),
                    {"half": half},
                )
            yield Call("spectrum.scaled", f"{what} {cut} bins", (x, segments, 1.0, 0.0))
            placed = {"rows": rows}
            yield Call("spectrum.scaled", f"{what} {cut} rows", (x, segments, PEAK, 0.0), placed)
            both = torch.stack((x, x.flip(0)), 1).view(-1)
            yield Call("spectrum.unscaled", f"{what} {cut}", (both, unit, pairs))
            yield Call("spectrum.restored", f"{what} {cut}", (x, unit, segments))
            there = {"rows": pair_rows}
            yield Call("spectrum.unscaled", f"{what} {cut} rows", (both, unit, pairs), there)
            wide = torch.cat((x, x[: rows.numel - n], x.new_ones(max(0, rows.numel - 2 * n))))
            yield Call("spectrum.restored", f"{what} {cut} rows", (wide, unit, segments), placed)
    # fp16 of every exponent, halfway cases among them
    steps = torch.arange(n) * 0x1FFF + 0x2D000000
    edges = torch.cat((steps.int().view(torch.float32) % 32768, torch.tensor([16384.0])))
    yield Call(
        "spectrum.scaled", "halves", (edges, Segments((0, n + 1)), PEAK, 0.0), {"half": True}
    )
    if not n:
        return
    generator = torch.Generator().manual_seed(n)
    numbers = torch.view_as_complex(torch.randn(n + 2, 2, generator=generator))
    for h in (n, n + 1):
        factors = turns(2 * h)
        yield Call("transform.fold", f"of {h}", (numbers[:h], factors, 0.3))
        inverse = {"inverse": True}
        yield Call("transform.fold", f"back to {h}", (numbers[: h + 1], factors, 0.7), inverse)
