"""Ternary codes: -1, 0 or 1 times a scale, unbiased, 2 bits each (TernGrad).

A sum of the codes of `count` workers is sent as `sum + count`, in `bits(count)` bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops import packing, statistics
from gcbench.ops.dispatch import operation, output, part, vector
from gcbench.ops.packing import BLOCK, MAX_BITS, packed_words
from gcbench.ops.random import draws_for
from gcbench.ops.statistics import FLOAT_MAX, TINY, clamp_, scale_

EVEN = 2.0**-22
"""Standard deviation, relative to the largest magnitude, up to which the values of a segment count
as equal: the rounding errors of `statistics.moments` give up to 2^-23."""
BAD_SCALE = "ternary payload: scales must be finite and not negative"


def bits(count: int) -> int:
    """Return the bits of the sum of `count` ternary codes: ceil(log2(2 count + 1)).

    Raises:
        PayloadError: `count` is above 32,767, as packed codes have at most 16 bits.
    """
    width = (2 * count).bit_length()
    if width > MAX_BITS:
        raise PayloadError(
            f"sums of ternary codes of {count} workers need {width} bits: at most {MAX_BITS}, that "
            f"is {2 ** (MAX_BITS - 1) - 1} workers; use allgather"
        )
    return width


# ---- one worker ----------------------------------------------------------------------------------


@operation()
def _scales(
    x: Tensor,
    segments: Segments,
    clip: float,
    at_limit: bool,
    limit: Tensor | None,
    scale: Tensor,
) -> None:
    scale.copy_(statistics.absmax(x, segments))
    if not clip:
        return
    sigma = statistics.std(x, segments)
    even = sigma <= scale * EVEN
    bound = torch.where(even, FLOAT_MAX, sigma.mul_(clip)).clamp_(max=FLOAT_MAX)
    if limit is not None:
        limit.copy_(bound)
    scale.copy_(torch.where(even, scale, bound) if at_limit else torch.minimum(scale, bound))


def scales(
    x: Tensor, segments: Segments, clip: float, *, at_limit: bool = False
) -> tuple[Tensor | None, Tensor]:
    """Return the clipping thresholds and the scales of ternary codes, float32, shape (m,) each.

    `x`: float32, shape (n,). The threshold is `clip` standard deviations (None for clip = 0), and
    the scale is the largest clipped magnitude. With `at_limit` the scale equals that threshold, and
    the threshold is None, because the scale then limits the codes.

    A segment of equal values, such as a single element, is not clipped: its threshold is the
    largest float32, and its scale the largest magnitude, also with `at_limit`. Values count as
    equal if their standard deviation is at most 2^-22 of that: rounding alone can give 2^-23.
    """
    m, x = len(segments), vector(x, torch.float32, segments.numel)
    scale = output(None, torch.float32, m, x.device)
    limit = torch.empty_like(scale) if clip and not at_limit else None
    _scales(x, segments, clip, at_limit, limit, scale)
    return limit, scale


@operation()
def _encode(
    x: Tensor, limit: Tensor | None, scale: Tensor, segments: Segments, key: Key, out: Tensor
) -> None:
    step = torch.where(scale < TINY, torch.inf, scale * 2.0**-24)
    codes = torch.empty(x.numel(), dtype=torch.int8, device=x.device)
    for start in range(0, x.numel(), BLOCK):
        stop = min(start + BLOCK, x.numel())
        shard, which = segments.shard(start, stop)
        magnitude = x[start:stop].abs()
        if limit is not None:
            clamp_(magnitude, limit[which.start : which.stop], shard)
        place = key._replace(offset=key.offset + start)
        draws = draws_for(x[start:stop], place).float().add_(0.5)
        hit = scale_(draws, step[which.start : which.stop], shard) <= magnitude
        # 1 + t: 2 for +s, 0 for -s, 1 for 0
        sign = torch.signbit(x[start:stop]).to(torch.int8).mul_(-2).add_(1)
        torch.mul(hit.to(torch.int8), sign, out=codes[start:stop]).add_(1)
    packing.pack(codes, 2, out=out)


def encode(
    x: Tensor,
    limit: Tensor | None,
    scale: Tensor,
    segments: Segments,
    key: Key,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draw ternary codes t and pack t + 1 in 2 bits each, int32 words. `out`: the output tensor.

    t = sign(x) * [ (u + 1/2) * scale / 2^24 <= min(|x|, limit) ], u uniform on [0, 2^24).

    `x`: float32, shape (n,); `limit`, `scale`: float32, shape (m,), a clipping threshold (None:
    no clipping) and the scale of each segment. P(t != 0) is |x| / scale to within 2^-23, and
    exactly 1 at the scale and above. A scale below 2^-100 gives zeros.
    """
    n, m = segments.numel, len(segments)
    x, scale = vector(x, torch.float32, n), vector(scale, torch.float32, m, "scale")
    limit = None if limit is None else vector(limit, torch.float32, m, "limit")
    out = output(out, torch.int32, packed_words(n, 2), x.device)
    _encode(x, limit, scale, segments, key, out)
    return out


# ---- all workers ---------------------------------------------------------------------------------


def _too_large(number: int, count: int) -> PayloadError:
    return PayloadError(
        f"ternary payload {number} of {count} worker(s) contains a code above {2 * count}"
    )


def _fault(number: int, arguments: Mapping[str, Any]) -> PayloadError:
    """Return the error for a kernel's number: -1, a scale; k > 0, a code of payload k - 1."""
    if number < 0:
        return PayloadError(BAD_SCALE)
    return _too_large(number - 1, arguments["tops"][number - 1] // 2)


def _checked(
    payloads: Sequence[tuple[Tensor, int]], n: int, width: int | None
) -> tuple[list[Tensor], list[int], list[int], int]:
    """Return the payloads' words, bits per code and largest codes, and the number of all workers.

    Raises:
        PayloadError: a payload has the wrong number of words.
        ValueError: there are no payloads.
    """
    if not payloads:
        raise ValueError("mean and merge need at least one payload")
    widths = [width or bits(count) for _, count in payloads]
    words = [
        part(packed, torch.int32, packed_words(n, wide), f"ternary codes of {wide} bits")
        for (packed, _), wide in zip(payloads, widths, strict=True)
    ]
    return words, widths, [2 * count for _, count in payloads], sum(count for _, count in payloads)


def _sum(words: Sequence[Tensor], bits: Sequence[int], tops: Sequence[int], n: int) -> Tensor:
    """Return the sum of the ternary codes t of all payloads, int32, shape (n,)."""
    total = torch.zeros(n, dtype=torch.int32, device=words[0].device)
    for number, (packed, width, top) in enumerate(zip(words, bits, tops, strict=True)):
        codes = packing.unpack(packed, width, n)
        if n and int(codes.amax()) > top:
            raise _too_large(number, top // 2)
        total += codes.sub_(top // 2)
    return total


@operation(_fault)
def _mean(
    words: Sequence[Tensor],
    bits: Sequence[int],
    tops: Sequence[int],
    workers: int,
    scale: Tensor,
    segments: Segments,
    out: Tensor,
) -> None:
    if not (scale.isfinite() & (scale >= 0)).all():
        raise PayloadError(BAD_SCALE)
    total = _sum(words, bits, tops, segments.numel)
    # A GPU may replace division by a Python number, but not by a tensor, with a multiplication.
    unit = torch.where(scale < TINY, 0.0, scale / scale.new_tensor(float(workers)))
    scale_(out.copy_(total), unit, segments)


def mean(
    payloads: Sequence[tuple[Tensor, int]],
    scale: Tensor,
    segments: Segments,
    *,
    bits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the mean of all workers, sum of codes * (scale / number of workers), float32, (n,).

    `payloads`: per payload the int32 words of the sum of codes of `count` workers, and `count`; a
    sum has `bits` bits, by default `ternary.bits(count)`. `scale`: float32, shape (m,). `out`: the
    output tensor.

    Raises:
        PayloadError: a payload has the wrong number of words or a code above 2 * count, or a scale
            is negative or not finite.
    """
    n, m = segments.numel, len(segments)
    words, widths, tops, workers = _checked(payloads, n, bits)
    scale = vector(scale, torch.float32, m, "scale")
    out = output(out, torch.float32, n, scale.device)
    _mean(words, widths, tops, workers, scale, segments, out)
    return out


def check_scales(words: Tensor, scale: Tensor, segments: Segments, *, reached: bool) -> None:
    """Check the scales that one worker sent with its codes, float32, shape (m,).

    `words`: its codes, as `encode` returns them. `reached`: whether the scale is the largest
    magnitude, which some code of the segment must have.

    Raises:
        PayloadError: a segment has nonzero codes and a scale of 0, or a scale that no code reaches.
    """
    codes = mean([(words, 1)], torch.ones_like(scale), segments)
    used, positive = statistics.absmax(codes, segments) > 0, scale >= TINY
    if bool((used & ~positive).any()):
        raise PayloadError("nonzero codes in a segment of scale 0")
    if reached and bool((positive & ~used).any()):
        raise PayloadError("no code of a segment reaches its scale")


@operation(_fault)
def _merge(
    words: Sequence[Tensor],
    bits: Sequence[int],
    tops: Sequence[int],
    n: int,
    width: int,
    out: Tensor,
) -> None:
    packing.pack(_sum(words, bits, tops, n) + sum(tops) // 2, width, out=out)


def merge(
    payloads: Sequence[tuple[Tensor, int]], n: int, *, out: Tensor | None = None
) -> tuple[Tensor, int]:
    """Return the packed sum of the payloads' codes, `n` each, and the number of its workers.

    `payloads`: as for `mean`. `out`: the output tensor.

    Raises:
        PayloadError: see `mean`.
    """
    words, widths, tops, workers = _checked(payloads, n, None)
    width, device = bits(workers), words[0].device
    out = output(out, torch.int32, packed_words(n, width), device)
    _merge(words, widths, tops, n, width, out)
    return out, workers


def summand_bits(count: int) -> int:
    """Return the bits per code for which packed codes of `count` workers can be added as words.

    It is `bits(count)` rounded up to a power of two: fields do not cross words, so sums never carry
    into the next field.
    """
    return 1 << (bits(count) - 1).bit_length()


def summand(words: Tensor, workers: int, n: int) -> Tensor:
    """Repack one worker's `n` 2-bit codes so that words can be added over `workers` workers."""
    width = summand_bits(workers)
    return words if width == 2 else packing.pack(packing.unpack(words, 2, n), width)
