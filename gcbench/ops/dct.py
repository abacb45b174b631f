"""The cosine transform of a gradient's tensors, cut into chunks, and its largest coefficients.

A tensor of at least two dimensions is the matrix shape[0] x rest, a vector or a scalar is one row.
Each of the two dimensions is cut into pieces of its largest divisor up to a limit. Coefficients
lie chunk after chunk, from left to right and then down, each chunk row by row.

Indices of kept coefficients count inside their chunk and are packed in ceil(log2 size) bits, at
least 1: all indices of one width in the order of tensors and chunks, the narrowest width first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gcbench.core.compressor import Segments
from gcbench.core.errors import PayloadError
from gcbench.ops import packing
from gcbench.ops.packing import packed_words


class Chunks(NamedTuple):
    """One tensor's chunks: `down` x `across` of them, each of `height` x `width` elements."""

    start: int
    """The tensor's first element in the bucket."""
    down: int
    height: int
    across: int
    width: int
    kept: int
    """Coefficients kept of each chunk."""

    @property
    def number(self) -> int:
        """How many chunks there are; not 0."""
        return self.down * self.across

    @property
    def size(self) -> int:
        """Elements of one chunk."""
        return self.height * self.width

    @property
    def place(self) -> slice:
        """Where the tensor lies in the bucket, and its coefficients among all."""
        return slice(self.start, self.start + self.number * self.size)

    @property
    def bits(self) -> int:
        """Bits of an index in a chunk."""
        return max(1, (self.size - 1).bit_length())


@functools.cache
def _largest_divisor(n: int, limit: int) -> int:
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


def chunks(segments: Segments, limit: int, keep: int) -> list[Chunks]:
    """Return how each tensor that has elements is cut into chunks of at most `limit` x `limit`.

    `keep` coefficients are kept of a chunk, or all of a smaller one.
    """
    cuts = []
    for start, shape in segments.tensors:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, *shape, 1)[:2]
        if rows * columns:
            height, width = _largest_divisor(rows, limit), _largest_divisor(columns, limit)
            kept = min(keep, height * width)
            cuts.append(Chunks(start, rows // height, height, columns // width, width, kept))
    return cuts


@functools.cache
def matrix(n: int) -> Tensor:
    """Return the orthonormal DCT-II, float32 rounded from float64, shape (n, n); not to be changed.

    C[k, i] = sqrt((2 - [k = 0]) / n) cos(pi (2 i + 1) k / (2 n)): Ahmed, Natarajan and Rao 1974.
    """
    # The angle is reduced in integers, so that large multiples of pi lose nothing.
    angle = [[math.pi * ((2 * i + 1) * k % (4 * n)) / (2 * n) for i in range(n)] for k in range(n)]
    matrix = torch.tensor(angle, dtype=torch.float64).cos() * math.sqrt(2 / n)
    matrix[0] = math.sqrt(1 / n)
    return matrix.float()


def forward(x: Tensor, cuts: Sequence[Chunks]) -> Tensor:
    """Return the coefficients of `x`, float32, shape (n,); beyond float32 they saturate.

    Both dimensions of a chunk are transformed, those of length 1 excepted.
    """
    out = torch.empty_like(x)
    for cut in cuts:
        blocks = x[cut.place].view(cut.down, cut.height, cut.across, cut.width)
        if cut.width > 1:
            blocks = blocks @ matrix(cut.width).to(x.device).T
        blocks = blocks.transpose(1, 2)
        if cut.height > 1:
            blocks = matrix(cut.height).to(x.device) @ blocks
        out[cut.place].view(blocks.shape).copy_(blocks)
    return out.nan_to_num_()


def inverse(coefficients: Tensor, cuts: Sequence[Chunks]) -> Tensor:
    """Return the bucket that has these coefficients, float32, shape (n,): undoes `forward`."""
    out = torch.empty_like(coefficients)
    for cut in cuts:
        blocks = coefficients[cut.place].view(cut.down, cut.across, cut.height, cut.width)
        if cut.height > 1:
            blocks = matrix(cut.height).to(out.device).T @ blocks
        blocks = blocks.transpose(1, 2)
        if cut.width > 1:
            blocks = blocks @ matrix(cut.width).to(out.device)
        out[cut.place].view(blocks.shape).copy_(blocks)
    return out.nan_to_num_()


def largest(coefficients: Tensor, cuts: Sequence[Chunks]) -> Tensor:
    """Return the places of each chunk's largest magnitudes, int64, increasing.

    Of equal magnitudes the lowest places are taken, whatever order torch.topk has.
    """
    places = [torch.empty(0, dtype=torch.int64, device=coefficients.device)]
    for cut in cuts:
        size = coefficients[cut.place].abs().view(cut.number, cut.size)
        least = size.topk(cut.kept, dim=1, sorted=False).values.amin(1, keepdim=True)
        keep = size >= least
        surplus = keep.sum(1, keepdim=True) - cut.kept
        if surplus.any():
            ties = size == least
            keep &= ~ties | (ties.cumsum(1) <= ties.sum(1, keepdim=True) - surplus)
        places.append(keep.view(-1).nonzero().view(-1).add_(cut.start))
    return torch.cat(places)


def _widths(cuts: Sequence[Chunks]) -> list[tuple[int, int]]:
    """Return the widths of indices and how many have each, the narrowest first."""
    totals: dict[int, int] = {}
    for cut in cuts:
        totals[cut.bits] = totals.get(cut.bits, 0) + cut.number * cut.kept
    return sorted(totals.items())


def kept(cuts: Sequence[Chunks]) -> int:
    """Return how many coefficients are kept."""
    return sum(cut.number * cut.kept for cut in cuts)


def words(cuts: Sequence[Chunks]) -> int:
    """Return how many 32-bit words hold the packed indices."""
    return sum(packed_words(n, bits) for bits, n in _widths(cuts))


def pack(places: Tensor, cuts: Sequence[Chunks]) -> Tensor:
    """Pack the places of kept coefficients as indices in their chunks, int32 words."""
    alike: dict[int, list[Tensor]] = {bits: [] for bits, _ in _widths(cuts)}
    pieces = torch.split(places, [cut.number * cut.kept for cut in cuts]) if cuts else ()
    for cut, piece in zip(cuts, pieces, strict=True):
        alike[cut.bits].append((piece - cut.start) % cut.size)
    words = [packing.pack(torch.cat(codes), bits) for bits, codes in alike.items()]
    return torch.cat([places.new_empty(0, dtype=torch.int32), *words])


def unpack(words: Tensor, cuts: Sequence[Chunks]) -> Tensor:
    """Return the places of kept coefficients, int64, from `words(cuts)` packed words.

    Raises:
        PayloadError: an index is beyond its chunk, or they do not increase.
    """
    widths = _widths(cuts)
    split = torch.split(words, [packed_words(n, bits) for bits, n in widths]) if cuts else ()
    codes = {bits: packing.unpack(w, bits, n) for w, (bits, n) in zip(split, widths, strict=True)}
    places = [words.new_empty(0, dtype=torch.int64)]
    for cut in cuts:
        count = cut.number * cut.kept
        rows = codes[cut.bits][:count].view(cut.number, cut.kept)
        codes[cut.bits] = codes[cut.bits][count:]
        if int(rows[:, -1].max()) >= cut.size or not (rows.diff(dim=1) > 0).all():
            raise PayloadError(f"indices in chunks of {cut.size} must increase, and end below it")
        first = torch.arange(cut.number, device=words.device).mul_(cut.size).add_(cut.start)
        places.append((rows + first.unsqueeze(1)).view(-1))
    return torch.cat(places)
