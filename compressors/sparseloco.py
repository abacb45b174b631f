"""SparseLoCo: the largest elements of chunks of 4096, their values in 2 bits.

Each segment is cut into chunks of `chunk` elements, the last of which may be shorter. Of a chunk of
d elements the k = min(d, max(1, ceil(topk d / chunk))) of largest |x_i| are kept, of equal ones the
lowest indices. Each is sent as a sign and one of two magnitudes of its segment: with t the mean of
the kept |x_i|, these are the mean of those that are at least t, and the mean of those below t.

Biased; x' is the orthogonal projection of x onto two vectors, the signs of the larger and those of
the smaller kept elements. So ||x - x'||^2 = ||x||^2 - ||x'||^2, and ||x'||^2 >= S^2 / K, S the sum
of the K kept magnitudes of a segment (Cauchy-Schwarz). If 64 of 4096 normal values are kept, the
two means retain 99.5 % of their energy (test_sparseloco.py::test_two_magnitudes_keep_most).
Memory: p = g + 0.95 e; e = p - x'(p): the decaying residual replaces the momentum of the outer
optimizer (algorithm 1); with `--local-steps` g is the difference of parameters.
Wire: an index of ceil(log2 chunk) bits and 2 bits of value for each kept element,
64 (12 + 2) / 4096 = 0.219 bits an element, and 2 float32 a segment. Only all-gather is offered: in
a two-shot exchange the owners would select and quantize once more.
Source: Sarfi, Therien, Lidin and Belilovsky 2025, arXiv:2508.15706: 1-3 % density, chunks of 4096,
error feedback with decay 0.95, 2 bits.
Their code cuts a matrix into blocks of 64 x 64 where we take 4096 neighbours, and its quantizer
rounds to bins of the standard deviation and sends a table of their means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Key, Layout, Payload, Segments, fill
from gcbench.core.errors import PayloadError
from gcbench.ops import packing
from gcbench.ops.selection import KeptRun

VALUE_BITS = 2
NEGATIVE, LARGE = 1, 2
"""The two bits of a value's code: it is negative; it has the larger magnitude."""


@dataclass(frozen=True)
class SparseLoCo(Compressor):
    """Top-k of chunks; parts are the indices in the chunks, the codes, the two magnitudes."""

    chunk: int = 4096  # elements
    topk: int = 64  # elements sent of a whole chunk
    granularity: str | int = "tensor"  # what has two magnitudes of its own: see `Segments.of`

    collectives: ClassVar[tuple[str, ...]] = ("allgather",)
    memory: ClassVar[str] = "residual"
    memory_options: ClassVar[Mapping[str, Any]] = {"decay": 0.95}
    variants = ({}, {"chunk": 64, "topk": 8}, {"chunk": 100, "topk": 100})

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= 2**16:
            raise ValueError(f"chunk={self.chunk}: 1 to 65536 elements, so an index has 16 bits")
        if not 1 <= self.topk <= self.chunk:
            raise ValueError(f"topk={self.topk}: 1 to chunk={self.chunk} elements are allowed")

    @property
    def index_bits(self) -> int:
        """Bits of an index in a chunk."""
        return max(1, (self.chunk - 1).bit_length())

    def _runs(self, segments: Segments) -> list[KeptRun]:
        """Return the chunks as runs: for each segment the whole chunks, and a shorter last one."""
        runs = []
        for which, first, length in segments.runs:
            whole, rest = divmod(length, self.chunk)
            keep = min(rest, -(-self.topk * rest // self.chunk))
            if rest and not whole:  # equal segments shorter than a chunk are one run
                runs.append(KeptRun(first, which.stop - which.start, rest, keep))
                continue
            for start in range(first, first + length * (which.stop - which.start), max(1, length)):
                if whole:
                    runs.append(KeptRun(start, whole, self.chunk, self.topk))
                if rest:
                    runs.append(KeptRun(start + whole * self.chunk, 1, rest, keep))
        return runs

    def _kept(self, segments: Segments) -> Segments:
        """Return the segments of the concatenated kept elements, one for each of `segments`."""
        offsets = [0]
        for length in segments.lengths:
            whole, rest = divmod(length, self.chunk)
            short = min(rest, -(-self.topk * rest // self.chunk))
            offsets.append(offsets[-1] + whole * self.topk + short)
        return Segments(tuple(offsets))

    def encode(
        self,
        x: Tensor,
        segments: Segments,
        shared: Tensor,
        key: Key,
        *,
        prepared: Any = None,
        out: Payload | None = None,
    ) -> Payload:
        runs, kept = self._runs(segments), self._kept(segments)
        positions, values = ops.selection.largest_elements(x, runs)
        size = values.abs()
        counts = torch.tensor(kept.lengths, dtype=torch.float64, device=x.device)
        total, _ = ops.statistics.moments(size, kept)
        level = _spread(total / counts.clamp(min=1), kept)
        large = size.double() >= level
        above, _ = ops.statistics.moments(size * large, kept)
        many = torch.zeros_like(total)
        for which, rows in kept.views(large.float()):
            many[which] = rows.double().sum(1)  # counts: exact in any order
        magnitudes = torch.stack(
            ((total - above) / (counts - many).clamp(min=1), above / many.clamp(min=1))
        )
        codes = (values < 0) * NEGATIVE + large * LARGE
        return fill(
            out,
            packing.pack((positions - _starts(runs, x.device)).int(), self.index_bits),
            packing.pack(codes, VALUE_BITS),
            magnitudes.float().view(-1),
        )

    def _open(self, payload: Payload, segments: Segments) -> tuple[Tensor, Tensor]:
        """Check a payload; return positions, int64, and values, float32, shape (K,) each."""
        self.check(payload, segments)
        indices, codes, magnitudes = payload.parts
        runs, kept = self._runs(segments), self._kept(segments)
        low, high = magnitudes.view(2, -1)
        if not (high.isfinite() & (low >= 0) & (low <= high)).all():
            raise PayloadError(f"{self.name}: magnitudes finite, from 0 on and in order expected")
        places = packing.unpack(indices, self.index_bits, kept.numel).long()
        counts = [run.rows * run.keep for run in runs]
        for run, own in zip(runs, torch.split(places, counts) if runs else (), strict=True):
            rows = own.view(run.rows, run.keep)
            if int(rows[:, -1].max()) >= run.length or not (rows.diff(dim=1) > 0).all():
                raise PayloadError(
                    f"{self.name}: indices in a chunk of {run.length} must increase, and end "
                    "below it"
                )
        code = packing.unpack(codes, VALUE_BITS, kept.numel)
        size = torch.where((code & LARGE) != 0, _spread(high, kept), _spread(low, kept))
        values = torch.where((code & NEGATIVE) != 0, -size, size)
        return places + _starts(runs, places.device), values

    def decode(
        self, payload: Payload, segments: Segments, shared: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        positions, values = self._open(payload, segments)
        return ops.selection.scatter(values, positions, segments.numel, out=out)

    def mean(
        self,
        payloads: Sequence[Payload],
        segments: Segments,
        shared: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the mean over all workers, added in the order of ranks; not sent counts as 0."""
        parts = [(*self._open(payload, segments), payload.count) for payload in payloads]
        return ops.selection.mean(parts, segments.numel, out=out)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        total = self._kept(segments).numel
        return (
            (torch.int32, packing.packed_words(total, self.index_bits)),
            (torch.int32, packing.packed_words(total, VALUE_BITS)),
            (torch.float32, 2 * len(segments)),
        )

    @property
    def claims(self) -> SparseLoCoClaims:
        return SparseLoCoClaims(self)


def _spread(values: Tensor, kept: Segments) -> Tensor:
    """Return one value a segment, shape (m,), repeated for each of its elements, shape (n,)."""
    counts = torch.tensor(kept.lengths, device=values.device)
    return values.repeat_interleave(counts, output_size=kept.numel)


def _starts(runs: Sequence[KeptRun], device: torch.device) -> Tensor:
    """Return the first element of each kept element's chunk, int64, shape (K,)."""
    starts = [torch.empty(0, dtype=torch.int64, device=device)]
    for run in runs:
        first = torch.arange(run.rows, device=device).mul_(run.length).add_(run.start)
        starts.append(first.repeat_interleave(run.keep))
    return torch.cat(starts)


class SparseLoCoClaims(Claims[SparseLoCo]):
    """Contracts: the decoding is an orthogonal projection of x."""

    contractive = True
    exact_for = ("sparse",)

    def nominal_bits(self) -> float:
        return self.codec.topk * (self.codec.index_bits + VALUE_BITS) / self.codec.chunk

    def error_bound(self, x: Tensor, segments: Segments) -> float:
        """Return ||x||^2 - sum S^2 / K over the segments, with room for the means' rounding."""
        size, lost = x.double().abs(), 0.0
        for _, rows in segments.views(size):
            if not rows.shape[1]:
                continue
            largest = []
            for chunk in torch.split(rows, self.codec.chunk, dim=1):
                keep = min(chunk.shape[1], -(-self.codec.topk * chunk.shape[1] // self.codec.chunk))
                largest.append(chunk.topk(keep, dim=1).values)
            kept = torch.cat(largest, dim=1)
            captured = kept.sum(1).square() / kept.shape[1] * (1 - 2.0**-40)
            lost += float((rows.square().sum(1) - captured).clamp(min=0).sum())
            lost += 2.0**-298 * kept.numel()
        return min(lost, float(size.square().sum()))

    def delta(self, segments: Segments) -> float:
        """Return the least k/d of a chunk, divided by the largest K of a segment.

        The selection keeps at least k/d of a chunk's energy, and the two means at least 1/K of the
        energy of a segment's K kept elements, as S^2 >= the sum of their squares.
        """
        runs = self.codec._runs(segments)
        share = min((run.keep / run.length for run in runs), default=1.0)
        most = max(self.codec._kept(segments).lengths, default=1)
        return share / max(1, most) * (1 - 2.0**-30)
