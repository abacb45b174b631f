"""DeMo: the largest DCT coefficients of each chunk; the update is the sign of their mean.

A tensor is reshaped to a matrix, shape[0] x rest, a vector to one row. Each dimension is divided
into pieces of its largest divisor <= chunk. c = orthonormal DCT-II of a chunk, separable in two
dimensions; q = inverse DCT of the topk largest |c| (ties: lowest index). Coefficient j of the
update is the mean over the workers that sent j, not over all workers; then follow the inverse DCT
and the sign, with sign(0) = 0. Tensors that stay dense, and steps in fp32, apply the sign of the
mean gradient.

Biased; ||x - q||^2 is the dropped energy (Parseval), at most 1 - topk / size of a chunk's energy.
Memory: residual <- 0.999 residual + g - q. The source accumulates lr * g instead, so its residual
is ours times lr (the engine rescales residuals when lr changes). That factor changes neither the
order of the coefficients nor a sign, so the updates are the same.
Wire: topk indices of ceil(log2 size) bits (at least 1) and topk float32 per chunk: 32 (12 + 32)
bits for 64 x 64 elements, 0.344 per element. Indices come first, increasing within a chunk and
packed by width, narrow ones first.
Source: Peng, Quesnelle and Kingma 2024, arXiv:2411.19870, algorithm 1; defaults of their code.
Differs: that code sends 64-bit indices, 0.75 bits per element (test_bytes_of_a_chunk), fails on
tensors of four dimensions (test_four_dimensions_are_a_matrix), and averages in an undefined order
on a GPU; here workers are added in rank order.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("demo", chunk=4, topk=1)
>>> packed = method.compress(torch.tensor([4.0, 4.0, 4.0, 5.0]))
>>> packed.payload.nbytes
12
>>> method.decompress(packed).round(decimals=2)
tensor([4.2500, 4.2500, 4.2500, 4.2500])
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import (
    Compressor,
    Context,
    Layout,
    Parts,
    Payload,
    Segments,
    check_finite,
)
from gcbench.core.errors import PayloadError
from gcbench.core.rule import Directions, UpdateRule
from gcbench.ops import packing, selection
from gcbench.ops.packing import packed_words
from gcbench.ops.selection import KeptRun


@dataclass(frozen=True)
class DeMo(Compressor):
    """The largest DCT coefficients of chunks; parts are their indices and values."""

    chunk: int = 64  # elements, the longest side of a chunk
    topk: int = 32  # coefficients sent per chunk
    sign: bool = True  # False: apply the mean itself

    memory: ClassVar[str] = "residual"
    memory_options: ClassVar[Mapping[str, Any]] = {"decay": 0.999}
    scratch = True
    variants = ({}, {"sign": False}, {"chunk": 16, "topk": 8})

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Plain SGD for the sign; without the sign, any optimizer can apply the mean."""
        if not self.sign:
            return {}
        return {"optimizer": "sgd", "lr": 1e-3, "momentum": 0.0, "nesterov": False}

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= 256:
            raise ValueError(f"chunk={self.chunk}: expected 1 to 256 elements (16-bit indices)")
        if self.topk < 1:
            raise ValueError(f"topk={self.topk}: expected at least 1 coefficient")

    @property
    def rule(self) -> UpdateRule:
        return Directions() if self.sign else UpdateRule()

    def _cuts(self, segments: Segments) -> list[Chunks]:
        return cut_chunks(segments, self.chunk, self.topk)

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        cuts = self._cuts(ctx.segments)
        places, values = largest(x, cuts)
        return pack_places(places, cuts), values

    def _sent(self, payload: Payload, segments: Segments) -> tuple[Tensor, Tensor]:
        """Decode a payload to positions of coefficients, int64, and their values."""
        words, values = payload.parts
        return unpack_places(words, self._cuts(segments)), check_finite(values)

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        """Return the inverse DCT of one worker's coefficients, without the sign."""
        places, values = self._sent(payload, ctx.segments)
        restored = values.new_empty(ctx.segments.numel) if ctx.out is None else ctx.out
        first = 0
        for slab in slabs(tuple(self._cuts(ctx.segments)), SLAB):
            start, stop, last = slab[0].start, slab[-1].place.stop, first + count_kept(slab)
            dense = values.new_zeros(stop - start)
            dense[places[first:last] - start] = values[first:last]
            inverse_dct(dense, _moved(slab), out=restored[start:stop])
            first = last
        return restored

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        """Return the sign of the inverse DCT of coefficients averaged over their senders."""
        total = payloads[0].parts[-1].new_zeros(ctx.segments.numel)
        senders = torch.zeros_like(total)
        for payload in payloads:
            places, values = self._sent(payload, ctx.segments)
            total[places] += values  # places are distinct, so additions are in rank order
            senders[places] += 1
        update = inverse_dct(total.div_(senders.clamp_(min=1)), self._cuts(ctx.segments))
        return update.sign_() if self.sign else update

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        cuts = self._cuts(segments)
        return ((torch.int32, count_words(cuts)), (torch.float32, count_kept(cuts)))


class DeMoClaims(Claims[DeMo], of=DeMo):
    """Contractive: the error is the dropped coefficients' energy. The update is not a mean."""

    contractive = True
    aggregate = "other"
    portable = False

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return the energy of the smallest coefficients, with a margin for rounding."""
        dropped = 2.0**-290 * x.count_nonzero().item()
        for cut in self.codec._cuts(ctx.segments):
            energies = exact_dct(x, cut).square()
            least = energies.sort(dim=1).values[:, : cut.size - cut.keep]
            dropped += float(least.sum()) + 2.0**-18 * float(energies.sum())
        return dropped

    def aggregated(self, decoded: Sequence[Tensor], ctx: Context) -> Tensor:
        """Return the sign of the inverse DCT of each coefficient's mean over its senders.

        A worker sent the coefficients of its decoded tensor that are not 0, up to rounding. NaN
        marks elements below 1e-4 of the largest, whose sign rounding decides, and chunks of which a
        worker sent zeros, because the decoded tensor does not show which.
        """
        update = torch.zeros(ctx.segments.numel, dtype=torch.float64)
        live = torch.zeros(ctx.segments.numel, dtype=torch.bool)
        for cut in self.codec._cuts(ctx.segments):
            c = torch.stack([exact_dct(one, cut) for one in decoded])
            sent = (c.abs() > 1e-5 * c.abs().amax((1, 2), keepdim=True)) | (cut.keep == cut.size)
            total = torch.where(sent, c, 0.0).sum(0)
            live[cut.place] = bool(total.any())
            total[(sent.sum(2) < cut.keep).any(0)] = torch.nan
            update[cut.place] = exact_dct(total / sent.sum(0).clamp(min=1), cut, inverse=True)
        if not self.codec.sign:
            return update.float()
        size = update.abs().nan_to_num()
        small = size < 1e-4 * size.amax() if len(update) else update.bool()
        unsure = (small & live) | update.isnan()  # the sign of NaN is 0
        return torch.where(unsure, torch.nan, update.sign()).float()

    def delta(self, segments: Segments) -> float | None:
        """Return the minimum topk / size over chunks, with a margin for rounding."""
        cuts = self.codec._cuts(segments)
        return min((cut.keep / cut.size for cut in cuts), default=1.0) - 2.0**-18


# ---- the cosine transform of chunks --------------------------------------------------------------
#
# Coefficients are stored chunk by chunk, left to right and then down, each chunk row by row. The
# indices of kept coefficients are relative to their chunk and packed in ceil(log2 size) bits, at
# least 1: all indices of one width in the order of tensors and chunks, the narrowest width first.


class Chunks(NamedTuple):
    """One tensor's chunks: `down` x `across` of them, each of `height` x `width` elements."""

    start: int
    """The tensor's first element in the bucket."""
    down: int
    height: int
    across: int
    width: int
    keep: int
    """Coefficients kept per chunk."""

    @property
    def number(self) -> int:
        """The number of chunks; at least 1."""
        return self.down * self.across

    @property
    def size(self) -> int:
        """Elements per chunk."""
        return self.height * self.width

    @property
    def place(self) -> slice:
        """The tensor's range in the bucket, and that of its coefficients."""
        return slice(self.start, self.start + self.number * self.size)

    @property
    def bits(self) -> int:
        """Bits per index in a chunk."""
        return max(1, (self.size - 1).bit_length())


@functools.cache
def _largest_divisor(n: int, limit: int) -> int:
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


def cut_chunks(segments: Segments, limit: int, keep: int) -> list[Chunks]:
    """Divide each nonempty tensor into chunks of at most `limit` x `limit` elements.

    `keep`: the number of coefficients to keep per chunk, if it has as many.
    """
    cuts = []
    for start, shape in segments.tensors:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, *shape, 1)[:2]
        if rows * columns:
            height, width = _largest_divisor(rows, limit), _largest_divisor(columns, limit)
            down, across = rows // height, columns // width
            cuts.append(Chunks(start, down, height, across, width, min(keep, height * width)))
    return cuts


SLAB = 1 << 19
"""Elements to transform at a time, so that coefficients stay in a cache."""


@functools.lru_cache(maxsize=32)
def slabs(cuts: tuple[Chunks, ...], limit: int) -> tuple[tuple[Chunks, ...], ...]:
    """Group adjacent chunks to at most `limit` elements, but at least one row of chunks."""
    groups: list[list[Chunks]] = []
    room = 0
    for cut in cuts:
        row, done = cut.size * cut.across, 0
        while done < cut.down:
            if room < row:
                groups.append([])
                room = max(limit, row)
            down = min(cut.down - done, room // row)
            groups[-1].append(cut._replace(start=cut.start + done * row, down=down))
            done, room = done + down, room - down * row
    return tuple(map(tuple, groups))


def _moved(slab: Sequence[Chunks]) -> list[Chunks]:
    """Return the chunks of a slab with positions relative to it."""
    return [cut._replace(start=cut.start - slab[0].start) for cut in slab]


def largest(x: Tensor, cuts: Sequence[Chunks]) -> tuple[Tensor, Tensor]:
    """Return the positions of the kept coefficients, int64, increasing, and their values."""
    positions, values = [x.new_empty(0, dtype=torch.int64)], [x.new_empty(0)]
    for slab in slabs(tuple(cuts), SLAB):
        chunks, start = _moved(slab), slab[0].start
        coefficients = dct(x[start : slab[-1].place.stop], chunks)
        places, kept_values = selection.largest_elements(coefficients, kept_runs(chunks))
        positions.append(places.add_(start))
        values.append(kept_values)
    return torch.cat(positions), torch.cat(values)


def dct(x: Tensor, cuts: Sequence[Chunks]) -> Tensor:
    """Return the DCT coefficients of `x`, float32, shape (n,), chunk by chunk."""
    return ops.dct.forward(x, [ops.dct.Chunks(*cut[:5]) for cut in cuts])


def inverse_dct(
    coefficients: Tensor, cuts: Sequence[Chunks], *, out: Tensor | None = None
) -> Tensor:
    """Return the inverse DCT, float32, shape (n,), of coefficients in the order of `dct`."""
    return ops.dct.inverse(coefficients, [ops.dct.Chunks(*cut[:5]) for cut in cuts], out=out)


def exact_dct(x: Tensor, cut: Chunks, *, inverse: bool = False) -> Tensor:
    """Return one tensor's coefficients by SciPy in float64, shape (chunks, size); or the inverse.

    The reference for `dct` and `inverse_dct`. The inverse takes that shape and returns the tensor's
    elements, float64, flat.
    """
    from scipy import fft

    if inverse:
        chunks = x.view(cut.down, cut.across, cut.height, cut.width).numpy()
        restored = torch.from_numpy(fft.idctn(chunks, axes=(2, 3), norm="ortho"))
        return restored.transpose(1, 2).reshape(-1)
    blocks = x[cut.place].double().view(cut.down, cut.height, cut.across, cut.width)
    chunks = blocks.transpose(1, 2).numpy()
    coefficients = fft.dctn(chunks, axes=(2, 3), norm="ortho")
    return torch.from_numpy(coefficients).view(cut.number, cut.size)


def kept_runs(cuts: Sequence[Chunks]) -> list[KeptRun]:
    """Return the chunks as runs of segments, to select the largest coefficients."""
    return [KeptRun(cut.start, cut.number, cut.size, cut.keep) for cut in cuts]


def _widths(cuts: Sequence[Chunks]) -> list[tuple[int, int]]:
    """Return (bits per index, number of indices of that width), the narrowest first."""
    totals: dict[int, int] = {}
    for cut in cuts:
        totals[cut.bits] = totals.get(cut.bits, 0) + cut.number * cut.keep
    return sorted(totals.items())


def count_kept(cuts: Sequence[Chunks]) -> int:
    """Return the number of kept coefficients."""
    return sum(cut.number * cut.keep for cut in cuts)


def count_words(cuts: Sequence[Chunks]) -> int:
    """Return the number of 32-bit words of the packed indices."""
    return sum(packed_words(n, bits) for bits, n in _widths(cuts))


def pack_places(places: Tensor, cuts: Sequence[Chunks]) -> Tensor:
    """Pack the positions of kept coefficients, int64, as indices in their chunks, int32 words."""
    alike: dict[int, list[Tensor]] = {bits: [] for bits, _ in _widths(cuts)}
    pieces = torch.split(places, [cut.number * cut.keep for cut in cuts]) if cuts else ()
    for cut, piece in zip(cuts, pieces, strict=True):
        alike[cut.bits].append((piece - cut.start) % cut.size)
    words = [packing.pack(torch.cat(codes), bits) for bits, codes in alike.items()]
    return torch.cat([places.new_empty(0, dtype=torch.int32), *words])


def unpack_places(words: Tensor, cuts: Sequence[Chunks]) -> Tensor:
    """Return the positions of kept coefficients, int64, from `count_words(cuts)` packed words.

    Raises:
        PayloadError: an index is outside its chunk, or indices do not increase.
    """
    widths = _widths(cuts)
    split = torch.split(words, [packed_words(n, bits) for bits, n in widths]) if cuts else ()
    codes = {bits: packing.unpack(w, bits, n) for w, (bits, n) in zip(split, widths, strict=True)}
    places = [words.new_empty(0, dtype=torch.int64)]
    for cut in cuts:
        count = cut.number * cut.keep
        rows = codes[cut.bits][:count].view(cut.number, cut.keep)
        codes[cut.bits] = codes[cut.bits][count:]
        if int(rows[:, -1].max()) >= cut.size or not (rows.diff(dim=1) > 0).all():
            raise PayloadError(f"indices in chunks of {cut.size} must increase and be below it")
        first = torch.arange(cut.number, device=words.device).mul_(cut.size).add_(cut.start)
        places.append((rows + first.unsqueeze(1)).view(-1))
    return torch.cat(places)
