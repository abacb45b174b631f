"""Fourier transforms of real rows of any length: X_k = sum_j x_j e^(-2 pi i j k / d) / sqrt(d).

The library's real transform takes lengths with a large prime factor 3 to 15 times as long as
others, and long rows longer than its complex one takes. `own_length` says where a row on the CPU is
transformed here instead, by complex transforms:

* of even length d as h = d / 2 complex numbers, z_j = x_2j + i x_2j+1, whose transform Z gives
      sqrt(d) X_k = (Z_k + conj Z_h-k) / 2 - i e^(-2 pi i k / d) (Z_k - conj Z_h-k) / 2;
* where h (or an odd d) has a large prime factor, by Bluestein's chirp: as 2 j k = j^2 + k^2 -
  (k - j)^2, with c_j = e^(-pi i j^2 / h)
      Z_k = c_k sum_j (z_j c_j) conj c_k-j,
  a convolution that is done by transforms of a length M which the library is fast at.
  Bluestein, A linear filtering approach to the computation of discrete Fourier transform, IEEE
  Transactions on Audio and Electroacoustics 18, 1970.

Factors are computed in float64, angles reduced in integers, and rounded once: tables of 20 bytes an
element of an even length and 24 of an odd one. The tables used last are kept, up to `TABLES_MAX`
bytes in all; lengths whose tables alone are larger stay with the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from gcbench.ops.backend import op
from gcbench.ops.reference import into

TABLES_MAX = 2**29
"""Bytes of tables that are kept."""
PRIME_MAX = 2048
"""The largest prime factor with which the library's complex transform is about as fast as ours."""
HALVES_FROM = 2**17
"""The shortest row that is transformed here whatever its factors."""


class Tables(NamedTuple):
    """The factors of one length d, with N = d / 2 if it is even, else d. Not to be changed."""

    chirp: Tensor | None
    """c_j, complex64, shape (N,); None where the library transforms N numbers itself."""
    kernel: Tensor | None
    """The transform of conj c_j / M, complex64, shape (M,); None likewise."""
    factors: Tensor
    """Even d: float32, shape (4, N + 1), see `spectrum_fold`. Odd: c_k / sqrt(d), complex64, for
    each bin."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.nbytes for table in self if table is not None)


# ---- lengths -------------------------------------------------------------------------------------


@cache
def largest_prime(n: int) -> int:
    """Return the largest prime factor of n, 1 for 1."""
    largest, p = 1, 2
    while p * p <= n:
        while n % p == 0:
            largest, n = p, n // p
        p += 1
    return max(largest, n)


@cache
def fast_length(n: int) -> int:
    """Return the least 108 * 2^a 3^b 5^c 7^e that is at least n.

    MKL takes 2 to 4 ns an element for them, but 16 for 2^a, and for 2^a times 3, 9, 25 or 49.
    """
    least = -(-n // 108)
    best = 1 << (least - 1).bit_length()
    sevens = 1
    while sevens < best:
        fives = sevens
        while fives < best:
            threes = fives
            while threes < best:
                rest = -(-least // threes)
                best = min(best, threes << (rest - 1).bit_length())
                threes *= 3
            fives *= 5
        sevens *= 7
    return 108 * best


def _sizes(d: int) -> tuple[int, int, bool]:
    """Return N, the length M of its transform, and whether that takes a chirp."""
    n = d if d % 2 else d // 2
    if largest_prime(n) <= PRIME_MAX:
        return n, n, False
    return n, fast_length(n + d // 2), True


def table_bytes(d: int) -> int:
    """Return the size of the tables of a length."""
    n, size, chirped = _sizes(d)
    return 8 * (n + size) * chirped + (8 * (d // 2 + 1) if d % 2 else 16 * (n + 1))


def own_length(rows: int, d: int) -> bool:
    """Return whether that many rows of length d are transformed here, and not by the library.

    One row: the library works on 16 of them at once, and takes as long for one.
    """
    wanted = rows == 1 and (d >= HALVES_FROM or _sizes(d)[2])
    return wanted and table_bytes(d) <= TABLES_MAX


# ---- tables --------------------------------------------------------------------------------------


def _roots(exponents: Tensor, n: int) -> Tensor:
    """Return e^(-pi i q / n) for integers q, complex128."""
    angle = (exponents % (2 * n)).double().mul_(-math.pi / n)
    return torch.complex(angle.cos(), angle.sin())


def build_tables(d: int) -> Tables:
    """Return the tables of a length."""
    n, size, chirped = _sizes(d)
    chirp = kernel = None
    wide = torch.ones(n, dtype=torch.complex128)
    if chirped:
        index = torch.arange(n)
        wide = _roots(index * index, n)
        outputs = (d + 1) // 2
        around = torch.zeros(size, dtype=torch.complex128)  # conj c_t for t from 1 - N to outputs
        around[:outputs] = wide[:outputs].conj()
        around[size - n + 1 :] = wide[1:].flip(0).conj()
        chirp, kernel = (t.to(torch.complex64) for t in (wide, torch.fft.fft(around) / size))
    if d % 2:
        return Tables(chirp, kernel, (wide[: d // 2 + 1] / math.sqrt(d)).to(torch.complex64))
    around = torch.cat((wide, wide[:1]))  # Z has the period h
    turn = 1j * _roots(torch.arange(n + 1), n)
    own, other = around * (1 - turn), around.flip(0).conj() * (1 + turn)
    factors = torch.stack((own.real, own.imag, other.real, other.imag)) / (2 * math.sqrt(d))
    return Tables(chirp, kernel, factors.float())


class Kept:
    """Tables by length; those used last, up to `TABLES_MAX` bytes."""

    def __init__(self, build: Callable[[int], Tables]) -> None:
        self._build = build
        self._known: dict[int, Tables] = {}
        self._lock = Lock()

    def __call__(self, d: int) -> Tables:
        """Return the tables of length d."""
        with self._lock:  # one worker's thread builds, and others wait for it
            found = self._known.pop(d, None) or self._build(d)
            self._known[d] = found
            while sum(tables.nbytes for tables in self._known.values()) > TABLES_MAX:
                del self._known[next(iter(self._known))]
            return found


tables = Kept(build_tables)


# ---- transforms ----------------------------------------------------------------------------------


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Return x y, complex64, each part a sum of two products that are rounded apart."""
    return torch.complex(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


def _padded(x: Tensor, width: int) -> Tensor:
    out = x.new_zeros(width)
    out[: len(x)] = x
    return out


@op
def spectrum_pad(x: Tensor, chirp: Tensor, width: int, *, out: Tensor | None = None) -> Tensor:
    """Return x times the chirp, complex64, shape (k,) each, then zeros: shape (width,)."""
    return into(out, _padded(_product(x, chirp), width))


@op
def spectrum_cut(
    waves: Tensor, chirp: Tensor, *, conjugate: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return the first k of `waves` times the chirp, complex64, shape (k,), or their conjugates.

    `out`: where to write, which may be the first k of `waves`.
    """
    product = _product(waves[: len(chirp)], chirp)
    return into(out, torch.complex(product.real, -product.imag) if conjugate else product)


@op
def spectrum_fold(waves: Tensor, factors: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a_k v_k + b_k conj v_h-k for k = 0 ... h, complex64, shape (h + 1,); v_h is v_0.

    `waves`: v, complex64, at least h of them; `factors`: float32, shape (4, h + 1): real and
    imaginary part of a, then of b.
    """
    around = torch.cat((waves[: factors.shape[1] - 1], waves[:1]))
    back, (ar, ai, br, bi) = around.flip(0), factors
    real = (ar * around.real - ai * around.imag) + (br * back.real + bi * back.imag)
    imag = (ar * around.imag + ai * around.real) + (bi * back.real - br * back.imag)
    return into(out, torch.complex(real, imag))


@op
def spectrum_unfold(
    bins: Tensor, factors: Tensor, width: int, *, out: Tensor | None = None
) -> Tensor:
    """Return 2 (a_k conj X_k + conj b_h-k X_h-k) for k < h, then zeros: complex64, (width,).

    Twice the adjoint of `spectrum_fold`, conjugate. `bins`: X, complex64, shape (h + 1,); the first
    and the last count as real. `factors` as there.
    """
    pairs = torch.view_as_real(bins).clone()
    pairs[0, 1] = pairs[-1, 1] = 0.0
    back, (ar, ai, br, bi) = pairs.flip(0), factors
    br, bi = br.flip(0), bi.flip(0)
    (xr, xi), (yr, yi) = pairs.unbind(1), back.unbind(1)
    real = ((ar * xr + ai * xi) + (br * yr + bi * yi)) * 2
    imag = ((ai * xr - ar * xi) + (br * yi - bi * yr)) * 2
    return into(out, _padded(torch.complex(real, imag)[:-1], width))


def _forward(x: Tensor) -> Tensor:
    """Return the bins of one row, complex64, shape (d // 2 + 1,)."""
    chirp, kernel, factors = tables(len(x))
    odd = len(x) % 2
    if odd:
        z = torch.complex(x, torch.zeros_like(x))
    else:
        # Where an odd number of elements lies before it, the row has to be moved.
        x = x.clone() if x.storage_offset() % 2 else x.contiguous()
        z = torch.view_as_complex(x.view(-1, 2))
    if chirp is None or kernel is None:
        waves = torch.fft.fft(z)
    else:
        waves = torch.fft.fft(spectrum_pad(z, chirp, len(kernel))).mul_(kernel)
        waves = torch.fft.ifft(waves, norm="forward")
    if odd:
        return spectrum_cut(waves, factors, out=waves[: len(factors)])
    return spectrum_fold(waves, factors)


def _inverse(bins: Tensor, d: int) -> Tensor:
    """Return the row of length d with these bins, float32, shape (d,)."""
    chirp, kernel, factors = tables(d)
    width = (d if d % 2 else d // 2) if kernel is None else len(kernel)
    if d % 2:
        twice = factors * 2  # as all but the first stand for their conjugates, too
        twice[0] /= 2
        z = spectrum_pad(torch.conj_physical(bins), twice, width)
    else:
        z = spectrum_unfold(bins, factors, width)
    # The conjugate row is the transform of conjugate bins.
    if chirp is None or kernel is None:
        waves = torch.fft.fft(z)
        waves = torch.conj_physical_(waves)
    else:
        # Backwards in time, as here the short side of an odd length's kernel is that of the bins.
        waves = torch.fft.fft(torch.fft.ifft(z, norm="forward").mul_(kernel))
        waves = spectrum_cut(waves, chirp, conjugate=True, out=waves[: len(chirp)])
    pairs = torch.view_as_real(waves)
    return pairs[:, 0].contiguous() if d % 2 else pairs.view(-1)


def real_forward(rows: Tensor) -> Tensor:
    """Return X_k for k = 0 ... d // 2 of each row, complex64, shape (m, d // 2 + 1).

    `rows`: float32, shape (m, d), d at least 1.
    """
    if rows.is_cpu and own_length(*rows.shape):
        return _forward(rows[0]).unsqueeze(0)
    bins: Tensor = torch.fft.rfft(rows, norm="ortho")
    return bins


def real_inverse(bins: Tensor, d: int) -> Tensor:
    """Return the rows with these bins, float32, shape (m, d).

    `bins`: complex64, shape (m, d // 2 + 1). The first and, of an even length, the last count as
    real.
    """
    if bins.is_cpu and own_length(len(bins), d):
        return _inverse(bins[0], d).unsqueeze(0)
    rows: Tensor = torch.fft.irfft(bins, d, norm="ortho")
    return rows
