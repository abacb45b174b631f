"""FFT sparsification: the largest bins of the gradient's spectrum, as range-based floats.

X = rfft(x) / sqrt(L) for a segment that is padded with zeros to L elements (`pad`, see below). Of
its B = L // 2 + 1 complex bins the K = max(1, round((1 - theta) B)) with the largest |X|^2 are
kept, of equal ones the lowest. Their real and imaginary parts are quantized to N-bit range floats
with m bits of mantissa (`gcbench.ops.rangefloat`). x' = irfft of the kept bins, without the
padding. The mean adds the workers' spectra, in the order of ranks, and is transformed back once.

Bias and bound: biased. With P the projection on the kept bins, q their quantization error and h =
2^-11 for the rounding to fp16, ||x - x'||^2 <= ||x||^2 - (||Px|| - h ||x||)^2 + (||q|| + h
||x||)^2. This is below ||x||^2, as q is at most 2^-(m+1) of a value, or the value itself if that is
below eps. Padding changes no norm, and removing it can only reduce the error. A long normal x loses
1 - rho (1 + ln(1 / rho)) of its energy, rho = 1 - theta: .5654 at theta = .85, where `topk` loses
.4425. Spectra win only where x is smooth along its index (test_fft.py::test_a_smooth_signal_*).
The codes of N = 10 bits span 16 octaves with m = 5 and 8 with m = 6; quantization loses 4^-m / 24
of the kept energy of normal input, if the octaves suffice (test_rounding_of_kept_bins).
Range: each message has its own by default, so nothing saturates. The paper estimates one range in
the first iterations and keeps it: `--set low=-0.3 --set high=0.3`, in the unit of the gradient, for
all segments and workers; `results/papers/fft_range.py` estimates it and measures what it costs. To
use it after ten steps with each message's own: low=0:null/10:-0.3, and high likewise. A value
outside is clipped to the end of the range, and one below eps / 2 becomes 0: neither error exceeds
the value.
But a residual may grow beyond any range, so the method then does not claim to contract. The range
is sent all the same, 4 bytes a segment, so that a payload with another range is refused.
Wire: a bitmap of B bits, 2K codes, one int32 a segment. At theta = .85: .5 + .15 * 10 = 2.0 bits an
element, 16x; with `bitmap="real"`, one bit for each real number as in the paper, 2.5 and 12.8x. The
paper's 21.33x (1.5 bits, the nominal ones) leaves the bitmap out. Not portable: the last bits of a
transform depend on the library.
Source: Wang et al., HPDC 2020, doi:10.1145/3369583.3392681 (arXiv:1811.08596). Its Theorem 3.5 has
theta fall to 0: --set theta=0:0.85/1000:0.
No code of the authors is public. Where the paper is silent: segments are scaled by a power of two
before fp16, which then cannot overflow (test_any_unit_*); bins are chosen by |X|^2, though the
first (of even L, the last too) counts once in the energy and the others twice
(test_the_largest_bins_*). As in the paper, the model is one segment. Libraries are slow, and MKL
sometimes off by 2^-15, at lengths with a large prime factor: a length above 32,768 is padded, by a
few tenths of a percent (`gcbench.ops.transform.padded_length`), unless `--set pad=false`.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("fft", theta=0.6)
>>> packed = method.compress(torch.tensor([4.0, 4.0, 4.0, 5.0]))
>>> packed.payload.nbytes
48
>>> method.decompress(packed).round(decimals=1)
tensor([4.2000, 4.2000, 4.2000, 4.2000])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Layout, Parts, Payload, Segments
from gcbench.core.errors import PayloadError

WIDTHS = {"complex": 1, "real": 2}
"""Bits of a bin in each kind of bitmap."""


@dataclass(frozen=True)
class FFT(Compressor):
    """The largest bins of the spectrum; parts are their bitmap, their codes and the ranges."""

    theta: float = 0.85  # share of the bins that is dropped
    code_bits: int = 10  # N, bits of a code
    mantissa: int = 5  # m, the bits of its mantissa
    granularity: str | int = "model"  # or "tensor", "column", or a group size; 4096 is fast
    half: bool = True  # round the scaled gradient to fp16 first
    bitmap: str = "complex"  # one bit a bin; or "real", one a real and one an imaginary part
    pad: bool = True  # zeros after a segment whose length transforms slowly
    low: float | None = None  # the range of the codes, below 0, in the unit of the gradient;
    high: float | None = None  # and above 0; neither: each message's own

    scratch = True
    variants = (
        {},
        {"granularity": "tensor"},
        {"granularity": 4096},
        {"bitmap": "real"},
        {"theta": 0.0},
        {"half": False, "theta": 0.5},
        {"pad": False},
        {"low": -0.5, "high": 2.0},
    )

    def __post_init__(self) -> None:
        if not 0 <= self.theta < 1:
            raise ValueError(f"theta={self.theta}: at least 0 and below 1 allowed")
        if self.bitmap not in WIDTHS:
            raise ValueError(f"bitmap={self.bitmap!r}: {', '.join(WIDTHS)} allowed")
        ops.rangefloat.check(self.code_bits, self.mantissa)
        if (self.low is None) != (self.high is None):
            raise ValueError(f"low={self.low}, high={self.high}: give both, or neither")
        if self.low is not None and not -math.inf < self.low < 0 < (self.high or 0.0) < math.inf:
            raise ValueError(
                f"low={self.low}, high={self.high}: finite numbers below and above 0 allowed"
            )
        Segments.of([(1,)], self.granularity)  # raises UsageError if it is unknown

    def _runs(self, segments: Segments) -> tuple[ops.selection.KeptRun, ...]:
        """Return the runs of the segments' bins."""
        return ops.spectrum.runs_of(segments, self.theta, self.pad)

    def _grids(self, segments: Segments) -> Tensor | None:
        """Return the grid of each nonempty segment, int32, on the CPU; None: each message's own."""
        if self.low is None or self.high is None:
            return None
        ends = torch.tensor([self.low, self.high]).clamp_(
            -ops.spectrum.FLOAT_MAX, ops.spectrum.FLOAT_MAX
        )
        grid = ops.rangefloat.grid_of(ends[0], ends[1], self.code_bits, self.mantissa)
        return grid.repeat(sum(run.rows for run in self._runs(segments) if run.length))

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        runs = self._runs(ctx.segments)
        bins, energy = ops.spectrum.forward(x, ctx.segments, half=self.half, pad=self.pad)
        kept = ops.spectrum.largest(energy, runs)
        form, grids = (
            (self.code_bits, self.mantissa, WIDTHS[self.bitmap]),
            self._grids(ctx.segments),
        )
        return ops.spectrum.pack(bins, kept, runs, *form, grids=grids)

    def _open(self, payload: Payload, segments: Segments) -> tuple[Tensor, Tensor]:
        """Return a payload's kept bins, int64, (K,), and values, float32, (K, 2)."""
        form, runs = (self.code_bits, self.mantissa, WIDTHS[self.bitmap]), self._runs(segments)
        kept, values = ops.spectrum.unpack(payload.parts, runs, *form, self.name)
        grids = self._grids(segments)
        if grids is not None and not torch.equal(payload.parts[2].cpu(), grids):
            raise PayloadError(f"a range other than low={self.low}, high={self.high}")
        first = [
            run.start + run.length * row for run in runs if run.length for row in range(run.rows)
        ]
        zeroth = torch.tensor(first, device=kept.device)  # X_0 of each segment; `kept` increases
        at = torch.searchsorted(kept, zeroth).clamp_(max=max(0, len(kept) - 1))
        if len(kept) and bool(values[at[kept[at] == zeroth], 1].any()):
            raise PayloadError("the first bin of a segment is not real")
        return kept, values

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        return self.mean([payload], ctx)

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        """Return the mean: spectra are added in the order of ranks and transformed back once."""
        opened = [self._open(payload, ctx.segments) for payload in payloads]
        total = sum(payload.count for payload in payloads)
        weights = [payload.count / total for payload in payloads]
        mean = ops.spectrum.mean(opened, weights, ops.spectrum.count_bins(self._runs(ctx.segments)))
        return ops.spectrum.inverse(mean, ctx.segments, pad=self.pad)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        return ops.spectrum.layout(self._runs(segments), self.code_bits, WIDTHS[self.bitmap])


class FFTClaims(Claims[FFT], of=FFT):
    """Contracts: the error is the energy of the dropped bins, plus the rounding of the others.

    With a given range it does not: values outside may lose any share of themselves.
    """

    portable = False

    @property
    def contractive(self) -> bool:
        return self.codec.low is None

    @property
    def nominal_bits(self) -> float:
        """Return the bits of the codes alone."""
        return (1 - self.codec.theta) * self.codec.code_bits

    @property
    def gaussian_error(self) -> float | None:
        """Return the energy dropped and lost by rounding; None if the latter is not negligible."""
        if self.codec.low is not None:
            return None
        kept = (1 - self.codec.theta) * (1 - math.log(1 - self.codec.theta))
        rounded = kept * 4.0**-self.codec.mantissa / 24  # as test_rounding_of_kept_bins measures
        narrow = (
            2**self.codec.code_bits < 12 << self.codec.mantissa
        )  # under 6 octaves a sign, eps matters, too
        return None if narrow or rounded > (1 - kept) / 50 else 1 - kept + rounded

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return the bound in the module's docstring, for the largest bins of x in float64.

        No code of the method runs: what it does is held to the equations.
        """
        total = 0.0
        for (_, start, length), run in zip(
            ctx.segments.runs, self.codec._runs(ctx.segments), strict=True
        ):
            rows = x[start : start + run.rows * length].double().view(run.rows, length)
            total += self._lost(rows, run.keep) if rows.numel() else 0.0
        return total

    def _lost(self, rows: Tensor, keep: int) -> float:
        """Return the bound for segments of one length, float64, (rows, length), `keep` bins each.

        The rounding of x moves its spectrum by h ||x|| at most, and so ||Px|| by twice that: it may
        be other bins that are the largest. One that counts once in the energy may then take the
        place of one that counts twice.
        """
        codec, length = self.codec, rows.shape[1]
        padded = ops.transform.padded_length(length) if codec.pad else length
        spectra = torch.view_as_real(torch.fft.rfft(rows, n=padded, norm="ortho"))
        squares = spectra.square().sum(2)
        weight = torch.full(squares.shape[1:], 2.0, dtype=torch.float64)
        once = [0, -1] if padded % 2 == 0 else [0]
        weight[once] = 1.0
        square = rows.square().sum(1)
        h = ops.spectrum.HALF_ERROR * codec.half + ops.transform.transform_error(padded)
        slack = h * square.sqrt()

        values, chosen = squares.topk(keep, dim=1)
        least = values[:, -1]
        kept = (weight[chosen] * values).sum(1)
        limit = least.sqrt() + 2 * slack
        twice = ((weight[chosen] == 2) & (values.sqrt() <= limit[:, None])).sum(1)
        for number, bin_ in enumerate(once):
            near = squares[:, bin_].sqrt() + 2 * slack >= least.sqrt()
            near &= (chosen != bin_ % len(weight)).all(1) & (twice > number)
            kept -= torch.where(near, 2 * least - squares[:, bin_], 0.0).clamp(min=0)
        kept = kept.clamp(min=0).sqrt()

        size = spectra.gather(1, chosen[:, :, None].expand(-1, -1, 2))
        rounded = (2.0 ** -(codec.mantissa + 1) * size).abs()
        octaves = (2 ** (codec.code_bits - 1) - 3) / 2**codec.mantissa
        largest = size.abs().amax((1, 2), keepdim=True)
        if codec.low is not None and codec.high is not None:
            largest = torch.full_like(largest, max(codec.high, -codec.low))
            rounded = torch.maximum(rounded, torch.maximum(size - codec.high, codec.low - size))
        eps = (largest * 2.0**-octaves).clamp(min=2.0**-126)  # no code is a denormal
        size = size.abs()
        q = torch.where(size < eps, size, rounded).square()
        q += torch.where((size >= eps) & (size < eps + 2 * slack[:, None, None]), eps**2, 0.0)
        error = (weight[chosen][:, :, None] * q).sum((1, 2)).sqrt()
        bound = square - (kept - 2 * slack).clamp(min=0) ** 2 + (error + slack) ** 2
        return float(bound.sum() if codec.low is not None else bound.minimum(square).sum())

    def delta(self, segments: Segments) -> float | None:
        """Return the share of energy kept of a flat spectrum, less the rounding; None if below 0.

        A flat spectrum is the worst case: K of B bins keep at least 1 - 2 (B - K) / L of it, as a
        bin counts at most twice in the energy. That is put into the bound of the module's
        docstring, where codes span at least (2^(N - 1) - 3) / 2^m octaves.
        """
        if self.codec.low is not None:
            return None
        worst = 1.0
        h = 2.0**-10 if self.codec.half else 2.0**-18
        octaves = (2 ** (self.codec.code_bits - 1) - 3) / 2**self.codec.mantissa
        for run in self.codec._runs(segments):
            if not run.length:
                continue
            dropped = 2 * (run.length - run.keep) / max(1, 2 * (run.length - 1))
            kept = math.sqrt(max(0.0, 1 - dropped))
            q = math.sqrt(4.0 ** -(self.codec.mantissa + 1) + 2 * run.keep * 4.0**-octaves)
            worst = min(worst, max(0.0, kept - h) ** 2 - (q * kept + h) ** 2)
        return worst if worst > 0 else None

    def with_error(self, alpha: float) -> FFT:
        """Return the method with theta = alpha^2: a flat spectrum has a relative error of alpha."""
        return replace(self.codec, theta=alpha**2)
