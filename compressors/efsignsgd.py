"""EF-signSGD: the sign times the mean magnitude, with error feedback.

p = gradient + residual;  C(p) = (||p||_1 / d) sign(p) for a segment of d elements, sign(0) = +1;
new residual = p - C(p);  every worker applies mean_i C(p_i).

Biased; ||C(p) - p||^2 = (1 - phi(p)) ||p||^2 exactly, with the density phi(p) =
||p||_1^2 / (d ||p||^2), from 1/d (one nonzero) to 1 (constant magnitude); 2/pi for long normal
segments. The residual satisfies E||e||^2 <= 4 (1 - delta) sigma^2 / delta^2 if E||g||^2 <= sigma^2
and phi >= delta, so the iterates stay close to those of SGD.
Wire: 1 bit per element and one float32 per segment. The paper uses all-gather: every worker decodes
all payloads. In a two-shot exchange the owner encodes the mean again, with another residual, and
down costs as much as up.
Source: Karimireddy et al., ICML 2019, arXiv:1901.09847, algorithm 1 (EF-SIGNSGD), lemma 3, and
theorem II.
The residual has units of the gradient and is rescaled when the learning rate changes; the learning
rate multiplies the mean. The updates equal the paper's, whose p is lr g + e, from the first step on
(test_signsgd.py::test_ef_first_step_has_the_learning_rate_of_all). The theory assumes one worker.
The authors' code has one scale per tensor, the default here; more scales increase phi.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("efsignsgd")
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> packed.payload.nbytes
8
>>> method.decompress(packed)
tensor([ 2., -2.,  2., -2.])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Layout, Parts, Payload, Segments


@dataclass(frozen=True)
class EFSignSGD(Compressor):
    """Signs scaled by the mean magnitude of their segment; parts are the bits and the scales."""

    granularity: str | int = "tensor"  # or "column", "model", or a group size

    collectives: ClassVar[tuple[str, ...]] = ("allgather", "twoshot")
    memory: ClassVar[str] = "residual"
    variants = ({}, {"granularity": 512})

    def __post_init__(self) -> None:
        Segments.of([(1,)], self.granularity)  # raises UsageError if it is unknown

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        return ops.sign.scaled_encode(x, ctx.segments, out=ctx.parts)

    def encode_feedback(self, x: Tensor, residual: Tensor, ctx: Context) -> Parts:
        words, scale, _ = ops.sign.scaled_feedback(
            x, residual, ctx.segments, self.name, lost=residual, out=ctx.parts
        )
        return words, scale

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        words, scale = payload.parts
        return ops.sign.scaled_decode(words, scale, ctx.segments, self.name, out=ctx.out)

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        parts = [(payload.parts[0], payload.parts[1:], payload.count) for payload in payloads]
        return ops.sign.mean(parts, ctx.segments, self.name, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        words = ops.packing.packed_words(segments.numel, 1)
        return ((torch.int32, words), (torch.float32, len(segments)))


class EFSignSGDClaims(Claims[EFSignSGD], of=EFSignSGD):
    """Contractive: the relative squared error is 1 - phi, phi the density of the segment."""

    contractive = True
    exact_for = ("signs",)
    nominal_bits = 1.0
    gaussian_error = 1 - 2 / math.pi

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return sum (1 - phi) ||x||^2 over the segments, the exact error up to rounding."""
        total, square = ops.statistics.moments(x.abs(), ctx.segments)
        count = torch.tensor(ctx.segments.lengths, dtype=torch.float64, device=x.device)
        return ops.sign.mean_error(ops.sign.class_means(count, total), count, total, square)

    def delta(self, segments: Segments) -> float:
        """Return the minimum density, 1/d of the longest segment, less rounding."""
        return (1 - 2.0**-18) / max(1, *segments.lengths, 1)
