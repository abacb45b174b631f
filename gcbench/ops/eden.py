"""Random rotations of segments, and their elements as the nearest centroids of N(0, 1).

The rotation is R times H D, with R = 1 or 2: D multiplies by random signs, H is the orthonormal
Walsh-Hadamard transform of `gcbench.ops.hadamard`. A sign is a function of an address that is sent,
a 48-bit seed and the offset in the bucket, and of the element's index.

Four tiles of 1024 elements share the draws of one tile. Element e of the bucket is in tile
T = e // 1024; its sign for rotation j = 0, 1 is bit 2 (T % 4) + j of the draw at place e % 1024 of
tile T // 4. Only the lowest 8 bits of a draw are used: adjacent rows share the others
(`gcbench.ops.random`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import TILE, Key, Segments
from gcbench.ops import hadamard, packing, random, statistics
from gcbench.ops.dispatch import operation, output, outputs, part, payload_faults, vector
from gcbench.ops.statistics import FLOAT_MAX, TINY, coded_in_zeros, scale_, valid_scales

POSITIVE = (
    (0.797884561,),
    (0.452780035, 1.510417608),
    (0.245094179, 0.756005281, 1.343909279, 2.151945705),
    (
        *(0.12839503, 0.388048299, 0.656759119, 0.942340456),
        *(1.256231197, 1.618046386, 2.069017227, 2.732589571),
    ),
    (
        *(0.06588966, 0.19805183, 0.331378306, 0.466699523, 0.604933624, 0.747135704),
        *(0.894565117, 1.04878332, 1.211804381, 1.38634034, 1.576228079, 1.787233218),
        *(2.028728399, 2.317739404, 2.691119577, 3.260732493),
    ),
)
"""The positive centroids of Lloyd and Max for N(0, 1), for 1 to 5 bits; each is the mean of the
values that are nearest to it (test_eden.py)."""
MAX_BITS = len(POSITIVE)
SCALES = ("unbiased", "least")
ROTATIONS = 2
SHARING = 4
"""Tiles that share the draws of one; 2 bits of a draw for each."""
WORD_BITS = 24
MASK = (1 << WORD_BITS) - 1
FAULTS = {
    1: f"a block's scale must be 0, or finite and at least {TINY}",
    2: "codes of a block of scale 0 must be those of zeros",
    3: f"the address must have four words of {WORD_BITS} bits",
}


def centroids(bits: int, device: torch.device) -> Tensor:
    """Return the 2^bits centroids in increasing order, float32."""
    positive = POSITIVE[bits - 1]
    values = [-c for c in reversed(positive)] + list(positive)
    return torch.tensor(values, dtype=torch.float32, device=device)


_fault = payload_faults(FAULTS)


# ---- rotation ------------------------------------------------------------------------------------


def _signs(address: Tensor, n: int) -> Tensor:
    """Return an integer for each element, whose bit j has the sign of rotation j."""
    seed, more, low, high = (int(word) for word in address.tolist())
    offset = high << WORD_BITS | low
    first, last = offset // TILE, (offset + max(n, 1) - 1) // TILE
    start, stop = first // SHARING, last // SHARING + 1
    key = Key(more << WORD_BITS | seed, 0, 0, offset=start * TILE)
    draws = random.draws24(key, (stop - start) * TILE, address.device).view(-1, 1, TILE)
    shifts = torch.arange(
        0, ROTATIONS * SHARING, ROTATIONS, dtype=torch.int32, device=address.device
    )
    skip = offset - start * SHARING * TILE
    return (draws >> shifts.view(1, SHARING, 1)).view(-1)[skip : skip + n]


def _flip_(x: Tensor, signs: Tensor, j: int) -> Tensor:
    """Change the sign of the elements whose bit j is set, in place."""
    bit = (signs >> j).bitwise_and_(1) << 31
    x.view(torch.int32).bitwise_xor_(bit)
    return x


@operation()
def _rotate(
    x: Tensor,
    address: Tensor,
    rotations: int,
    inverse: bool,
    segments: Segments,
    out: Tensor,
) -> None:
    out.copy_(x)
    signs = _signs(address, segments.numel)
    for j in reversed(range(rotations)) if inverse else range(rotations):
        if not inverse:
            _flip_(out, signs, j)
        hadamard.rotate(out, segments, out=out)
        if inverse:
            _flip_(out, signs, j)


def rotate(
    x: Tensor,
    address: Tensor,
    rotations: int,
    segments: Segments,
    *,
    inverse: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return H D_R ... H D_1 x of each segment, or the inverse of that, float32, shape (n,).

    `x`: float32, shape (n,). `address`: int32, shape (4,), as `encode` returns it. `rotations`: R,
    1 or 2. `out`: the output tensor, which may be `x`.
    """
    x = vector(x, torch.float32, segments.numel)
    out = output(out, torch.float32, segments.numel, x.device)
    _rotate(x, address, rotations, inverse, segments, out)
    return out


# ---- codes ---------------------------------------------------------------------------------------


def _sums(x: Tensor, segments: Segments) -> Tensor:
    """Return the sum of each segment, float64, shape (m,); the sums of tiles are in float32.

    The order is that of `statistics.moments`.
    """
    sums = torch.zeros(len(segments), dtype=torch.float64, device=x.device)
    for which, rows in segments.views(x):
        sums[which] = statistics.row_sums(rows)
    return sums


@operation()
def _encode(
    x: Tensor,
    address: Tensor,
    bits: int,
    positive: Sequence[float],
    rotations: int,
    least: bool,
    segments: Segments,
    words: Tensor,
    scales: Tensor,
) -> None:
    r, table = rotate(x, address, rotations, segments), centroids(bits, x.device)
    square = statistics.moments(r, segments)[1]
    lengths = square.new_tensor([float(n) for n in segments.lengths])
    factor = torch.where(square > 0, (lengths / square).sqrt(), 0.0).clamp_(max=FLOAT_MAX)
    z = scale_(r.clone(), factor.float(), segments)
    codes = torch.bucketize(z, (table[1:] + table[:-1]) / 2, out_int32=True)
    q = table[codes]
    along = _sums(q.mul(z), segments)  # <q, r> times the factor
    if least:
        ratio = along / statistics.moments(q, segments)[1] / factor
    else:
        ratio = square * factor / along
    scale = torch.where(square > 0, ratio, 0.0).clamp_(max=FLOAT_MAX).float()
    scale = torch.where(scale < TINY, 0.0, scale)
    for which, rows in segments.views(codes):
        rows.masked_fill_((scale[which] == 0).unsqueeze(1), (1 << bits - 1) - 1)
    packing.pack(codes, bits, out=words)
    scales.copy_(scale)


def encode(
    x: Tensor,
    bits: int,
    rotations: int,
    least: bool,
    segments: Segments,
    key: Key,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, int32, each segment's scale S, float32, and the address, int32.

    z is the rotated x with a root mean square of 1 in each segment, q its nearest centroids, ties
    to the lower. S makes S q the least-squares fit of the rotated x (`least`), or gives it the
    inner product ||x||^2 with it. S below `TINY` becomes 0, and its codes those of zeros. The
    address has the lower and upper 24 bits of a seed, which is drawn from `key`, and of the key's
    offset. `x`: float32, shape (n,); `out`: output tensors for the three.
    """
    n, m = segments.numel, len(segments)
    x = vector(x, torch.float32, n)
    sizes = (torch.int32, packing.packed_words(n, bits)), (torch.float32, m), (torch.int32, 4)
    words, scales, address = outputs(out, x.device, *sizes)
    random.draws24(key._replace(offset=0), 2, out=address[:2])
    address[2:] = torch.tensor([key.offset & MASK, key.offset >> WORD_BITS])
    _encode(x, address, bits, POSITIVE[bits - 1], rotations, least, segments, words, scales)
    return words, scales, address


@operation(_fault)
def _decode(
    words: Tensor,
    scales: Tensor,
    address: Tensor,
    bits: int,
    positive: Sequence[float],
    rotations: int,
    segments: Segments,
    name: str,
    out: Tensor,
) -> None:
    arguments = {"name": name}
    if not valid_scales(scales):
        raise _fault(1, arguments)
    if not ((address >= 0) & (address <= MASK)).all():
        raise _fault(3, arguments)
    codes = packing.unpack(words, bits, segments.numel)
    if coded_in_zeros(codes, scales, segments, zero=(1 << bits - 1) - 1):
        raise _fault(2, arguments)
    torch.index_select(centroids(bits, out.device), 0, codes, out=out)
    scale_(out, scales, segments)
    rotate(out, address, rotations, segments, inverse=True, out=out)


def decode(
    parts: Sequence[Tensor],
    bits: int,
    rotations: int,
    segments: Segments,
    name: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the inverse rotation of S q, float32, shape (n,).

    `parts`: as `encode` returns them. `out`: the output tensor, undefined after an error.

    Raises:
        PayloadError: wrong dtype or shape; a scale is negative, not finite, or below `TINY` but not
            0; a segment of scale 0 has other codes than those of zeros; a word of the address
            has more than 24 bits. The message starts with `name`.
    """
    n, m = segments.numel, len(segments)
    words = part(parts[0], torch.int32, packing.packed_words(n, bits), f"{name}: codes")
    scales = part(parts[1], torch.float32, m, f"{name}: scales")
    address = part(parts[2], torch.int32, 4, f"{name}: address")
    out = output(out, torch.float32, n, words.device)
    positive = POSITIVE[bits - 1]
    _decode(words, scales, address, bits, positive, rotations, segments, name, out)
    return out
