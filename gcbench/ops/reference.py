"""The reference backend: every operation in plain torch, on any device. It is the definition.

Packing layout. A tile is 1024 consecutive codes; code i of a tile belongs to lane i % 32, row
i // 32. A lane packs its 32 rows into `bits` 32-bit words, row j at bit j * bits, and word k of
lane l is word k * 32 + l of the tile. A last, shorter tile of r codes has ceil(r / 32) lanes
instead of 32 and its unused codes are zero, so n codes take bits * (32 * (n // 1024) +
ceil((n % 1024) / 32)) words. Both a warp and a vector unit read and write such a tile in order.

Drawing layout. Element e of a bucket draws from lane l = e % 32, row j = (e % 1024) // 32 of tile
e // 1024. Each Philox block of 16 bytes serves 16 rows: row j takes the 24 bits that start at byte
j % 16 (cyclic) of block j // 16 of its lane. Every draw is exactly uniform on 24 bits; rows of one
lane that are neighbours share two bytes, which leaves a correlation of at most 0.004 between them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import TILE, Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.backend import op

LANES = 32
MAX_BITS = 16
TINY = 2.0**-100
"""A scale below this counts as zero: its segment is sent as zeros. Far below any gradient, and it
keeps every product of the codecs out of the denormal range."""

BLOCK = 1024 * TILE
"""Elements worked on at once: bounds the memory of intermediate results. Much smaller blocks cost
more in calls, and in threads that wait for the interpreter, than they gain in the cache."""
MOMENTS_BLOCK = 256 * TILE
"""The same for sums in float64, which touch fresh memory at every halving."""

_WORD = 0xFFFFFFFF
# Philox4x32: multipliers and Weyl increments (Salmon et al. 2011, table 2 and Random123's header).
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def into(out: Tensor | None, result: Tensor) -> Tensor:
    """Return `result`, copied into `out` if there is one.

    Raises:
        ValueError: `out` has another shape; a copy would repeat a short result.
    """
    if out is None:
        return result
    if out.shape != result.shape:
        raise ValueError(f"out of shape {tuple(out.shape)}: {tuple(result.shape)} expected")
    return out.copy_(result)


def mean_of(decoded: Iterable[tuple[Tensor, int]]) -> Tensor:
    """Return the mean over all workers, float32, shape (n,), of payloads that are such means.

    `decoded`: the values of each payload, float32, shape (n,), and its number of workers, by which
    they are multiplied; the products are added in this order, and the sum is divided by all.
    """
    total, workers = None, 0
    for values, count in decoded:
        # A product is a tensor of its own; what was decoded may be the payload's.
        total = values * count if total is None else total.add_(values * count)
        workers += count
    if total is None:
        raise ValueError("the mean of no payloads: one at least expected")
    # By a tensor: a device may turn the division by a number into a product.
    return total.div_(total.new_tensor(float(workers)))


def mean_onto(decode: Callable[[int, Tensor | None], Tensor], counts: Sequence[int]) -> Tensor:
    """Return `mean_of`, bit by bit, where decoding and adding is one operation.

    `decode(i, total)`: the values of payload i, or `total` plus counts[i] times them, there.
    """
    total = decode(0, None) * counts[0]
    for i in range(1, len(counts)):
        decode(i, total)
    return total.div_(total.new_tensor(float(sum(counts))))


# ---- random numbers ------------------------------------------------------------------------------


def philox(counter: Sequence[Tensor], key: tuple[int, int], rounds: int = 10) -> list[Tensor]:
    """Return Philox4x32 blocks (Salmon et al., SC 2011).

    `counter`: four int64 tensors of one shape holding 32-bit words; `key`: two 32-bit words.
    Returns four int64 tensors of that shape holding 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # int64 products wrap modulo 2^64, so the mask recovers the unsigned high word.
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = (p1 >> 32).bitwise_and_(_WORD).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (p0 >> 32).bitwise_and_(_WORD).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = p1.bitwise_and_(_WORD), p0.bitwise_and_(_WORD)
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return [c0, c1, c2, c3]


@op
def draws24(
    key: Key, n: int, device: torch.device | str = "cpu", *, out: Tensor | None = None
) -> Tensor:
    """Return integers uniform on [0, 2^24), int32, shape (n,), for elements key.offset + [0, n)."""
    seed, key_step, who = key.words()
    if n == 0:
        return into(out, torch.empty(0, dtype=torch.int32, device=device))
    first, last = key.offset // TILE, (key.offset + n - 1) // TILE
    tiles = last - first + 1
    # Blocks in the order tile, half, lane: the layout of the elements that they serve.
    lane = torch.arange(first * LANES, (last + 1) * LANES, device=device).view(tiles, 1, LANES)
    half = torch.arange(2, device=device).view(1, 2, 1)
    shape = (tiles, 2, LANES)
    low = (lane & _WORD).expand(shape)
    high = ((lane >> 32 << 8) | half).expand(shape)
    steps = torch.full(shape, key_step, device=device)
    words = philox((low, high, steps, torch.full(shape, who, device=device)), seed)
    draws = torch.empty((tiles, 2, 16, LANES), dtype=torch.int32, device=device)
    for row in range(16):
        word, after = words[row >> 2], words[((row >> 2) + 1) & 3]
        shift = 8 * (row & 3)
        if shift <= 8:
            window = (word >> (8 - shift)) & 0xFFFFFF
        else:
            window = ((word << (shift - 8)) & 0xFFFFFF) | (after >> (40 - shift))
        draws[:, :, row] = window
    skip = key.offset - first * TILE
    return into(out, draws.view(-1)[skip : skip + n])


def uniform(key: Key, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return draws uniform on [0, 1), multiples of 2^-24, float32, shape (n,)."""
    return draws24(key, n, device).float().mul_(2.0**-24)


def normal(key: Key, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return standard normal draws, float32, shape (n,), by Box and Muller in float64.

    Draw i takes the uniforms of elements key.offset + 2i and 2i + 1.
    """
    pair = draws24(key, 2 * n, device).double().add_(0.5).mul_(2.0**-24).view(n, 2)
    return ((-2 * pair[:, 0].log()).sqrt() * (2 * math.pi * pair[:, 1]).cos()).float()


# ---- packing -------------------------------------------------------------------------------------


def packed_words(n: int, bits: int) -> int:
    """Return how many 32-bit words hold `n` codes of `bits` bits."""
    tiles, rest = divmod(n, TILE)
    return bits * (LANES * tiles + -(-rest // LANES))


def check_bits(bits: int) -> None:
    """Raise ValueError for a width that `pack` does not take."""
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"{bits} bits a code: 1 to {MAX_BITS} allowed")


def split_words(words: Tensor, bits: int, bounds: Sequence[int]) -> list[Tensor]:
    """Cut packed codes at element indices that are multiples of 1024, or the end."""
    edges = [packed_words(bound, bits) for bound in bounds]
    return [words[start:stop] for start, stop in itertools.pairwise(edges)]


def _pack_rows(rows: Tensor, bits: int) -> Tensor:
    """Pack (tiles, 32 rows, lanes) codes into (tiles, bits, lanes) int32 words."""
    tiles, _, lanes = rows.shape
    words = torch.zeros((tiles, bits, lanes), dtype=torch.int32, device=rows.device)
    for j in range(32):
        k, shift = divmod(j * bits, 32)
        code = rows[:, j].int()
        words[:, k] |= code << shift
        if shift + bits > 32:
            words[:, k + 1] |= code >> (32 - shift)
    return words


@op
def pack(codes: Tensor, bits: int, *, out: Tensor | None = None) -> Tensor:
    """Pack integer codes, shape (n,), each in [0, 2^bits), into int32 words, 1 to 16 bits each.

    The module docstring has the layout; the result has `packed_words(n, bits)` words.
    """
    check_bits(bits)
    n = codes.numel()
    full = n - n % TILE
    pieces = [_pack_rows(codes[:full].view(-1, 32, LANES), bits).view(-1)]
    if full < n:
        lanes = -(-(n - full) // LANES)
        tail = codes.new_zeros(32 * lanes)
        tail[: n - full] = codes[full:]
        pieces.append(_pack_rows(tail.view(1, 32, lanes), bits).view(-1))
    return into(out, torch.cat(pieces) if len(pieces) > 1 else pieces[0])


def _unpack_rows(words: Tensor, bits: int) -> Tensor:
    """Unpack (..., bits, lanes) int32 words into (..., 32 rows, lanes) int32 codes."""
    rows = words.new_empty((*words.shape[:-2], 32, words.shape[-1]))
    mask = (1 << bits) - 1
    for j in range(32):
        k, shift = divmod(j * bits, 32)
        # The shift of a signed word smears its sign; masks cut that off.
        code = words[..., k, :] >> shift
        if shift + bits > 32:
            code = (code & ((1 << (32 - shift)) - 1)) | (words[..., k + 1, :] << (32 - shift))
        torch.bitwise_and(code, mask, out=rows[..., j, :])
    return rows


@op
def unpack(words: Tensor, bits: int, n: int, *, out: Tensor | None = None) -> Tensor:
    """Return the codes of `bits` bits in int32 `words`, shape (..., words), int32, shape (..., n).

    Raises:
        PayloadError: `words` is not int32 or its last axis is not `packed_words(n, bits)` long.
    """
    check_bits(bits)
    if words.dtype != torch.int32 or words.shape[-1] != packed_words(n, bits):
        raise PayloadError(
            f"{words.shape[-1]} words of {words.dtype} for {n} codes of {bits} bits: "
            f"{packed_words(n, bits)} of torch.int32 expected"
        )
    lead, full = words.shape[:-1], n - n % TILE
    split = packed_words(full, bits)
    tiles = _unpack_rows(words[..., :split].reshape(*lead, full // TILE, bits, LANES), bits)
    codes = tiles.view(*lead, full)
    if full == n:
        return into(out, codes)
    tail = words[..., split:]
    rest = _unpack_rows(tail.reshape(*lead, bits, tail.shape[-1] // bits), bits)
    return into(out, torch.cat([codes, rest.view(*lead, -1)[..., : n - full]], dim=-1))


# ---- statistics of segments ----------------------------------------------------------------------


@op
def segment_absmax(x: Tensor, segments: Segments) -> Tensor:
    """Return max |x| of each segment, float32, shape (m,); 0 for an empty segment."""
    out = x.new_zeros(len(segments))
    for which, rows in segments.views(x):
        if rows.shape[1]:
            out[which] = rows.abs().amax(1)
    return out


def scale_(x: Tensor, values: Tensor, segments: Segments) -> Tensor:
    """Multiply `x`, shape (n,), in place by one value a segment, shape (m,); return `x`."""
    for which, rows in segments.views(x):
        rows.mul_(values[which].unsqueeze(1))
    return x


def clamp_(x: Tensor, limit: Tensor, segments: Segments) -> Tensor:
    """Clamp `x`, shape (n,), in place to +-limit, one a segment, shape (m,); return `x`."""
    for which, rows in segments.views(x):
        bound = limit[which].unsqueeze(1)
        torch.clamp(rows, -bound, bound, out=rows)
    return x


def _halve(tiles: Tensor) -> Tensor:
    """Sum the last axis, 1024 (or a power of two), by adding its second half to its first."""
    while tiles.shape[-1] > 1:
        half = tiles.shape[-1] // 2
        tiles = tiles[..., :half] + tiles[..., half:]
    return tiles.squeeze(-1)


def _padded(rows: Tensor) -> Tensor:
    """Cut rows, shape (m, n), into tiles of 1024, shape (m, ceil(n / 1024), 1024), with zeros.

    Short rows become one tile of the next power of two: the zeros of a wider one add nothing.
    """
    n = rows.shape[1]
    width = TILE if n > TILE // 2 else 1 << max(0, n - 1).bit_length()
    short = -n % width
    if short:
        rows = torch.nn.functional.pad(rows, (0, short))
    return rows.view(len(rows), -1, width)


def _row_moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and the sum of squares of each row, (m, n) -> float64 (m,) each.

    Tiles of 1024 are summed by halving (element i with i + 512, then i + 256, ...), and the tiles'
    sums the same way until one is left. Zero padding changes nothing, and the order depends on
    neither device nor thread count, so no bit of the result does.
    """
    tiles = _padded(rows)
    shape = tiles.shape[:2]
    flat = tiles.view(-1, tiles.shape[2])
    sums = [flat.new_zeros(0, dtype=torch.float64)] * 2
    parts: list[tuple[Tensor, Tensor]] = []
    for block in torch.split(flat, max(1, MOMENTS_BLOCK // tiles.shape[2])):
        wide = block.double()
        parts.append((_halve(wide), _halve(wide * wide)))
    if parts:
        sums = [torch.cat(column) for column in zip(*parts, strict=True)]
    total, square = (column.view(shape) for column in sums)
    while total.shape[1] > 1:
        total, square = _halve(_padded(total)), _halve(_padded(square))
    return (total.squeeze(1), square.squeeze(1)) if shape[1] else (total.sum(1), square.sum(1))


@op
def segment_moments(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Return the sum and the sum of squares of each segment, float64, shape (m,) each.

    Squares of float32 are exact in float64; the order of the additions is fixed: `_row_moments`.
    """
    total = x.new_zeros(len(segments), dtype=torch.float64)
    square = torch.zeros_like(total)
    for which, rows in segments.views(x):
        total[which], square[which] = _row_moments(rows)
    return total, square


def segment_std(x: Tensor, segments: Segments) -> Tensor:
    """Return the population standard deviation about the mean, float32, shape (m,); 0 if empty."""
    total, square = segment_moments(x, segments)
    n = torch.tensor(segments.lengths, dtype=torch.float64, device=x.device).clamp_(min=1)
    mean = total / n
    return (square / n - mean * mean).clamp_(min=0).sqrt().float()


# ---- ternary codes (TernGrad) --------------------------------------------------------------------


def ternary_bits(count: int) -> int:
    """Return the bits of the sum of `count` ternary codes: ceil(log2(2 count + 1)).

    Raises:
        PayloadError: there are more than 32,767, whose sums no packed code holds.
    """
    bits = (2 * count).bit_length()
    if bits > MAX_BITS:
        raise PayloadError(
            f"ternary codes of {count} workers add up to {bits} bits: at most {MAX_BITS}, so "
            f"{2 ** (MAX_BITS - 1) - 1} workers; an all-gather has no such limit"
        )
    return bits


@op
def ternary_scales(
    x: Tensor, segments: Segments, clip: float, *, at_limit: bool = False
) -> tuple[Tensor | None, Tensor]:
    """Return the clipping thresholds and the scales of ternary codes, float32, shape (m,) each.

    The threshold is `clip` standard deviations (None for clip = 0), the scale the largest clipped
    magnitude. With `at_limit` the scale is that threshold, and nothing is clipped before it.
    """
    largest = segment_absmax(x, segments)
    if not clip:
        return None, largest
    limit = segment_std(x, segments).mul_(clip).clamp_(max=torch.finfo(torch.float32).max)
    return (None, limit) if at_limit else (limit, torch.minimum(largest, limit))


@op
def ternary_encode(
    x: Tensor,
    limit: Tensor | None,
    scale: Tensor,
    segments: Segments,
    key: Key,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draw ternary codes and pack code + 1 in 2 bits, int32 words.

    t = sign(x) * [ (u + 1/2) * scale / 2^24 <= min(|x|, limit) ], u uniform on [0, 2^24).

    `x`: float32, shape (n,); `limit`, `scale`: float32, shape (m,), a clipping threshold (None:
    no clipping) and the scale of each segment. P(t != 0) is |x| / scale to within 2^-23, and
    exactly 1 at the scale and above. A scale below 2^-100 gives zeros.
    """
    step = torch.where(scale < TINY, torch.inf, scale * 2.0**-24)
    codes = torch.empty(x.numel(), dtype=torch.int8, device=x.device)
    for start in range(0, x.numel(), BLOCK):
        stop = min(start + BLOCK, x.numel())
        part, which = segments.shard(start, stop)
        magnitude = x[start:stop].abs()
        if limit is not None:
            clamp_(magnitude, limit[which.start : which.stop], part)
        place = key._replace(offset=key.offset + start)
        draws = draws24(place, stop - start, x.device).float().add_(0.5)
        hit = scale_(draws, step[which.start : which.stop], part) <= magnitude
        # 1 + t: 2 for +s, 0 for -s, 1 for 0
        sign = torch.signbit(x[start:stop]).to(torch.int8).mul_(-2).add_(1)
        torch.mul(hit.to(torch.int8), sign, out=codes[start:stop]).add_(1)
    return into(out, pack(codes, 2))


def ternary_unpack(words: Tensor, count: int, bits: int, n: int) -> Tensor:
    """Return the sums of `count` workers' codes, int32, (..., n), from fields of `bits` bits.

    `words`: int32, (..., words).

    Raises:
        PayloadError: another number of words, or a code beyond 2 * count.
    """
    codes = unpack(words, bits, n)
    if codes.numel() and (top := int(codes.amax())) > 2 * count:
        raise PayloadError(f"ternary payload of {count} worker(s): code {top} above {2 * count}")
    return codes.sub_(count)


def ternary_sum(
    payloads: Sequence[tuple[Tensor, int]], n: int, bits: int | None = None
) -> tuple[Tensor, int]:
    """Return the sum of ternary codes, int32, shape (n,), and over how many workers it is.

    `payloads`: words that hold sums over a number of workers, and that number; a code has `bits`
    bits, or `ternary_bits(number)`.

    Raises:
        PayloadError: see `ternary_unpack`.
    """
    total = torch.zeros(n, dtype=torch.int32, device=payloads[0][0].device)
    at_once = max(1, BLOCK // max(n, 1))
    for count in sorted({count for _, count in payloads}):
        width = bits or ternary_bits(count)
        alike = [words for words, own in payloads if own == count]
        if any(words.shape != (packed_words(n, width),) for words in alike):
            raise PayloadError(f"ternary payloads of {n} codes in {width} bits: a length is wrong")
        for start in range(0, len(alike), at_once):
            stack = torch.stack(alike[start : start + at_once])
            total += ternary_unpack(stack, count, width, n).sum(0, dtype=torch.int32)
    return total, sum(count for _, count in payloads)


def ternary_decode(total: Tensor, count: int, scale: Tensor, segments: Segments) -> Tensor:
    """Return total * (scale / count), float32, shape (n,)."""
    # By a tensor: a device may turn the division by a number into a product.
    unit = torch.where(scale < TINY, 0.0, scale / scale.new_tensor(float(count)))
    return scale_(total.float(), unit, segments)


@op
def ternary_mean(
    payloads: Sequence[tuple[Tensor, int]],
    scale: Tensor,
    segments: Segments,
    *,
    bits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the mean of all workers, sum of codes * (scale / number of workers), float32, (n,).

    `payloads`: int32 words that hold sums over a number of workers, and that number; a code has
    `bits` bits, or `ternary_bits(number)`. `scale`: float32, shape (m,). `out`: where to write.

    Raises:
        PayloadError: see `ternary_unpack`; or a scale is negative or not finite.
    """
    if not (scale.isfinite() & (scale >= 0)).all():
        raise PayloadError("ternary payload: scales must be finite and not negative")
    total, count = ternary_sum(payloads, segments.numel, bits)
    return into(out, ternary_decode(total, count, scale, segments))


@op
def ternary_merge(
    payloads: Sequence[tuple[Tensor, int]], n: int, *, out: Tensor | None = None
) -> tuple[Tensor, int]:
    """Return the sum of `n` ternary codes of all payloads, packed as they are, and its workers.

    Raises:
        PayloadError: see `ternary_unpack`.
    """
    total, count = ternary_sum(payloads, n)
    return into(out, pack(total + count, ternary_bits(count))), count


def summand_bits(count: int) -> int:
    """Return the field width in which codes of `count` workers can be added as packed words.

    The next power of two: such fields never straddle a word, so no carry is lost.
    """
    return 1 << (ternary_bits(count) - 1).bit_length()


def ternary_summand(words: Tensor, workers: int, n: int) -> Tensor:
    """Widen one worker's 2-bit codes to fields whose packed words add up over `workers`."""
    bits = summand_bits(workers)
    return words if bits == 2 else pack(unpack(words, 2, n), bits)
