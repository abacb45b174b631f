"""FFT sparsification: the largest bins of the gradient's spectrum, as range-based floats.

X = rfft(x) / sqrt(L) for a segment padded with zeros to L elements (`pad`, see below). Of its
B = L // 2 + 1 complex bins the K = max(1, round((1 - theta) B)) with the largest |X|^2 are kept,
ties by lowest index. Their real and imaginary parts are quantized to N-bit range floats with m bits
of mantissa (`gcbench.ops.rangefloat`). x' = irfft of the kept bins, without the padding. The mean
adds the workers' spectra in rank order and is transformed back once.

Biased. With P the projection on the kept bins, q their quantization error and h = 2^-11 for the
rounding to fp16, ||x - x'||^2 <= ||x||^2 - (||Px|| - h ||x||)^2 + (||q|| + h ||x||)^2. This is
below ||x||^2, as q is at most 2^-(m+1) of a value, or the value itself below eps. Padding does not
change norms, and removing it can only reduce the error. A long normal x loses
1 - rho (1 + ln(1 / rho)) of its energy, rho = 1 - theta: .5654 at theta = .85, where `topk` loses
.4425. Spectra are better only if x is smooth along its index (test_fft.py::test_a_smooth_signal_*).
The codes of N = 10 bits span 16 octaves with m = 5 and 8 with m = 6; quantization loses 4^-m / 24
of the kept energy of normal input, if the octaves suffice (test_rounding_of_kept_bins).
Range: by default each message has its range, so values do not saturate unless the spectrum exceeds
float32's maximum. The paper estimates one range in the first iterations and keeps it: `--set
low=-0.3 --set high=0.3`, in the unit of the gradient, for all segments and workers;
`results/papers/fft_range.py` estimates it and measures its cost. To use it after ten steps with
per-message ranges: low=0:null/10:-0.3, and high likewise. A value outside is clipped to the end of
the range, and one below eps / 2 becomes 0: neither error exceeds the value. But a residual may grow
beyond any range, so the method then does not claim to be contractive. The range is always sent, 4
bytes per segment, so that a payload with another range is refused.
Wire: a bitmap of B bits, 2K codes, one int32 per segment. At theta = .85: .5 + .15 * 10 = 2.0 bits
per element, 16x; with `bitmap="real"`, one bit per real number as in the paper, 2.5 and 12.8x. The
paper's 21.33x (1.5 bits, the nominal bits) omits the bitmap. Not portable: the last bits of a
transform depend on the library.
Source: Wang et al., HPDC 2020, doi:10.1145/3369583.3392681 (arXiv:1811.08596). In its Theorem 3.5
theta decreases to 0: --set theta=0:0.85/1000:0.
The authors' code is not public. Choices that the paper leaves open: segments are scaled by a power
of two before fp16, which then cannot overflow (test_any_unit_*); bins are selected by |X|^2, though
the first (and for even L the last) counts once in the energy and the others twice
(test_the_largest_bins_*). As in the paper, the model is one segment. Libraries are slow, and MKL
has errors of up to 2^-15, at lengths with a large prime factor: lengths above 32,768 are padded by
a few tenths of a percent (`gcbench.ops.transform.padded_length`), unless `--set pad=false`.

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
"""Bits per bin in each kind of bitmap."""


@dataclass(frozen=True)
class FFT(Compressor):
    """The largest bins of the spectrum; parts are their bitmap, their codes and the ranges."""

    theta: float = 0.85  # fraction of the bins to drop
    code_bits: int = 10  # N, bits per code
    mantissa: int = 5  # m, the bits of its mantissa
    granularity: str | int = "model"  # or "tensor", "column", or a group size; 4096 is fast
    half: bool = True  # round the scaled gradient to fp16 first
    bitmap: str = "complex"  # one bit per bin; or "real", one per real and per imaginary part
    pad: bool = True  # pad segments whose length transforms slowly
    low: float | None = None  # lower end of the range, below 0, in the unit of the gradient
    high: float | None = None  # upper end, above 0; both None: a range per message

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
            raise ValueError(f"theta={self.theta}: expected at least 0 and below 1")
        if self.bitmap not in WIDTHS:
            raise ValueError(f"bitmap={self.bitmap!r}: expected {' or '.join(WIDTHS)}")
        ops.rangefloat.check(self.code_bits, self.mantissa)
        if (self.low is None) != (self.high is None):
            raise ValueError(f"low={self.low}, high={self.high}: give both, or neither")
        if self.low is not None and not -math.inf < self.low < 0 < (self.high or 0.0) < math.inf:
            raise ValueError(
                f"low={self.low}, high={self.high}: expected finite numbers below and above 0"
            )
        Segments.of([(1,)], self.granularity)  # raises UsageError if it is unknown

    def _runs(self, segments: Segments) -> tuple[ops.selection.KeptRun, ...]:
        """Return the runs of the segments' bins."""
        return ops.spectrum.runs_of(segments, self.theta, self.pad)

    def _grids(self, segments: Segments) -> Tensor | None:
        """Return the grid of each nonempty segment, int32, on the CPU; None: one per message."""
        if self.low is None or self.high is None:
            return None
        ends = torch.tensor([self.low, self.high], dtype=torch.float32).clamp_(
            -ops.spectrum.FLOAT_MAX, ops.spectrum.FLOAT_MAX
        )
        grid = ops.rangefloat.grid_of(ends[0], ends[1], self.code_bits, self.mantissa)
        return grid.repeat(sum(run.rows for run in self._runs(segments) if run.length))

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        runs = self._runs(ctx.segments)
        bins, energy = ops.spectrum.forward(x, ctx.segments, half=self.half, pad=self.pad)
        selected = ops.spectrum.largest(energy, runs)
        form, grids = (
            (self.code_bits, self.mantissa, WIDTHS[self.bitmap]),
            self._grids(ctx.segments),
        )
        return ops.spectrum.pack(bins, selected, runs, *form, grids=grids)

    def _open(self, payload: Payload, segments: Segments) -> tuple[Tensor, Tensor]:
        """Decode a payload to kept bins, int64, (K,), and values, float32, (K, 2)."""
        form, runs = (self.code_bits, self.mantissa, WIDTHS[self.bitmap]), self._runs(segments)
        selected, values = ops.spectrum.unpack(payload.parts, runs, *form, self.name)
        grids = self._grids(segments)
        if grids is not None and not torch.equal(payload.parts[2].cpu(), grids):
            raise PayloadError(f"the range differs from low={self.low}, high={self.high}")
        first = [
            run.start + run.length * row for run in runs if run.length for row in range(run.rows)
        ]
        zeroth = torch.tensor(
            first, device=selected.device
        )  # X_0 of each segment; `selected` increases
        at = torch.searchsorted(selected, zeroth).clamp_(max=max(0, len(selected) - 1))
        if len(selected) and bool(values[at[selected[at] == zeroth], 1].any()):
            raise PayloadError("the first bin of a segment is not real")
        return selected, values

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        return self.mean([payload], ctx)

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        """Return the mean: add spectra in rank order and transform them back once."""
        opened = [self._open(payload, ctx.segments) for payload in payloads]
        total = sum(payload.count for payload in payloads)
        weights = [payload.count / total for payload in payloads]
        mean = ops.spectrum.mean(opened, weights, ops.spectrum.count_bins(self._runs(ctx.segments)))
        return ops.spectrum.inverse(mean, ctx.segments, pad=self.pad)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        return ops.spectrum.layout(self._runs(segments), self.code_bits, WIDTHS[self.bitmap])


class FFTClaims(Claims[FFT], of=FFT):
    """Contractive: the error is the energy of the dropped bins, plus the rounding of the others.

    Not so with a fixed range, because the error of values outside it is not bounded.
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
        """Return the energy lost by dropping and rounding; None if rounding is not negligible."""
        if self.codec.low is not None:
            return None
        energy = (1 - self.codec.theta) * (1 - math.log(1 - self.codec.theta))
        rounded = energy * 4.0**-self.codec.mantissa / 24  # as test_rounding_of_kept_bins measures
        # With less than 6 octaves per sign, eps is not negligible.
        narrow = 2**self.codec.code_bits < 12 << self.codec.mantissa
        return None if narrow or rounded > (1 - energy) / 50 else 1 - energy + rounded

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return the bound of the module's docstring for the largest bins of x, in float64.

        It follows the equations and does not run the method's code.
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

        Rounding x changes its spectrum by h ||x|| at most, and ||Px|| by twice that, because other
        bins may be the largest. A bin that counts once in the energy may then replace one that
        counts twice.
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
        captured = (weight[chosen] * values).sum(1)
        limit = least.sqrt() + 2 * slack
        twice = ((weight[chosen] == 2) & (values.sqrt() <= limit[:, None])).sum(1)
        for number, bin_ in enumerate(once):
            near = squares[:, bin_].sqrt() + 2 * slack >= least.sqrt()
            near &= (chosen != bin_ % len(weight)).all(1) & (twice > number)
            captured -= torch.where(near, 2 * least - squares[:, bin_], 0.0).clamp(min=0)
        captured = captured.clamp(min=0).sqrt()

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
        bound = square - (captured - 2 * slack).clamp(min=0) ** 2 + (error + slack) ** 2
        bound = torch.where(
            rows.abs().amax(1) < ops.statistics.TINY, square, bound
        )  # sent as zeros
        return float(bound.sum() if codec.low is not None else bound.minimum(square).sum())

    def delta(self, segments: Segments) -> float | None:
        """Return the energy kept of a flat spectrum, less rounding; None if below 0.

        A flat spectrum is the worst case: K of B bins keep at least 1 - 2 (B - K) / L of it, as a
        bin counts at most twice in the energy. The bound of the module's docstring then holds with
        codes that span at least (2^(N - 1) - 3) / 2^m octaves.
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
            share = math.sqrt(max(0.0, 1 - dropped))
            q = math.sqrt(4.0 ** -(self.codec.mantissa + 1) + 2 * run.keep * 4.0**-octaves)
            worst = min(worst, max(0.0, share - h) ** 2 - (q * share + h) ** 2)
        return worst if worst > 0 else None

    def with_error(self, alpha: float) -> FFT:
        """Return the method with theta = alpha^2: a flat spectrum has a relative error of alpha."""
        return replace(self.codec, theta=alpha**2)
