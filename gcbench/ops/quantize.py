"""Stochastic rounding to evenly spaced levels of each segment's norm (QSGD), in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.backend import op
from gcbench.ops.bitstream import (
    omega_dense_read,
    omega_dense_write,
    omega_sparse_read,
    omega_sparse_write,
)
from gcbench.ops.reference import (
    BLOCK,
    TINY,
    draws24,
    into,
    mean_onto,
    pack,
    packed_words,
    scale_,
    segment_absmax,
    segment_moments,
    unpack,
)

LEVEL_NORMS = ("max", "2")
LEVEL_CODINGS = ("fixed", "omega-dense", "omega-sparse")
FLOAT_MAX = torch.finfo(torch.float32).max

BAD_NORMS = "norms must be finite and not negative"
BAD_CODES = "a segment's codes are too large or too small for its norm"


def level_bits(levels: int) -> int:
    """Return the bits of the 2 levels + 1 symbols of the fixed coding."""
    return (2 * levels).bit_length()


@op
def level_norms(x: Tensor, segments: Segments, norm: str, levels: int) -> Tensor:
    """Return the norms ("max" or "2") of the segments, float32, shape (m,), never below max |x|.

    0 where a step, norm / levels, would be below TINY; of finite elements at most the largest
    float32.
    """
    if norm == "max":
        norms = segment_absmax(x, segments)
    else:
        # Every rounding here keeps the order, so the root is never below the largest element.
        roots = segment_moments(x, segments)[1].sqrt_()
        norms = torch.where(roots.isinf(), roots, roots.clamp(max=FLOAT_MAX)).float()
    return torch.where(norms < TINY * levels, 0.0, norms)


def _levels(codes: Tensor, divisor: Tensor, norms: Tensor) -> Tensor:
    """Return what codes stand for: (code / levels) * norm, each operation rounded to float32.

    The highest code stands for the norm exactly, and code k of max-norm k = levels for k. The
    divisor is a tensor because CUDA multiplies by the reciprocal of a plain number.
    """
    return codes.div(divisor).mul_(norms)


@op
def level_codes(
    x: Tensor,
    norms: Tensor,
    levels: int,
    segments: Segments,
    key: Key,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return codes in [-levels, levels], int32, shape (n,).

    With l the level at or below |x| and g the distance from there to the next one, the code is
    that of the next one iff (u + 1/2) * g / 2^24 <= |x| - l, u uniform on [0, 2^24): the mean of
    the decoded value is x to within 2^-23 g. For one level this is the ternary codes' rule.

    `x`: float32, shape (n,); `norms`: float32, shape (m,), at least max |x| of the segment, and at
    least TINY * levels, so that no product is denormal; or 0, and all |x| are below that: zeros.
    `levels`: 1 to 2^15 - 1. In a segment whose norm is not finite all codes are zero.
    """
    codes = torch.empty(x.numel(), dtype=torch.int32, device=x.device)
    divisor = x.new_tensor(float(levels))
    safe = torch.where(norms == 0, 1.0, norms)  # next to 1 such values are never rounded up
    finite = bool(norms.isfinite().all())
    for start in range(0, x.numel(), BLOCK):
        stop = min(start + BLOCK, x.numel())
        part, which = segments.shard(start, stop)
        norm = scale_(x.new_ones(stop - start), safe[which.start : which.stop], part)
        size = x[start:stop].abs()
        # Rounding errors stay far below the 2^-20 that is taken off: one level too low at most.
        code = (size / norm).mul_(levels * (1 - 2.0**-20)).floor_()
        code += _levels(code + 1, divisor, norm) <= size
        below = _levels(code, divisor, norm)
        gap = _levels(code + 1, divisor, norm).sub_(below)
        place = key._replace(offset=key.offset + start)
        draws = draws24(place, stop - start, x.device).float().add_(0.5).mul_(2.0**-24)
        code += draws.mul_(gap) <= size.sub_(below)
        if not finite:
            code.masked_fill_(~norm.isfinite(), 0.0)
        codes[start:stop] = code.copysign_(x[start:stop])
    return into(out, codes)


def level_values(codes: Tensor, norms: Tensor, levels: int, segments: Segments) -> Tensor:
    """Return (code / levels) * norm, float32, shape (n,).

    `codes`: integers, shape (n,); `norms`: float32, shape (m,).
    """
    divisor = torch.tensor(float(levels), device=codes.device)
    return scale_(codes.float().div_(divisor), norms, segments)


def level_variance(x: Tensor, norms: Tensor, levels: int, segments: Segments) -> Tensor:
    """Return the variance of each decoded element, (norm / levels)^2 p (1 - p), float64, (n,).

    p is the fractional part of |x| levels / norm; 0 where the norm is 0.
    """
    norm = scale_(x.new_ones(x.numel(), dtype=torch.float64), norms.double(), segments)
    p = (x.double().abs() * levels / norm.clamp(min=TINY)).frac_()
    return torch.where(norm == 0, 0.0, (norm / levels).square_() * p * (1 - p))


def level_pack(codes: Tensor, levels: int, coding: str) -> Tensor:
    """Return the int32 words of codes in [-levels, levels], shape (n,).

    "fixed": code + levels in `level_bits` bits; "omega-dense", "omega-sparse": see `bitstream`.
    """
    if coding == "fixed":
        return pack(codes + levels, level_bits(levels))
    return (omega_dense_write if coding == "omega-dense" else omega_sparse_write)(codes, levels)


def check_norms(norms: Tensor, m: int) -> None:
    """Raise PayloadError for norms that are not float32, (m,)."""
    if norms.dtype is not torch.float32 or norms.shape != (m,):
        raise PayloadError(f"norms of {norms.dtype}, {tuple(norms.shape)}: {m} float32")


def check_words(words: Tensor, norms: Tensor, n: int, bits: int, m: int) -> None:
    """Raise PayloadError for norms, or words of n codes, of another dtype or shape."""
    check_norms(norms, m)
    numel = packed_words(n, bits)
    if words.dtype is not torch.int32 or words.shape != (numel,):
        raise PayloadError(
            f"words of {words.dtype}, {tuple(words.shape)}: {numel} int32 for {n} codes"
        )


def level_unpack(
    words: Tensor, norms: Tensor, norm: str, levels: int, coding: str, segments: Segments
) -> Tensor:
    """Return the codes in a payload's words, int32, shape (n,), and check that they fit its norms.

    Raises:
        PayloadError: these are no words of codes in [-levels, levels]; the norms are not as
            `level_norms` gives them; a segment of norm 0 has a code that is not; or a segment does
            not reach its own largest magnitude, which norm="max" is.
    """
    check_norms(norms, len(segments))
    if not (((norms == 0) | (norms >= TINY * levels)) & norms.isfinite()).all():
        raise PayloadError(BAD_NORMS)
    n = segments.numel
    if coding == "fixed":
        codes = unpack(words, level_bits(levels), n).sub_(levels)
    else:
        codes = (omega_dense_read if coding == "omega-dense" else omega_sparse_read)(
            words, n, levels
        )
    tops = segment_absmax(codes.float(), segments)
    most = levels * (norms > 0)
    if (tops != most if norm == "max" else tops > most).any():
        raise PayloadError(BAD_CODES)
    return codes


@op
def level_encode(
    x: Tensor,
    norms: Tensor,
    levels: int,
    coding: str,
    segments: Segments,
    key: Key,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the int32 words of x's codes: `level_codes`, then `level_pack`.

    `out`: where to write them, of that length, which depends on x unless the coding is "fixed".
    """
    return into(out, level_pack(level_codes(x, norms, levels, segments, key), levels, coding))


@op
def level_decode(
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
    """Return what words stand for, float32, shape (n,); with `onto` that plus `count` times it.

    `level_unpack`, then `level_values`. `out`: where to write, which may be `onto`; after an error
    what it holds is not defined.

    Raises:
        PayloadError: see `level_unpack`.
    """
    codes = level_unpack(words, norms, norm, levels, coding, segments)
    values = level_values(codes, norms, levels, segments)
    return into(out, values if onto is None else onto + values * count)


@op
def level_mean(
    payloads: Sequence[tuple[Tensor, Tensor, int]],
    norm: str,
    levels: int,
    coding: str,
    segments: Segments,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the mean of all workers, float32, shape (n,): see `mean_onto`.

    `payloads`: words and norms, as `level_decode` takes them, and how many workers' mean they are.
    `out`: where to write.

    Raises:
        PayloadError: see `level_unpack`.
    """
    return into(out, one_by_one(level_decode, payloads, norm, levels, coding, segments))


def one_by_one(
    decode: Callable[..., Tensor], payloads: Sequence[tuple[Tensor, Tensor, int]], *code: object
) -> Tensor:
    """Return `level_mean` by `decode`, a `level_decode`; `code` is what this takes after norms."""

    def onto(i: int, total: Tensor | None) -> Tensor:
        words, norms, count = payloads[i]
        return decode(words, norms, *code, onto=total, count=count, out=total)

    return mean_onto(onto, [count for *_, count in payloads])
