"""Packed signs, majority votes, and codes that combine signs with one or two values per segment.

A sign takes 1 bit, [x >= 0], where zeros of either sign count as +1; or 2 bits, sign + 1, where the
sign may also be 0.

Two codes combine signs with values. "Scaled" signs have the mean magnitude of each segment
(EF-signSGD). "Class" signs have the means of the two classes x < 0 and x >= 0 of each segment
(1-bit SGD).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops import packing, statistics
from gcbench.ops.dispatch import operation, output, outputs, part, payload_faults, vector
from gcbench.ops.means import mean_onto
from gcbench.ops.packing import LANES, packed_words
from gcbench.ops.random import draws24
from gcbench.ops.statistics import scale_

ERROR_SLACK = 2.0**-40
"""A bound on the rounding error of `mean_error`, relative to the sum of squares: a sum of up to
2^40 terms by halving in float64 has an error of at most 40 * 2^-53 of the sum of magnitudes, and
four such sums enter."""
VOTES = 2**30
"""Exclusive upper bound of the number of votes, so that counts fit in 32 bits."""

WRONG = {
    1: "a bit is set after the last code",
    2: "code 3 is not a sign: expected 0, 1 or 2",
    3: "a payload contains values that are not finite",
    4: "the value of -1 must not be above 0, nor that of +1 below",
    5: "the value of a class without elements must be 0",
}
"""Errors of a payload of signs, by the kernels' error numbers."""


_fault = payload_faults(WRONG)


def wrong(name: str, number: int) -> PayloadError:
    """Return the error for a payload of the method `name`; `number` is a key of `WRONG`."""
    return _fault(number, {"name": name})


# ---- packed signs --------------------------------------------------------------------------------


@operation()
def _pack(x: Tensor, n: int, bits: int, out: Tensor) -> None:
    packing.pack(x >= 0 if bits == 1 else x.sign().to(torch.int8) + 1, bits, out=out)


def pack(x: Tensor, bits: int = 1, *, out: Tensor | None = None) -> Tensor:
    """Pack the signs of `x`, float32, shape (n,), into int32 words. `out`: the output tensor.

    A code is [x >= 0] in 1 bit, or sign + 1 in 2 bits. NaN has the code of -1 in 1 bit, of sign 0
    in 2.
    """
    n = x.numel()
    x = vector(x, torch.float32, n)
    out = output(out, torch.int32, packed_words(n, bits), x.device)
    _pack(x, n, bits, out)
    return out


@operation()
def _pack_above(x: Tensor, factor: float, segments: Segments, square: Tensor, out: Tensor) -> None:
    count = torch.tensor(segments.lengths, dtype=torch.float64, device=x.device).clamp_(min=1)
    limit = (factor * (square / count).sqrt()).float()  # infinite: all abstain
    votes = torch.empty_like(x)
    for (which, rows), (_, signs) in zip(segments.views(x), segments.views(votes), strict=True):
        torch.mul(rows.sign(), rows.abs() >= limit[which].unsqueeze(1), out=signs)
    packing.pack(votes.to(torch.int8) + 1, 2, out=out)


def pack_above(
    x: Tensor, factor: float, segments: Segments, *, out: Tensor | None = None
) -> Tensor:
    """Pack sign + 1 in 2 bits, with sign 0 where |x| < factor * rms of the segment, or x = 0.

    `x`: float32, shape (n,). The root mean square is computed in float64 and the limit rounded to
    float32, so the bytes are the same on every machine. `out`: the output tensor.
    """
    n = segments.numel
    x = vector(x, torch.float32, n)
    out = output(out, torch.int32, packed_words(n, 2), x.device)
    square = statistics.moments(x, segments)[1]
    _pack_above(x, factor, segments, square, out)
    return out


def unpack(words: Tensor, bits: int, n: int, name: str) -> Tensor:
    """Return the signs, int32, shape (n,): +-1 from codes of 1 bit; -1, 0 or 1 from 2 bits.

    Raises:
        PayloadError: the wrong number of words, code 3, or a bit set after the last code; the
            message of the latter two starts with `name`.
    """
    # The words have room for up to 31 more codes, which must be 0.
    codes = packing.unpack(words, bits, -(-n // LANES) * LANES)
    if codes[n:].any():
        raise wrong(name, 1)
    codes = codes[:n]
    if bits == 1:
        return codes.mul_(2).sub_(1)
    if n and int(codes.amax()) > 2:
        raise wrong(name, 2)
    return codes.sub_(1)


@operation(_fault)
def _decode(words: Tensor, n: int, bits: int, name: str, out: Tensor) -> None:
    out.copy_(unpack(words, bits, n, name))


def decode(words: Tensor, bits: int, n: int, name: str, *, out: Tensor | None = None) -> Tensor:
    """Return the signs as float32, shape (n,); arguments and errors as for `unpack`."""
    words = part(words, torch.int32, packed_words(n, bits), f"{name}: {n} signs of {bits} bits")
    out = output(out, torch.float32, n, words.device)
    _decode(words, n, bits, name, out)
    return out


@operation(_fault)
def _vote(
    words: Sequence[Tensor],
    counts: Sequence[int],
    bits: Sequence[int],
    voters: int,
    n: int,
    name: str,
    width: int,
    quorum: int,
    toss: bool,
    key: Key,
    out: Tensor,
) -> None:
    total = torch.zeros(n, dtype=torch.int32, device=words[0].device)
    for word, count, size in zip(words, counts, bits, strict=True):
        total.add_(unpack(word, size, n, name), alpha=count)
    if width == 2:
        won = total.abs() >= quorum
        packing.pack(total.sign().mul_(won).add_(1), 2, out=out)
        return
    plus = total >= 0
    if toss:
        plus = (total > 0) | (plus & (draws24(key, n, total.device) < 1 << 23))
    packing.pack(plus, 1, out=out)


def vote(
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

    Payload i has signs of bits[i] bits each, which count as counts[i] votes. With width 1 a tie is
    +1, or a fair draw if there is a key `coin`: +1 where the draw on [0, 2^24) is below 2^23. With
    width 2 the vote is 0 unless the magnitude of the sum of signs is at least min(`quorum`, number
    of votes). `out`: the output tensor.

    Raises:
        PayloadError: see `unpack`; or a count is below 1, or there are 2^30 votes or more.
        ValueError: there are no payloads, or their number differs from that of counts or bits.
    """
    if not words:
        raise ValueError("vote needs at least one payload")
    if not len(words) == len(counts) == len(bits):
        raise ValueError(
            f"{len(words)} payloads, {len(counts)} counts, {len(bits)} bits: expected equal numbers"
        )
    number, device = sum(counts), words[0].device
    if min(counts) < 1 or number >= VOTES:
        raise PayloadError(f"{name}: votes of {counts} workers: expected 1 to {VOTES - 1} in all")
    ballots = [
        part(packed, torch.int32, packed_words(n, size), f"{name}: {n} signs of {size} bits")
        for packed, size in zip(words, bits, strict=True)
    ]
    out = output(out, torch.int32, packed_words(n, width), device)
    _vote(
        ballots,
        list(counts),
        list(bits),
        number,
        n,
        name,
        width,
        min(quorum, number),
        coin is not None,
        coin or Key(0, 0, 0),
        out,
    )
    return out


# ---- signs with values: encoding -----------------------------------------------------------------


def class_counts(positive: Tensor, segments: Segments) -> Tensor:
    """Return the number of False and of True elements of each segment, float64, (2, m)."""
    counts = torch.zeros(2, len(segments), dtype=torch.float64, device=positive.device)
    for which, rows in segments.views(positive):
        ones = rows.sum(1)
        counts[0, which] = (rows.shape[1] - ones).double()
        counts[1, which] = ones.double()
    return counts


def class_moments(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, sum and sum of squares of the classes x < 0 and x >= 0 of each segment.

    float64, shape (2, m) each, added in the order of `statistics.moments`.
    """
    low, high = (
        statistics.moments(x.clamp(max=0), segments),
        statistics.moments(x.clamp(min=0), segments),
    )
    total, square = (torch.stack(pair) for pair in zip(low, high, strict=True))
    return class_counts(x >= 0, segments), total, square


def class_means(count: Tensor, total: Tensor) -> Tensor:
    """Return total / count, both float64, rounded to float32; +0 for an empty class."""
    # Adding 0 turns -0 into +0, so a zero mean has the same bits on every machine.
    return (total / count.clamp(min=1)).float().add_(0.0)


def _not_finite(number: int, arguments: Mapping[str, Any]) -> PayloadError | None:
    """Return the error for a mean that is not finite, if the values are decoded for a residual."""
    return None if arguments["lost"] is None else wrong(arguments["name"], number)


@operation(_not_finite)
def _encode(
    x: Tensor,
    residual: Tensor | None,
    segments: Segments,
    name: str,
    words: Tensor,
    low: Tensor | None,
    high: Tensor,
    lost: Tensor | None,
) -> None:
    offered = x if residual is None else residual + x
    packing.pack(offered >= 0, 1, out=words)
    if low is None:
        total, _ = statistics.moments(offered.abs(), segments)
        count = torch.tensor(segments.lengths, dtype=torch.float64, device=x.device)
        high.copy_(class_means(count, total))
    else:
        numbers, totals, _ = class_moments(offered, segments)
        means = class_means(numbers, totals)
        low.copy_(means[0])
        high.copy_(means[1])
    if lost is not None:
        torch.sub(offered, _reconstruction(words, low, high, segments, name), out=lost)


Slots = Sequence[Tensor]
"""Output tensors of a payload's parts: words, then the values of the segments."""


def _encoded(
    x: Tensor,
    residual: Tensor | None,
    segments: Segments,
    classes: bool,
    name: str,
    out: Slots | None,
    lost: Tensor | None,
) -> list[Tensor]:
    n, m, device = segments.numel, len(segments), x.device
    x = vector(x, torch.float32, n)
    sizes = [(torch.float32, m)] * (1 + classes)
    words, *values = outputs(out, device, (torch.int32, packed_words(n, 1)), *sizes)
    _encode(
        x,
        None if residual is None else vector(residual, torch.float32, n, "residual"),
        segments,
        name,
        words,
        values[0] if classes else None,
        values[-1],
        lost,
    )
    return [words, *values]


def scaled_encode(
    x: Tensor, segments: Segments, *, out: Slots | None = None
) -> tuple[Tensor, Tensor]:
    """Return the packed bits [x >= 0], and the mean magnitude of each segment, float32, (m,).

    `x`: float32, shape (n,). Sums are float64 in the order of `statistics.moments`. `out`: output
    tensors for both.
    """
    words, scale = _encoded(x, None, segments, False, "", out, None)
    return words, scale


def class_encode(
    x: Tensor, segments: Segments, *, out: Slots | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the packed bits [x >= 0], and the means of x < 0 and x >= 0 of each segment, (m,).

    `x`: float32, shape (n,). Means are float32, of float64 sums in the order of `class_moments`.
    `out`: output tensors for the three.
    """
    words, low, high = _encoded(x, None, segments, True, "", out, None)
    return words, low, high


def scaled_feedback(
    x: Tensor,
    residual: Tensor,
    segments: Segments,
    name: str,
    *,
    lost: Tensor | None = None,
    out: Slots | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `scaled_encode` of x + residual, and its error, float32, shape (n,).

    The error, x + residual minus the decoding, is the next step's residual. `lost`: where to write
    it, possibly `residual`. `out`: see `scaled_encode`.

    Raises:
        PayloadError: a mean is not finite; the content of `lost` is then undefined.
    """
    lost = output(lost, torch.float32, segments.numel, x.device, "lost")
    words, scale = _encoded(x, residual, segments, False, name, out, lost)
    return words, scale, lost


def class_feedback(
    x: Tensor,
    residual: Tensor,
    segments: Segments,
    name: str,
    *,
    lost: Tensor | None = None,
    out: Slots | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `class_encode` of x + residual, and its error, float32, shape (n,).

    The error, x + residual minus the decoding, is the next step's residual. `lost`: where to write
    it, possibly `residual`. `out`: see `class_encode`.

    Raises:
        PayloadError: a mean is not finite; the content of `lost` is then undefined.
    """
    lost = output(lost, torch.float32, segments.numel, x.device, "lost")
    words, low, high = _encoded(x, residual, segments, True, name, out, lost)
    return words, low, high, lost


# ---- signs with values: decoding -----------------------------------------------------------------


def _reconstruction(
    words: Tensor, low: Tensor | None, high: Tensor, segments: Segments, name: str
) -> Tensor:
    """Decode sign bits, float32, shape (n,), to +-high, or to `low` and `high`."""
    signs = unpack(words, 1, segments.numel, name)
    if not high.isfinite().all() or not (low is None or low.isfinite().all()):
        raise wrong(name, 3)
    if (high < 0).any() or (low is not None and (low > 0).any()):
        raise wrong(name, 4)
    if low is None:
        if high[torch.tensor(segments.lengths, device=high.device) == 0].any():
            raise wrong(name, 5)
        return scale_(signs.float(), high, segments)
    positive = signs > 0
    if torch.stack([low, high])[class_counts(positive, segments) == 0].any():
        raise wrong(name, 5)
    values = low.new_empty(segments.numel)
    for (which, rows), (_, target) in zip(
        segments.views(positive), segments.views(values), strict=True
    ):
        torch.where(rows, high[which].unsqueeze(1), low[which].unsqueeze(1), out=target)
    return values


@operation(_fault)
def _values(
    words: Tensor,
    low: Tensor | None,
    high: Tensor,
    segments: Segments,
    name: str,
    total: Tensor | None,
    count: float,
    out: Tensor,
) -> None:
    values = _reconstruction(words, low, high, segments, name)
    # With a total there are two roundings: of the product and of the sum.
    out.copy_(values if total is None else total + (values * count if count > 1 else values))


def _decoded(
    words: Tensor,
    low: Tensor | None,
    high: Tensor,
    segments: Segments,
    name: str,
    total: Tensor | None,
    count: int,
    out: Tensor | None,
) -> Tensor:
    n, m = segments.numel, len(segments)
    words = part(words, torch.int32, packed_words(n, 1), f"{name}: {n} signs")
    out = output(out, torch.float32, n, words.device)
    _values(
        words,
        None if low is None else part(low, torch.float32, m, f"{name}: values of -1"),
        part(high, torch.float32, m, f"{name}: values of +1"),
        segments,
        name,
        None if total is None else vector(total, torch.float32, n, "total"),
        1.0 if total is None else float(count),
        out,
    )
    return out


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
    """Return v = sign * scale of the segment, float32, shape (n,), or `total` + `count` * v.

    `words`: packed bits, 1 per element; `scale`: float32, shape (m,). `out`: the output tensor,
    which may be `total`.

    Raises:
        PayloadError: see `unpack`; or a scale is not finite, negative, or not 0 for an empty
            segment.
    """
    return _decoded(words, None, scale, segments, name, total, count, out)


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
    """Return v, float32, shape (n,), or `total` + `count` * v.

    v is the segment's `high` where the bit is 1, and its `low` elsewhere. `words`: packed bits, 1
    per element; `low`, `high`: float32, shape (m,). `out`: the output tensor, which may be `total`.

    Raises:
        PayloadError: see `unpack`; or a value is not finite, `low` is above 0, `high` is below 0,
            or a class without elements has a value other than 0.
    """
    return _decoded(words, low, high, segments, name, total, count, out)


@operation(_fault)
def _mean(
    words: Sequence[Tensor],
    low: Sequence[Tensor] | None,
    high: Sequence[Tensor],
    counts: Sequence[int],
    segments: Segments,
    name: str,
    out: Tensor,
) -> None:
    def onto(i: int, total: Tensor | None) -> Tensor:
        below = None if low is None else low[i]
        to = out if total is None else total
        return _decoded(words[i], below, high[i], segments, name, total, counts[i], to)

    mean_onto(onto, counts)


def mean(
    payloads: Sequence[tuple[Tensor, tuple[Tensor, ...], int]],
    segments: Segments,
    name: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the mean of all workers, float32, shape (n,): see `means.mean_onto`.

    `payloads`: per payload the packed bits, the values (scale, or low and high) as for
    `scaled_decode` or `class_decode`, and the number of workers whose mean they encode. `out`: the
    output tensor.

    Raises:
        PayloadError: see `scaled_decode` and `class_decode`.
        ValueError: there are no payloads.
    """
    if not payloads:
        raise ValueError("mean needs at least one payload")
    n, m, size = segments.numel, len(segments), packed_words(segments.numel, 1)
    words = [part(packed, torch.int32, size, f"{name}: {n} signs") for packed, _, _ in payloads]
    values = [
        [part(value, torch.float32, m, f"{name}: values") for value in pair]
        for _, pair, _ in payloads
    ]
    counts, device = [count for *_, count in payloads], words[0].device
    out = output(out, torch.float32, n, device)
    _mean(
        words,
        [pair[0] for pair in values] if len(values[0]) == 2 else None,
        [pair[-1] for pair in values],
        counts,
        segments,
        name,
        out,
    )
    return out


def mean_error(value: Tensor, count: Tensor, total: Tensor, square: Tensor) -> float:
    """Return a bound on the squared error of sending one `value`, float32, per class.

    For a class with value v it is sum (x - v)^2 = sum x^2 - v (2 sum x - count v), plus
    `ERROR_SLACK` times the sum of squares. The other arguments are float64 results of
    `class_moments`.
    """
    sent = value.double()
    explained = sent * (2 * total - count * sent)
    return float((square - explained).sum() + ERROR_SLACK * square.sum())
