"""SparseLoCo: the largest elements of chunks of 4096, with 2-bit values.

Each segment is divided into chunks of `chunk` elements; the last may be shorter. Of a chunk of d
elements the k = min(d, max(1, ceil(topk d / chunk))) of largest |x_i| are kept, ties by lowest
index. Each is sent as a sign and one of two magnitudes per segment: with t the mean of the kept
|x_i|, these are the mean of those that are at least t, and the mean of those below t.

Biased; x' is the orthogonal projection of x onto two vectors, the signs of the larger and of the
smaller kept elements. So ||x - x'||^2 = ||x||^2 - ||x'||^2, and ||x'||^2 >= S^2 / K, S the sum of
the K kept magnitudes of a segment (Cauchy-Schwarz). If 64 of 4096 normal values are kept, the two
means retain 99.5 % of their energy (test_sparseloco.py::test_two_magnitudes_keep_most).
Memory: p = g + 0.95 e; e = p - x'(p): the decaying residual replaces the momentum of the outer
optimizer (algorithm 1); with `--local-steps` g is the difference of parameters.
Wire: an index of ceil(log2 chunk) bits and 2 bits of value per kept element, 64 (12 + 2) / 4096 =
0.219 bits per element, and 2 float32 per segment. Only all-gather is supported: in a two-shot
exchange owners would select and quantize again.
Source: Sarfi, Therien, Lidin and Belilovsky 2025, arXiv:2508.15706: 1-3 % density, chunks of 4096,
error feedback with decay 0.95, 2 bits.
Differs: their code uses blocks of 64 x 64 of a matrix instead of 4096 consecutive elements, and its
quantizer rounds to bins of the standard deviation and sends a table of their means.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("sparseloco", chunk=4, topk=3)
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> packed.payload.parts[2]
tensor([1.0000, 3.2500])
>>> method.decompress(packed)
tensor([ 3.2500, -1.0000,  0.0000, -3.2500])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Layout, Parts, Payload, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops import packing
from gcbench.ops.selection import KeptRun

VALUE_BITS = 2
NEGATIVE, LARGE = 1, 2
"""The two bits of a value's code: negative; larger magnitude."""


@dataclass(frozen=True)
class SparseLoCo(Compressor):
    """Top-k of chunks; parts are the indices in the chunks, the codes, the two magnitudes."""

    chunk: int = 4096  # elements
    topk: int = 64  # elements sent per full chunk
    granularity: str | int = "tensor"  # what shares two magnitudes: see `Segments.of`

    collectives: ClassVar[tuple[str, ...]] = ("allgather",)
    memory: ClassVar[str] = "residual"
    memory_options: ClassVar[Mapping[str, Any]] = {"decay": 0.95}
    variants = ({}, {"chunk": 64, "topk": 8}, {"chunk": 100, "topk": 100})

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= 2**16:
            raise ValueError(f"chunk={self.chunk}: expected 1 to 65536 elements (16-bit indices)")
        if not 1 <= self.topk <= self.chunk:
            raise ValueError(f"topk={self.topk}: expected 1 to chunk={self.chunk} elements")

    @property
    def index_bits(self) -> int:
        """Bits of an index in a chunk."""
        return max(1, (self.chunk - 1).bit_length())

    def _runs(self, segments: Segments) -> list[KeptRun]:
        """Return the chunks as runs: per segment the full chunks, and a shorter last one."""
        runs = []
        for which, first, length in segments.runs:
            whole, rest = divmod(length, self.chunk)
            keep = min(rest, -(-self.topk * rest // self.chunk))
            if rest and not whole:  # equal segments shorter than a chunk form one run
                runs.append(KeptRun(first, which.stop - which.start, rest, keep))
                continue
            for start in range(first, first + length * (which.stop - which.start), max(1, length)):
                if whole:
                    runs.append(KeptRun(start, whole, self.chunk, self.topk))
                if rest:
                    runs.append(KeptRun(start + whole * self.chunk, 1, rest, keep))
        return runs

    def _groups(self, segments: Segments) -> Segments:
        """Return the segments of the concatenated kept elements, one per segment of x."""
        offsets = [0]
        for length in segments.lengths:
            whole, rest = divmod(length, self.chunk)
            short = min(rest, -(-self.topk * rest // self.chunk))
            offsets.append(offsets[-1] + whole * self.topk + short)
        return Segments(tuple(offsets))

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        runs, groups = self._runs(ctx.segments), self._groups(ctx.segments)
        positions, values = ops.selection.largest_elements(x, runs)
        size = values.abs()
        counts = torch.tensor(groups.lengths, dtype=torch.float64, device=x.device)
        total, _ = ops.statistics.moments(size, groups)
        level = _spread(total / counts.clamp(min=1), groups)
        large = size.double() >= level
        above, _ = ops.statistics.moments(size * large, groups)
        many = torch.zeros_like(total)
        for which, rows in groups.views(large.float()):
            many[which] = rows.double().sum(1)  # counts: exact in any order
        magnitudes = torch.stack(
            ((total - above) / (counts - many).clamp(min=1), above / many.clamp(min=1))
        )
        codes = (values < 0) * NEGATIVE + large * LARGE
        return (
            packing.pack((positions - _starts(runs, x.device)).int(), self.index_bits),
            packing.pack(codes, VALUE_BITS),
            magnitudes.float().view(-1),
        )

    def _open(self, payload: Payload, segments: Segments) -> tuple[Tensor, Tensor]:
        """Decode a payload to positions, int64, and values, float32, shape (K,) each."""
        indices, codes, magnitudes = payload.parts
        runs, groups = self._runs(segments), self._groups(segments)
        low, high = magnitudes.view(2, -1)
        if not (high.isfinite() & (low >= 0) & (low <= high)).all():
            raise PayloadError("magnitudes must be finite, at least 0 and in increasing order")
        places = packing.unpack(indices, self.index_bits, groups.numel).long()
        counts = [run.rows * run.keep for run in runs]
        for run, chunk in zip(runs, torch.split(places, counts) if runs else (), strict=True):
            rows = chunk.view(run.rows, run.keep)
            if int(rows[:, -1].max()) >= run.length or not (rows.diff(dim=1) > 0).all():
                raise PayloadError(
                    f"indices in a chunk of {run.length} must increase and be below its size"
                )
        code = packing.unpack(codes, VALUE_BITS, groups.numel)
        size = torch.where((code & LARGE) != 0, _spread(high, groups), _spread(low, groups))
        values = torch.where((code & NEGATIVE) != 0, -size, size)
        return places + _starts(runs, places.device), values

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        positions, values = self._open(payload, ctx.segments)
        return ops.selection.scatter(values, positions, ctx.segments.numel, out=ctx.out)

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        """Return the mean over all workers, added in rank order; elements not sent count as 0."""
        parts = [(*self._open(payload, ctx.segments), payload.count) for payload in payloads]
        return ops.selection.mean(parts, ctx.segments.numel, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        total = self._groups(segments).numel
        return (
            (torch.int32, packing.packed_words(total, self.index_bits)),
            (torch.int32, packing.packed_words(total, VALUE_BITS)),
            (torch.float32, 2 * len(segments)),
        )


def _spread(values: Tensor, groups: Segments) -> Tensor:
    """Repeat one value per segment, shape (m,), for each of its elements, shape (n,)."""
    counts = torch.tensor(groups.lengths, device=values.device)
    return values.repeat_interleave(counts, output_size=groups.numel)


def _starts(runs: Sequence[KeptRun], device: torch.device) -> Tensor:
    """Return the start of each kept element's chunk, int64, shape (K,)."""
    starts = [torch.empty(0, dtype=torch.int64, device=device)]
    for run in runs:
        first = torch.arange(run.rows, device=device).mul_(run.length).add_(run.start)
        starts.append(first.repeat_interleave(run.keep))
    return torch.cat(starts)


class SparseLoCoClaims(Claims[SparseLoCo], of=SparseLoCo):
    """Contractive: the decoded tensor is an orthogonal projection of x."""

    contractive = True
    exact_for = ("sparse",)

    @property
    def nominal_bits(self) -> float | None:
        return self.codec.topk * (self.codec.index_bits + VALUE_BITS) / self.codec.chunk

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return ||x||^2 - sum S^2 / K over the segments, with a margin for rounding the means."""
        size, lost = x.double().abs(), 0.0
        for _, rows in ctx.segments.views(size):
            if not rows.shape[1]:
                continue
            largest = []
            for chunk in torch.split(rows, self.codec.chunk, dim=1):
                keep = min(chunk.shape[1], -(-self.codec.topk * chunk.shape[1] // self.codec.chunk))
                largest.append(chunk.topk(keep, dim=1).values)
            selected = torch.cat(largest, dim=1)
            captured = selected.sum(1).square() / selected.shape[1] * (1 - 2.0**-40)
            lost += float((rows.square().sum(1) - captured).clamp(min=0).sum())
            lost += 2.0**-298 * selected.numel()
        return min(lost, float(size.square().sum()))

    def delta(self, segments: Segments) -> float:
        """Return the minimum k/d over chunks, divided by the maximum K over segments.

        The selection keeps at least k/d of a chunk's energy, and the two means at least 1/K of the
        energy of a segment's K kept elements, as S^2 is at least the sum of their squares.
        """
        runs = self.codec._runs(segments)
        share = min((run.keep / run.length for run in runs), default=1.0)
        most = max(self.codec._groups(segments).lengths, default=1)
        return share / max(1, most) * (1 - 2.0**-30)
