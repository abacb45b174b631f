"""Fourier transforms of real rows: X_k = sum_j x_j e^(-2 pi i j k / d) / sqrt(d), k = 0 ... d // 2.

The transforms are torch's, with two optimizations for MKL, torch's library on x86-64:

* Padding (`padded_length`): lengths with a large prime factor are slow, so rows are padded with
  zeros to a fast length.
* A long row of even length d on the CPU is transformed as h = d / 2 complex numbers, z_j = x_2j +
  i x_2j+1, which is several times faster than the library's real transform:
      2 sqrt(d) X_k = (Z_k + conj Z_h-k) + t_k (Z_k - conj Z_h-k), t_k = -i e^(-2 pi i k / d),
  and the inverse accordingly. Since t_h-k = conj t_k, only half of the factors t_k are stored, 2
  bytes per element; they are computed in float64 and rounded to float32.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch
from torch import Tensor

from gcbench.ops.dispatch import operation, output, vector

EXACT_TO = 2**15
"""Rows up to this length are never padded: they are fast at any length."""
FLOAT_ERROR = 2.0**-20
"""A bound on the relative rounding error of a transform and its inverse in float32, and of fp16 for
elements far below the peak. The largest error observed for the former was 2^-20.8."""
ROUGH_ERROR = 2.0**-14
"""The same for lengths with a prime factor above 13; MKL has an error of 2^-15.4 at 2 * 134,861."""
PRIMES = (2, 3, 5, 7, 11, 13)
"""The prime factors of fast lengths."""
HALVES_FROM = 2**13
"""Minimum row length to transform as half as many complex numbers."""


# ---- lengths -------------------------------------------------------------------------------------


def _smooth(n: int) -> bool:
    """Return whether n, at least 1, has no prime factor outside `PRIMES`."""
    for p in PRIMES:
        while n % p == 0:
            n //= p
    return n == 1


def transform_error(d: int) -> float:
    """Return a bound on the relative rounding error of a transform of length d and its inverse."""
    return FLOAT_ERROR if d == 0 or _smooth(d) else ROUGH_ERROR


@cache
def padded_length(d: int) -> int:
    """Return the length L >= d to which a row of d elements is padded with zeros.

    L = d up to `EXACT_TO`, and if d has no prime factor above 13. Otherwise L is the smallest
    multiple of 8 that is a product of primes up to 13, including 11 or 13, because MKL is slow at
    many lengths of the form 2^a 3^b 5^c 7^e, such as 2^12 25 or 2^14. L exceeds d by at most 2.0 %
    (.4 % on average), 1.3 % (.2 %) above 1.3e5 and .73 % (.1 %) above 1e6.
    """
    if d <= EXACT_TO or _smooth(d):
        return d
    best = 0
    for p in (11, 13):
        rest = -(-d // (8 * p))
        while not _smooth(rest):
            rest += 1
        best = min(best or 8 * p * rest, 8 * p * rest)
    return best


# ---- between real and complex transforms ---------------------------------------------------------


@lru_cache(maxsize=64)
def turns(d: int) -> Tensor:
    """Return t_k for k = 0 ... d // 4, d even, complex64, on the CPU; cached, do not modify it."""
    angle = torch.arange(d // 4 + 1, dtype=torch.float64).mul_(2 * math.pi / d)
    return torch.complex(-angle.sin(), -angle.cos()).to(torch.complex64)


@operation()
def _fold(waves: Tensor, factors: Tensor, scale: float, h: int, inverse: bool, out: Tensor) -> None:
    pairs, turn = torch.view_as_real(waves), torch.view_as_real(factors)
    if inverse:
        pairs = pairs.clone()
        pairs[0, 1] = pairs[-1, 1] = 0.0
    else:
        pairs = torch.cat((pairs, pairs[:1]))
    (a, b), (c, d) = pairs[: h // 2 + 1].unbind(1), pairs.flip(0)[: h // 2 + 1].unbind(1)
    real, imag = turn[:, 0], -turn[:, 1] if inverse else turn[:, 1]
    p, q = a - c, b + d
    p, q = real * p - imag * q, real * q + imag * p
    near = torch.complex((a + c + p) * scale, (b - d + q) * scale)
    far = torch.complex((a + c - p) * scale, (q - (b - d)) * scale)
    both = torch.cat((near, far[: (h + 1) // 2].flip(0)))
    out.copy_(both[:h] if inverse else both)


def fold(
    waves: Tensor,
    factors: Tensor,
    scale: float,
    *,
    inverse: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return s ((v_k + conj v_h-k) + t_k (v_k - conj v_h-k)) for k = 0 ... h, complex64, (h + 1,).

    The step between a complex transform of length h and a real one of length 2 h. `waves`: v,
    complex64, shape (h,), with v_h = v_0; `factors`: t_k for k = 0 ... h // 2, complex64, with
    t_h-k = conj t_k; `scale`: s; `out`: the output tensor. With `inverse`, v has h + 1 numbers, the
    imaginary parts of the first and the last are ignored, conj t_k replaces t_k, and
    k = 0 ... h - 1, so the result has shape (h,).

    Raises:
        ValueError: too few numbers, or the wrong number of factors.
    """
    n = len(waves)
    h = n - 1 if inverse else n
    if h < 1:
        raise ValueError(f"{n} complex numbers: expected at least {1 + inverse}")
    waves = vector(waves, torch.complex64, n, "waves")
    factors = vector(factors, torch.complex64, h // 2 + 1, "factors")
    out = output(out, torch.complex64, h if inverse else h + 1, waves.device)
    _fold(waves, factors, scale, h, inverse, out)
    return out


# ---- transforms ----------------------------------------------------------------------------------


def by_halves(rows: int, d: int, on_cpu: bool) -> bool:
    """Return whether `rows` rows of length d are transformed as half as many complex numbers.

    True only for a single long row: the library vectorizes short or several rows.
    """
    return on_cpu and rows == 1 and d >= HALVES_FROM and d % 2 == 0


def real_forward(rows: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return X_k for k = 0 ... d // 2 of each row, complex64, shape (m, d // 2 + 1).

    `rows`: float32, shape (m, d), d at least 1. `out`: the output tensor.
    """
    m, d = rows.shape
    if not by_halves(m, d, rows.is_cpu):
        bins: Tensor = torch.fft.rfft(rows, norm="ortho", out=out)
        return bins
    # A complex view needs an even storage offset; otherwise copy the row.
    row = rows.clone() if rows.storage_offset() % 2 else rows.contiguous()
    waves = torch.fft.fft(torch.view_as_complex(row.view(-1, 2)))
    first = None if out is None else out[0]
    return fold(waves, turns(d), 0.5 / math.sqrt(d), out=first).unsqueeze(0)


def real_inverse(bins: Tensor, d: int, *, out: Tensor | None = None) -> Tensor:
    """Return the rows with these bins, float32, shape (m, d).

    `bins`: complex64, shape (m, d // 2 + 1); the imaginary part of the first, and for even d of the
    last, is ignored. `out`: the output tensor.
    """
    if not by_halves(len(bins), d, bins.is_cpu):
        rows: Tensor = torch.fft.irfft(bins, d, norm="ortho", out=out)
        return rows
    waves = fold(bins[0], turns(d), 1 / math.sqrt(d), inverse=True)
    row = torch.view_as_real(torch.fft.ifft(waves, norm="forward")).view(1, d)
    return row if out is None else out.copy_(row)
