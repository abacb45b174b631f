"""TernGrad: gradients in three levels, {-s, 0, +s}.

f(g) = max(-c sigma, min(c sigma, g)), sigma the standard deviation of the segment;  t = sign(f) b,
P(b_k = 1) = |f_k| / s, s the largest |f| of all workers;  all workers apply s * sum_i t_i / N.

Unbiased for f(g), hence for g without clipping. E||s t||^2 = s ||f||_1 exactly, so the variance is
s ||f||_1 - ||f||^2. Not contractive. A segment of equal values has sigma = 0, and eq. (21) would
clip it to zeros; it is not clipped, and s is max |g|.
With `noise="correlated"` the errors of N workers partly cancel (Suresh et al., ICML 2022,
arXiv:2203.04925; `gcbench.ops.random`): each worker has the same bytes, mean and variance, and the
mean of equal inputs has a variance of at most step^2 / (4 N^2) per element instead of up to
step^2 / (4 N); the step is s.
Wire: 2 bits per element up (nominal: log2 3 = 1.585); down the sum of N codes in ceil(log2(2N + 1))
bits (two-shot). All-reduce rounds that width up to a power of two, both ways. Sharing s takes one
float32 per segment.
Source: Wen et al., NeurIPS 2017, arXiv:1705.07878: eq. (1)-(4); clipping, eq. (21), and the shared
scale, section 3.3. The authors' code uses s = c max_i sigma_i: `scale="c-sigma"`
(test_terngrad.py::test_c_sigma_*).

>>> import gcbench, torch
>>> method = gcbench.get_compressor("terngrad", clip=0)
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> packed.payload.nbytes, packed.context.shared.tolist()
(8, [4.0])
>>> method.decompress(packed)
tensor([4., 0., 4., 0.])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import (
    Compressor,
    Context,
    Layout,
    Parts,
    Payload,
    Prepared,
    Segments,
    check_noise,
)
from gcbench.core.registry import LATER


@dataclass(frozen=True)
class TernGrad(Compressor):
    """Stochastic ternary codes; a payload of `count` workers is their sum, offset by count."""

    clip: float = 2.5  # standard deviations; 0: no clipping
    scale: str = "clipped-max"  # or "c-sigma", as in the authors' code
    share: bool = True  # use the largest scale of all workers
    granularity: str | int = "tensor"  # or "model", "column", or a group size
    noise: str = field(default="independent", metadata=LATER)  # or "correlated" among workers

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allreduce", "allgather")
    variants = (
        {},
        {"clip": 0.0},
        {"scale": "c-sigma"},
        {"share": False},
        {"granularity": 512},
        {"noise": "correlated"},
    )

    def __post_init__(self) -> None:
        if not (math.isfinite(self.clip) and self.clip >= 0):
            raise ValueError(f"clip={self.clip}: expected standard deviations, or 0 for none")
        if self.scale not in ("clipped-max", "c-sigma"):
            raise ValueError(f"scale={self.scale!r}: expected 'clipped-max' or 'c-sigma'")
        check_noise(self.noise)
        if self.scale == "c-sigma" and not self.clip:
            raise ValueError("scale='c-sigma' is clip * sigma: it needs clip > 0")

    def legal_collectives(self) -> tuple[str, ...]:
        return self.collectives if self.share else ("allgather",)  # sums need one scale

    def _scales(self, x: Tensor, segments: Segments) -> tuple[Tensor | None, Tensor]:
        """Return clipping thresholds (None: no clipping) and this worker's scales, (m,) each."""
        return ops.ternary.scales(x, segments, self.clip, at_limit=self.scale == "c-sigma")

    def prepare(self, x: Tensor, ctx: Context) -> Prepared:
        limit, scale = self._scales(x, ctx.segments)
        return Prepared(scale if self.share else x.new_empty(0), (limit, scale))

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        limit, scale = ctx.prepared or self._scales(x, ctx.segments)
        scale = ctx.shared if self.share else scale
        draws = ctx.draws(self.noise)
        words = ops.ternary.encode(x, limit, scale, ctx.segments, draws, out=ctx.part(0))
        return words if self.share else (words, scale)

    def cut(self, payload: Payload, bounds: Sequence[int]) -> list[Payload]:
        return [Payload((piece,)) for piece in ops.packing.split_words(payload.parts[0], 2, bounds)]

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        scale = ctx.shared if self.share else payload.parts[1]
        decoded = ops.ternary.mean(_words([payload]), scale, ctx.segments, out=ctx.out)
        if not self.share:
            reached = self.scale == "clipped-max"
            ops.ternary.check_scales(payload.parts[0], scale, ctx.segments, reached=reached)
        return decoded

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        if not self.share:
            return super().mean(payloads, ctx)
        return ops.ternary.mean(_words(payloads), ctx.shared, ctx.segments, out=ctx.out)

    def merge(self, payloads: Sequence[Payload], ctx: Context) -> Parts:
        return ops.ternary.merge(_words(payloads), ctx.segments.numel, out=ctx.part(0))[0]

    def summand(self, payload: Payload, ctx: Context) -> Payload:
        return Payload((ops.ternary.summand(payload.parts[0], ctx.workers, ctx.segments.numel),))

    def decode_sum(self, payload: Payload, ctx: Context) -> Tensor:
        bits, summed = ops.ternary.summand_bits(payload.count), (payload.parts[0], payload.count)
        return ops.ternary.mean([summed], ctx.shared, ctx.segments, bits=bits, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        codes = (torch.int32, ops.packing.packed_words(segments.numel, ops.ternary.bits(count)))
        return (codes,) if self.share else (codes, (torch.float32, len(segments)))


def _words(payloads: Sequence[Payload]) -> list[tuple[Tensor, int]]:
    return [(payload.parts[0], payload.count) for payload in payloads]


# ---- claims --------------------------------------------------------------------------------------


class TernGradClaims(Claims[TernGrad], of=TernGrad):
    """Unbiased for the clipped gradient; the variance is exact."""

    unbiased = True
    two_levels = True
    nominal_bits = math.log2(3)

    @property
    def gaussian_error(self) -> float | None:
        by_clip = {2.0: 0.65281, 2.5: 1.00953, 3.0: 1.39676}  # tests compute the integrals
        return None if isinstance(self.codec.granularity, int) else by_clip.get(self.codec.clip)

    def _limits(self, x: Tensor, segments: Segments) -> Tensor:
        """Return each element's threshold, float64, shape (n,); infinity: no clipping.

        It follows the equations in float64, independently of the encoder, which is tested by it.
        """
        limits = torch.full((len(segments),), math.inf, dtype=torch.float64)
        for which, start, length in segments.runs:
            if length and self.codec.clip:
                rows = x[start : start + length * (which.stop - which.start)].double()
                rows = rows.view(-1, length)
                apart = rows.amin(1) < rows.amax(1)
                sigma = rows.std(1, correction=0)
                limits[which] = torch.where(apart, self.codec.clip * sigma, math.inf)
        return limits.repeat_interleave(torch.tensor(segments.lengths, dtype=torch.int64))

    def target(self, x: Tensor, ctx: Context) -> Tensor:
        """Return x clipped at c standard deviations of its segment, unless all values are equal.

        With `scale="c-sigma"` the shared scale is the threshold.
        """
        if self.codec.scale == "c-sigma" and self.codec.share:
            return ops.statistics.clamp_(x.clone(), ctx.shared, ctx.segments)
        limits = self._limits(x, ctx.segments)
        return x.double().clamp(-limits, limits).float()

    def omega(self, segments: Segments) -> float | None:
        """Return (sqrt(d) - 1) / 2 for the longest segment of d elements; None with clipping.

        ||g||_inf ||g||_1 <= (1 + sqrt d) / 2 ||g||^2, with equality if d - 1 elements are 1 / (1 +
        sqrt d) of the largest.
        """
        return None if self.codec.clip else (math.sqrt(max(1, *segments.lengths, 1)) - 1) / 2

    def variance(self, x: Tensor, ctx: Context) -> Tensor:
        """Return s |f| - f^2, s the shared or the segment's scale.

        The latter is the largest |f|, or the threshold with `scale="c-sigma"`.
        """
        f = self.target(x, ctx).double()
        if self.codec.share:
            spread = ops.statistics.scale_(f.abs(), ctx.shared.double(), ctx.segments)
            return (spread - f * f).clamp(min=0)  # f may be s, rounded up
        scale = ops.statistics.absmax(f.float(), ctx.segments).double()
        scale = scale.repeat_interleave(torch.tensor(ctx.segments.lengths, dtype=torch.int64))
        if self.codec.scale == "c-sigma":
            limits = self._limits(x, ctx.segments)
            scale = torch.where(limits.isinf(), scale, limits)
        return (scale * f.abs() - f * f).clamp(min=0)
