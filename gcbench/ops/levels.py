"""Stochastic rounding to evenly spaced levels of each segment's norm (QSGD)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.ops import bitstream, packing, statistics
from gcbench.ops.dispatch import operation, output, part, payload_faults, vector
from gcbench.ops.means import mean_onto
from gcbench.ops.packing import BLOCK, packed_words
from gcbench.ops.random import draws_for
from gcbench.ops.statistics import FLOAT_MAX, TINY, scale_, valid_scales

NORMS = ("max", "2")
CODINGS = ("fixed", "omega-dense", "omega-sparse")

FAULTS = {
    1: "norms must be finite and not negative",
    2: "a segment's codes are too large or too small for its norm",
}

_fault = payload_faults(FAULTS)


def bits(levels: int) -> int:
    """Return the bits per code of the fixed coding, which has 2 levels + 1 symbols."""
    return (2 * levels).bit_length()


# ---- encoding ------------------------------------------------------------------------------------


@operation()
def _norms(x: Tensor, segments: Segments, two: bool, levels: int, out: Tensor) -> None:
    if two:
        # Rounding is monotonic, so the root is never below the largest element.
        roots = statistics.moments(x, segments)[1].sqrt_()
        result = torch.where(roots.isinf(), roots, roots.clamp(max=FLOAT_MAX)).float()
    else:
        result = statistics.absmax(x, segments)
    out.copy_(torch.where(result < TINY * levels, 0.0, result))


def norms(x: Tensor, segments: Segments, norm: str, levels: int) -> Tensor:
    """Return the norms ("max" or "2") of the segments, float32, shape (m,), never below max |x|.

    A norm is 0 if a step, norm / levels, would be below `TINY`. It is at most the largest float32
    if all elements are finite.
    """
    x = vector(x, torch.float32, segments.numel)
    out = output(None, torch.float32, len(segments), x.device)
    _norms(x, segments, norm == "2", levels, out)
    return out


def _levels(codes: Tensor, divisor: Tensor, norms: Tensor) -> Tensor:
    """Return the values of codes, (code / levels) * norm, each operation rounded to float32.

    The highest code has exactly the value of the norm. `divisor` is `levels` as a tensor, because
    CUDA multiplies by the reciprocal of a plain number.
    """
    return codes.div(divisor).mul_(norms)


@operation()
def _codes(
    x: Tensor, norms: Tensor, levels: int, segments: Segments, key: Key, out: Tensor
) -> None:
    divisor = x.new_tensor(float(levels))
    safe = torch.where(norms == 0, 1.0, norms)  # with norm 1, values this small have code 0
    finite = bool(norms.isfinite().all())
    for start in range(0, x.numel(), BLOCK):
        stop = min(start + BLOCK, x.numel())
        part, which = segments.shard(start, stop)
        norm = scale_(x.new_ones(stop - start), safe[which.start : which.stop], part)
        size = x[start:stop].abs()
        # 2^-20 exceeds all rounding errors, so the code is never too high, and at most 1 too low.
        code = (size / norm).mul_(levels * (1 - 2.0**-20)).floor_()
        code += _levels(code + 1, divisor, norm) <= size
        below = _levels(code, divisor, norm)
        gap = _levels(code + 1, divisor, norm).sub_(below)
        place = key._replace(offset=key.offset + start)
        draws = draws_for(x[start:stop], place).float().add_(0.5).mul_(2.0**-24)
        code += draws.mul_(gap) <= size.sub_(below)
        if not finite:
            code.masked_fill_(~norm.isfinite(), 0.0)
        out[start:stop] = code.copysign_(x[start:stop])


def codes(
    x: Tensor,
    norms: Tensor,
    levels: int,
    segments: Segments,
    key: Key,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return codes in [-levels, levels], int32, shape (n,).

    Let l be the highest level that is not above |x|, and g the distance to the next level. The code
    is that of the next level iff (u + 1/2) * g / 2^24 <= |x| - l, u uniform on [0, 2^24), with the
    sign of x. The decoded value has the mean x to within 2^-23 g. With one level this is the rule
    of ternary codes.

    `x`: float32, shape (n,). `norms`: float32, shape (m,), as `norms` returns them: at least max
    |x| of the segment and at least TINY * levels, so that products are not denormal; or 0, if all
    |x| are smaller, and then all codes are zero. `levels`: 1 to 2^15 - 1. All codes of a segment
    with a non-finite norm are zero.
    """
    n = segments.numel
    x, norms = vector(x, torch.float32, n), vector(norms, torch.float32, len(segments), "norms")
    out = output(out, torch.int32, n, x.device)
    _codes(x, norms, levels, segments, key, out)
    return out


def values(codes: Tensor, norms: Tensor, levels: int, segments: Segments) -> Tensor:
    """Return (code / levels) * norm, float32, shape (n,).

    `codes`: integers, shape (n,); `norms`: float32, shape (m,).
    """
    divisor = torch.tensor(float(levels), dtype=torch.float32, device=codes.device)
    return scale_(codes.float().div_(divisor), norms, segments)


def variance(x: Tensor, norms: Tensor, levels: int, segments: Segments) -> Tensor:
    """Return the variance of each decoded element, (norm / levels)^2 p (1 - p), float64, (n,).

    p is the fractional part of |x| levels / norm; 0 where the norm is 0.
    """
    norm = scale_(x.new_ones(x.numel(), dtype=torch.float64), norms.double(), segments)
    p = (x.double().abs() * levels / norm.clamp(min=TINY)).frac_()
    return torch.where(norm == 0, 0.0, (norm / levels).square_() * p * (1 - p))


def pack(codes: Tensor, levels: int, coding: str) -> Tensor:
    """Return the int32 words of codes in [-levels, levels], shape (n,).

    "fixed": code + levels in `bits(levels)` bits; "omega-dense", "omega-sparse": see `bitstream`.
    """
    if coding == "fixed":
        return packing.pack(codes + levels, bits(levels))
    if coding == "omega-dense":
        return bitstream.omega_dense_write(codes, levels)
    return bitstream.omega_sparse_write(codes, levels)


@operation()
def _encode(
    x: Tensor,
    norms: Tensor,
    levels: int,
    bits: int,
    segments: Segments,
    key: Key,
    out: Tensor,
) -> None:
    packing.pack(codes(x, norms, levels, segments, key).add_(levels), bits, out=out)


def encode(
    x: Tensor,
    norms: Tensor,
    levels: int,
    coding: str,
    segments: Segments,
    key: Key,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the int32 words of x's codes: `codes`, then `pack`.

    `out`: the output tensor, whose length depends on x unless the coding is "fixed".
    """
    if coding != "fixed":
        words = pack(codes(x, norms, levels, segments, key), levels, coding)
        return words if out is None else output(out, torch.int32, len(words), x.device).copy_(words)
    n, width = segments.numel, bits(levels)
    x, norms = vector(x, torch.float32, n), vector(norms, torch.float32, len(segments), "norms")
    out = output(out, torch.int32, packed_words(n, width), x.device)
    _encode(x, norms, levels, width, segments, key, out)
    return out


@operation()
def _encode_max(
    x: Tensor, levels: int, bits: int, segments: Segments, key: Key, norms: Tensor, out: Tensor
) -> None:
    _norms(x, segments, two=False, levels=levels, out=norms)
    _encode(x, norms, levels, bits, segments, key, out)


def encode_max(
    x: Tensor, levels: int, segments: Segments, key: Key, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return int32 words of the fixed coding, and the norms "max", float32, shape (m,).

    Equivalent to `norms`, then `encode`; a kernel may read x once for both. `x`: float32, shape
    (n,). `levels`: 1 to 2^15 - 1. `out`: the output tensor of the words.
    """
    n, width = segments.numel, bits(levels)
    x = vector(x, torch.float32, n)
    out = output(out, torch.int32, packed_words(n, width), x.device)
    norms = output(None, torch.float32, len(segments), x.device)
    _encode_max(x, levels, width, segments, key, norms, out)
    return out, norms


# ---- decoding ------------------------------------------------------------------------------------


def _parts(
    words: Tensor, norms: Tensor, levels: int, coding: str, segments: Segments
) -> tuple[Tensor, int, Tensor]:
    """Return packed codes, their bits, and norms; for a bit stream the int32 codes and 0 bits.

    Raises:
        PayloadError: norms or words have the wrong dtype or shape, or the stream is invalid.
    """
    n, width = segments.numel, bits(levels)
    norms = part(norms, torch.float32, len(segments), "norms")
    if coding == "fixed":
        size = packed_words(n, width)
        return part(words, torch.int32, size, f"{n} codes of {width} bits"), width, norms
    if coding == "omega-dense":
        return bitstream.omega_dense_read(words, n, levels), 0, norms
    return bitstream.omega_sparse_read(words, n, levels), 0, norms


def _checked(
    words: Tensor, width: int, norms: Tensor, exact: bool, levels: int, segments: Segments
) -> Tensor:
    if not valid_scales(norms, TINY * levels):
        raise _fault(1, {})
    symbols = packing.unpack(words, width, segments.numel).sub_(levels) if width else words
    tops = statistics.absmax(symbols.float(), segments)
    most = levels * (norms > 0)
    if (tops != most if exact else tops > most).any():
        raise _fault(2, {})
    return symbols


def unpack(
    words: Tensor, norms: Tensor, norm: str, levels: int, coding: str, segments: Segments
) -> Tensor:
    """Return the codes in a payload's words, int32, shape (n,), checked against its norms.

    Raises:
        PayloadError: the words do not encode codes in [-levels, levels]; a norm is negative, not
            finite or too small for `norms`; a segment of norm 0 has a nonzero code; or with
            norm="max", no code of a segment reaches the norm.
    """
    words, width, norms = _parts(words, norms, levels, coding, segments)
    return _checked(words, width, norms, norm == "max", levels, segments)


@operation(_fault)
def _decode(
    words: Tensor,
    bits: int,
    norms: Tensor,
    exact: bool,
    levels: int,
    segments: Segments,
    onto: Tensor | None,
    count: float,
    out: Tensor,
) -> None:
    decoded = values(_checked(words, bits, norms, exact, levels, segments), norms, levels, segments)
    out.copy_(decoded if onto is None else onto + decoded * count)


def decode(
    words: Tensor,
    norms: Tensor,
    norm: str,
    levels: int,
    coding: str,
    segments: Segments,
    *,
    onto: Tensor | None = None,
    count: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return v, the values of a payload's codes, float32, shape (n,), or `onto` + `count` * v.

    Equivalent to `unpack`, then `values`. `out`: the output tensor, which may be `onto`; undefined
    after an error.

    Raises:
        PayloadError: see `unpack`.
    """
    words, width, norms = _parts(words, norms, levels, coding, segments)
    n = segments.numel
    onto = None if onto is None else vector(onto, torch.float32, n, "onto")
    out = output(out, torch.float32, n, norms.device)
    _decode(words, width, norms, norm == "max", levels, segments, onto, count, out)
    return out


def _one_by_one(
    words: Sequence[Tensor],
    norms: Sequence[Tensor],
    counts: Sequence[int],
    norm: str,
    levels: int,
    coding: str,
    segments: Segments,
    out: Tensor,
) -> None:
    def onto(i: int, total: Tensor | None) -> Tensor:
        to = out if total is None else total
        return decode(
            words[i],
            norms[i],
            norm,
            levels,
            coding,
            segments,
            onto=total,
            count=counts[i],
            out=to,
        )

    mean_onto(onto, counts)


@operation(_fault)
def _mean(
    words: Sequence[Tensor],
    norms: Sequence[Tensor],
    counts: Sequence[int],
    bits: int,
    exact: bool,
    levels: int,
    segments: Segments,
    out: Tensor,
) -> None:
    _one_by_one(words, norms, counts, "max" if exact else "2", levels, "fixed", segments, out)


def mean(
    payloads: Sequence[tuple[Tensor, Tensor, int]],
    norm: str,
    levels: int,
    coding: str,
    segments: Segments,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the mean of all workers, float32, shape (n,): see `means.mean_onto`.

    `payloads`: per payload words and norms, as for `decode`, and the number of workers whose mean
    they encode. `out`: the output tensor.

    Raises:
        PayloadError: see `unpack`.
        ValueError: there are no payloads.
    """
    if not payloads:
        raise ValueError("mean needs at least one payload")
    counts, device = [count for *_, count in payloads], payloads[0][1].device
    out = output(out, torch.float32, segments.numel, device)
    if coding != "fixed":  # bit streams are decoded one by one
        words = [words for words, *_ in payloads]
        norms = [norms for _, norms, _ in payloads]
        _one_by_one(words, norms, counts, norm, levels, coding, segments, out)
        return out
    parts = [_parts(words, norms, levels, coding, segments) for words, norms, _ in payloads]
    _mean(
        [words for words, *_ in parts],
        [norms for *_, norms in parts],
        counts,
        bits(levels),
        norm == "max",
        levels,
        segments,
        out,
    )
    return out
