"""Operations of the sign family: codes of one sign an element, means of the two classes, votes.

A sign takes 1 bit, [x >= 0], so that zeros of either sign count as +1; or 2 bits, sign + 1, where
a code may also be 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gcbench.compressor import Segments
from gcbench.errors import PayloadError
from gcbench.ops.reference import LANES, pack, segment_moments, unpack

ERROR_SLACK = 2.0**-40
"""Rounding of `mean_error`, in units of the sum of squares. Sums of up to 2^40 terms by halving in
float64 are off by 40 * 2^-53 of the sum of magnitudes, and four such sums enter."""


def sign_pack(x: Tensor, bits: int = 1) -> Tensor:
    """Pack the signs of `x`, shape (n,): [x >= 0] in 1 bit each, or sign + 1 in 2: int32 words."""
    return pack(x >= 0, 1) if bits == 1 else pack(x.sign().to(torch.int8) + 1, 2)


def sign_pack_above(x: Tensor, factor: float, segments: Segments) -> Tensor:
    """Pack sign + 1 in 2 bits, with sign 0 where |x| < factor * rms of the segment, or x = 0.

    `x`: float32, shape (n,). The root mean square is taken in float64 and the limit rounded to
    float32, so no bit depends on the machine.
    """
    square = segment_moments(x, segments)[1]
    count = torch.tensor(segments.lengths, dtype=torch.float64, device=x.device).clamp_(min=1)
    limit = (factor * (square / count).sqrt()).float()  # infinite: all abstain
    kept = torch.empty_like(x)
    for (which, rows), (_, out) in zip(segments.views(x), segments.views(kept), strict=True):
        torch.mul(rows.sign(), rows.abs() >= limit[which].unsqueeze(1), out=out)
    return sign_pack(kept, 2)


def sign_unpack(words: Tensor, bits: int, n: int, name: str) -> Tensor:
    """Return the signs, int32, shape (n,): +-1 from codes of 1 bit; -1, 0 or 1 from 2 bits.

    Raises:
        PayloadError: another number of words, the code 3, or a bit set after the last code; the
            message begins with `name`.
    """
    # The last lanes hold up to 31 codes more than there are, zeros: read them, too.
    codes = unpack(words, bits, -(-n // LANES) * LANES)
    if codes[n:].any():
        raise PayloadError(f"{name}: a bit is set after the last of {n} codes")
    codes = codes[:n]
    if bits == 1:
        return codes.mul_(2).sub_(1)
    if n and int(codes.amax()) > 2:
        raise PayloadError(f"{name}: code 3 stands for no sign; allowed are 0, 1 and 2")
    return codes.sub_(1)


def sign_votes(
    words: Sequence[Tensor], weights: Sequence[int], bits: Iterable[int], n: int, name: str
) -> Tensor:
    """Return sum_i weights[i] * sign_i, int32, shape (n,), from packed signs of bits[i] each.

    Raises:
        PayloadError: see `sign_unpack`.
    """
    total = torch.zeros(n, dtype=torch.int32, device=words[0].device)
    for word, weight, width in zip(words, weights, bits, strict=True):
        total.add_(sign_unpack(word, width, n, name), alpha=weight)
    return total


def sign_values(signs: Tensor, low: Tensor, high: Tensor, segments: Segments) -> Tensor:
    """Return `high` where a sign is +1 and `low` elsewhere, float32, shape (n,).

    `signs`: integers, shape (n,); `low`, `high`: float32, shape (m,), one value a segment.
    """
    out = low.new_empty(signs.numel())
    for (which, rows), (_, filled) in zip(
        segments.views(signs > 0), segments.views(out), strict=True
    ):
        torch.where(rows, high[which].unsqueeze(1), low[which].unsqueeze(1), out=filled)
    return out


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


def mean_error(value: Tensor, count: Tensor, total: Tensor, square: Tensor) -> float:
    """Return the squared error of sending one `value`, float32, for each class of elements.

    sum (x - v)^2 = sum x^2 - v (2 sum x - count v), with the value as it was rounded, plus
    `ERROR_SLACK` of the sum of squares. The other arguments as `class_moments` returns them.
    """
    sent = value.double()
    explained = sent * (2 * total - count * sent)
    return float((square - explained).sum() + ERROR_SLACK * square.sum())
