"""Operations of the sign family: codes of one sign an element, means of the two classes, votes.

A sign takes 1 bit, [x >= 0], so that zeros of either sign count as +1; or 2 bits, sign + 1, where
a code may also be 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.backend import op
from gcbench.ops.reference import (
    LANES,
    draws24,
    into,
    mean_onto,
    pack,
    scale_,
    segment_moments,
    unpack,
)

ERROR_SLACK = 2.0**-40
"""Rounding of `mean_error`, in units of the sum of squares. Sums of up to 2^40 terms by halving in
float64 are off by 40 * 2^-53 of the sum of magnitudes, and four such sums enter."""
VOTES = 2**30
"""Votes that are counted at most, less one: counts must fit 32 bits."""

WRONG = {
    1: "a bit is set after the last code",
    2: "code 3 stands for no sign; allowed are 0, 1 and 2",
    3: "a payload's values are not finite",
    4: "the value of -1 must not be above 0, nor that of +1 below",
    5: "the value of a class without elements must be 0",
}
"""What can be wrong with a payload of signs, by the number with which the kernels report it."""


def wrong(name: str, number: int) -> PayloadError:
    """Return the error for a payload of the method `name`; `number` is a key of `WRONG`."""
    return PayloadError(f"{name}: {WRONG[number]}")


# ---- packed signs --------------------------------------------------------------------------------


@op
def sign_pack(x: Tensor, bits: int = 1, *, out: Tensor | None = None) -> Tensor:
    """Pack the signs of `x`, shape (n,): [x >= 0] in 1 bit each, or sign + 1 in 2: int32 words.

    `x`: float32. A NaN is no sign: 0 in 1 bit, and 0 in 2.
    """
    return into(out, pack(x >= 0, 1) if bits == 1 else pack(x.sign().to(torch.int8) + 1, 2))


@op
def sign_pack_above(
    x: Tensor, factor: float, segments: Segments, *, out: Tensor | None = None
) -> Tensor:
    """Pack sign + 1 in 2 bits, with sign 0 where |x| < factor * rms of the segment, or x = 0.

    `x`: float32, shape (n,). The root mean square is taken in float64 and the limit rounded to
    float32, so no bit depends on the machine.
    """
    square = segment_moments(x, segments)[1]
    count = torch.tensor(segments.lengths, dtype=torch.float64, device=x.device).clamp_(min=1)
    limit = (factor * (square / count).sqrt()).float()  # infinite: all abstain
    kept = torch.empty_like(x)
    for (which, rows), (_, signs) in zip(segments.views(x), segments.views(kept), strict=True):
        torch.mul(rows.sign(), rows.abs() >= limit[which].unsqueeze(1), out=signs)
    return into(out, pack(kept.to(torch.int8) + 1, 2))


def sign_unpack(words: Tensor, bits: int, n: int, name: str) -> Tensor:
    """Return the signs, int32, shape (n,): +-1 from codes of 1 bit; -1, 0 or 1 from 2 bits.

    Raises:
        PayloadError: another number of words, the code 3, or a bit set after the last code; the
            message of the latter two begins with `name`.
    """
    # The last lanes hold up to 31 codes more than there are, zeros: read them, too.
    codes = unpack(words, bits, -(-n // LANES) * LANES)
    if codes[n:].any():
        raise wrong(name, 1)
    codes = codes[:n]
    if bits == 1:
        return codes.mul_(2).sub_(1)
    if n and int(codes.amax()) > 2:
        raise wrong(name, 2)
    return codes.sub_(1)


@op
def sign_decode(
    words: Tensor, bits: int, n: int, name: str, *, out: Tensor | None = None
) -> Tensor:
    """Return the signs as float32, shape (n,); arguments and errors of `sign_unpack`."""
    return into(out, sign_unpack(words, bits, n, name).float())


@op
def sign_vote(
    words: Sequence[Tensor],
    counts: Sequence[int],
    bits: Sequence[int],
    n: int,
    name: str,
    *,
    width: int,
    quorum: int = 1,
    coin: Key | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the majority vote on `n` signs, packed in codes of `width` bits, int32 words.

    Payload i has signs of bits[i] bits each, worth counts[i] votes. In 1 bit a tie is +1, or with
    a `coin` fair: +1 where a draw of this key, on [0, 2^24), is below 2^23. In 2 bits the vote is
    0 where it is won by fewer than `quorum` votes, or than all votes there are.

    Raises:
        PayloadError: see `sign_unpack`; or a count is below 1, or 2^30 votes or more.
    """
    voters = sign_voters(counts, name)
    total = torch.zeros(n, dtype=torch.int32, device=words[0].device)
    for word, count, size in zip(words, counts, bits, strict=True):
        total.add_(sign_unpack(word, size, n, name), alpha=count)
    if width == 2:
        won = total.abs() >= min(quorum, voters)
        return into(out, pack(total.sign().mul_(won).add_(1), 2))
    plus = total >= 0
    if coin is not None:
        plus = (total > 0) | (plus & (draws24(coin, n, total.device) < 1 << 23))
    return into(out, pack(plus, 1))


def sign_voters(counts: Sequence[int], name: str) -> int:
    """Return the number of votes in all.

    Raises:
        PayloadError: a count is below 1, or there are too many votes to be counted.
    """
    if min(counts) < 1 or sum(counts) >= VOTES:
        raise PayloadError(f"{name}: votes of {counts} workers; 1 to {VOTES - 1} in all allowed")
    return sum(counts)


# ---- one value a segment: the mean magnitude -----------------------------------------------------


@op
def scaled_encode(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Return the packed bits [x >= 0], and the mean magnitude of each segment, float32, (m,).

    `x`: float32, shape (n,). Means are of float64 sums in the order of `segment_moments`.
    """
    total, _ = segment_moments(x.abs(), segments)
    count = torch.tensor(segments.lengths, dtype=torch.float64, device=x.device)
    return pack(x >= 0, 1), class_means(count, total)


@op
def scaled_decode(
    words: Tensor,
    scale: Tensor,
    segments: Segments,
    name: str,
    *,
    total: Tensor | None = None,
    count: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return sign * scale of its segment, float32, shape (n,), or `total` + `count` times that.

    `words`: bits, 1 an element; `scale`: float32, shape (m,). `out`, the tensor to write to, may
    be `total`.

    Raises:
        PayloadError: see `sign_unpack`; or a scale is not finite, or below 0, or not 0 in a
            segment without elements.
    """
    signs = sign_unpack(words, 1, segments.numel, name)
    if not scale.isfinite().all():
        raise wrong(name, 3)
    if (scale < 0).any():
        raise wrong(name, 4)
    if scale[torch.tensor(segments.lengths, device=scale.device) == 0].any():
        raise wrong(name, 5)
    return into(out, _onto(total, count, scale_(signs.float(), scale, segments)))


def _onto(total: Tensor | None, count: int, values: Tensor) -> Tensor:
    """Return `values`, or `total` + `count` times them: two roundings."""
    return values if total is None else total + (values * count if count > 1 else values)


@op
def scaled_feedback(
    x: Tensor, residual: Tensor, segments: Segments, name: str, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `scaled_encode` of x + residual, and what decoding that loses of it, shape (n,).

    `out`: where to write what is lost; it may be `residual`.

    Raises:
        PayloadError: a mean is not finite; the content of `out` is then undefined.
    """
    offered = residual + x
    words, scale = scaled_encode(offered, segments)
    lost = offered - scaled_decode(words, scale, segments, name)
    return words, scale, into(out, lost)


# ---- two values a segment: the means of the classes ----------------------------------------------


def class_counts(positive: Tensor, segments: Segments) -> Tensor:
    """Return how many elements of each segment are False, and True: float64, shape (2, m)."""
    counts = torch.zeros(2, len(segments), dtype=torch.float64, device=positive.device)
    for which, rows in segments.views(positive):
        ones = rows.sum(1)
        counts[0, which] = (rows.shape[1] - ones).double()
        counts[1, which] = ones.double()
    return counts


def class_moments(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, sum and sum of squares of the classes x < 0 and x >= 0 of each segment.

    float64, shape (2, m) each; the order of the additions is that of `segment_moments`.
    """
    low, high = segment_moments(x.clamp(max=0), segments), segment_moments(x.clamp(min=0), segments)
    total, square = (torch.stack(pair) for pair in zip(low, high, strict=True))
    return class_counts(x >= 0, segments), total, square


def class_means(count: Tensor, total: Tensor) -> Tensor:
    """Return total / count rounded to float32, and +0 for an empty class; any shape, float64."""
    # Adding 0 turns -0 into +0: a zero mean has one bit pattern on every machine.
    return (total / count.clamp(min=1)).float().add_(0.0)


@op
def class_encode(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """Return the packed bits [x >= 0], and the means of x < 0 and x >= 0 of each segment, (m,).

    `x`: float32, shape (n,). Means are float32, of float64 sums in the order of `class_moments`.
    """
    count, total, _ = class_moments(x, segments)
    low, high = class_means(count, total)
    return pack(x >= 0, 1), low, high


@op
def class_decode(
    words: Tensor,
    low: Tensor,
    high: Tensor,
    segments: Segments,
    name: str,
    *,
    total: Tensor | None = None,
    count: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return `high` where the bit is 1 and `low` elsewhere, or `total` + `count` times that.

    `words`: bits, 1 an element; `low`, `high`: float32, shape (m,), one value a segment; the
    result: float32, shape (n,). `out`, the tensor to write to, may be `total`.

    Raises:
        PayloadError: see `sign_unpack`; or a value is not finite, `low` is above 0 or `high`
            below, or a class without elements has a value other than 0.
    """
    positive = sign_unpack(words, 1, segments.numel, name) > 0
    means = torch.stack([low, high])
    if not means.isfinite().all():
        raise wrong(name, 3)
    if (low > 0).any() or (high < 0).any():
        raise wrong(name, 4)
    if means[class_counts(positive, segments) == 0].any():
        raise wrong(name, 5)
    values = low.new_empty(segments.numel)
    for (which, rows), (_, part) in zip(
        segments.views(positive), segments.views(values), strict=True
    ):
        torch.where(rows, high[which].unsqueeze(1), low[which].unsqueeze(1), out=part)
    return into(out, _onto(total, count, values))


@op
def sign_mean(
    payloads: Sequence[tuple[Tensor, tuple[Tensor, ...], int]],
    segments: Segments,
    name: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the mean of all workers, float32, shape (n,): see `mean_onto`.

    `payloads`: the bits, the value or the two values of each segment, as `scaled_decode` and
    `class_decode` take them, and how many workers' mean they are. `out`: where to write.

    Raises:
        PayloadError: see these.
    """

    def decode(i: int, total: Tensor | None) -> Tensor:
        words, values, count = payloads[i]
        more: dict[str, Any] = {"total": total, "count": count, "out": total}
        if len(values) == 1:
            return scaled_decode(words, values[0], segments, name, **more)
        return class_decode(words, values[0], values[1], segments, name, **more)

    return into(out, mean_onto(decode, [count for *_, count in payloads]))


@op
def class_feedback(
    x: Tensor, residual: Tensor, segments: Segments, name: str, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `class_encode` of x + residual, and what decoding that loses of it, shape (n,).

    `out`: where to write what is lost; it may be `residual`.

    Raises:
        PayloadError: a mean is not finite; the content of `out` is then undefined.
    """
    offered = residual + x
    words, low, high = class_encode(offered, segments)
    lost = offered - class_decode(words, low, high, segments, name)
    return words, low, high, into(out, lost)


def mean_error(value: Tensor, count: Tensor, total: Tensor, square: Tensor) -> float:
    """Return the squared error of sending one `value`, float32, for each class of elements.

    sum (x - v)^2 = sum x^2 - v (2 sum x - count v), with the value as it was rounded, plus
    `ERROR_SLACK` of the sum of squares. The other arguments as `class_moments` returns them.
    """
    sent = value.double()
    explained = sent * (2 * total - count * sent)
    return float((square - explained).sum() + ERROR_SLACK * square.sum())
