"""TernGrad: gradients in three levels, {-s, 0, +s}.

f(g) = max(-c sigma, min(c sigma, g)), sigma the standard deviation of the segment;
s = max over workers and elements of |f(g)|;  t_k = sign(f_k) b_k,  P(b_k = 1) = |f_k| / s;
every worker applies s * sum_i t_i / N.

Bias and variance: unbiased for f(g), hence for g without clipping; E||s t||^2 = s ||f||_1 exactly,
so the variance is s ||f||_1 - ||f||^2. Not contractive: no error feedback.
Wire: up 2 bits an element (log2 3 = 1.585 are the nominal ones); down the sum of N workers' codes
in ceil(log2(2N + 1)) bits (two-shot), or fields of the next power of two both ways (all-reduce);
one float32 a segment for the agreement on s. With `share=False` each payload carries its scales.
Source: Wen et al., NeurIPS 2017, arXiv:1705.07878: ternarizing eq. (3)-(5), clipping eq. (12),
scaler sharing and the server's integer sum section 3.3.
The authors' code differs from the paper: `scale="c-sigma"` is its rule, s = c max_i sigma_i on the
unclipped gradient (tests/test_terngrad.py::test_c_sigma_*). It stores ternary values as floats and
saves no bytes; here they are packed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.compressor import Compressor, Key, Layout, Payload, Segments
from gcbench.errors import PayloadError

FLOAT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class TernGrad(Compressor):
    """Stochastic ternary quantization with clipping and scaler sharing.

    A payload of `count` workers holds the sum of their codes, offset by count, and with
    `share=False` the worker's scales.
    """

    clip: float = 2.5  # standard deviations; 0 switches clipping off
    scale: str = "clipped-max"  # or "c-sigma", the rule of the authors' code
    share: bool = True  # agree on the largest scale of all workers first
    granularity: str | int = "tensor"  # or "model", "column", or a group size

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allreduce", "allgather")
    unbiased = True
    requantizes = False
    exact_for = ("ternary",)
    variants = ({}, {"clip": 0.0}, {"scale": "c-sigma"}, {"share": False}, {"granularity": 512})

    def __post_init__(self) -> None:
        if not (math.isfinite(self.clip) and self.clip >= 0):
            raise ValueError(f"clip={self.clip}: a number of standard deviations, 0 for none")
        if self.scale not in ("clipped-max", "c-sigma"):
            raise ValueError(f"scale={self.scale!r}: 'clipped-max' or 'c-sigma' allowed")
        if self.scale == "c-sigma" and self.clip == 0:
            raise ValueError("scale='c-sigma' is clip * sigma: it needs clip > 0")

    def legal_collectives(self) -> tuple[str, ...]:
        """Return the collectives; codes of different scales cannot be added as integers."""
        return self.collectives if self.share else ("allgather",)

    def nominal_bits(self) -> float:  # noqa: D102
        return math.log2(3)

    def _limit(self, x: Tensor, segments: Segments) -> Tensor | None:
        """Return the clipping threshold c sigma of each segment, shape (m,), or None."""
        if not self.clip:
            return None
        return ops.segment_std(x, segments).mul_(self.clip).clamp_(max=FLOAT_MAX)

    def _scale(self, x: Tensor, segments: Segments, limit: Tensor | None) -> Tensor:
        """Return this worker's own scale of each segment, shape (m,)."""
        if limit is None:
            return ops.segment_absmax(x, segments)
        if self.scale == "c-sigma":
            return limit
        return torch.minimum(ops.segment_absmax(x, segments), limit)

    def target(self, x: Tensor, segments: Segments, shared: Tensor) -> Tensor:
        """Return f(x): clipped at c sigma, or at the scale in force for scale="c-sigma"."""
        limit = self._limit(x, segments)
        if limit is None:
            return x
        if self.scale == "c-sigma" and self.share:
            limit = shared
        return ops.clamp_(x.clone(), limit, segments)

    def statistic(self, x: Tensor, segments: Segments) -> Tensor:
        """Return the own scales, shape (m,), to be agreed on; empty with `share=False`."""
        if not self.share:
            return x.new_empty(0)
        return self._scale(x, segments, self._limit(x, segments))

    def encode(self, x: Tensor, segments: Segments, shared: Tensor, key: Key) -> Payload:  # noqa: D102
        limit = self._limit(x, segments)
        scale = shared if self.share else self._scale(x, segments, limit)
        if self.scale == "c-sigma":
            limit = None  # the authors' code ternarizes the unclipped gradient
        words = ops.ternary_encode(x, limit, scale, segments, key)
        return Payload((words,) if self.share else (words, scale))

    def encode_shards(
        self, x: Tensor, segments: Segments, shared: Tensor, key: Key, bounds: Sequence[int]
    ) -> list[Payload]:
        """Encode once, so that clipping sees whole segments, and cut the packed words."""
        words = self.encode(x, segments, shared, key).parts[0]
        return [Payload((piece,)) for piece in ops.split_words(words, 2, bounds)]

    def _sum(self, payloads: Sequence[Payload], segments: Segments) -> tuple[Tensor, int]:
        """Return the sum of the workers' codes, int32, shape (n,), and the number of workers."""
        for payload in payloads:
            self.check(payload, segments)
        counts = [payload.count for payload in payloads]
        words = [payload.parts[0] for payload in payloads]
        return ops.ternary_sum(words, counts, segments.numel), sum(counts)

    def decode(self, payload: Payload, segments: Segments, shared: Tensor) -> Tensor:  # noqa: D102
        total, count = self._sum([payload], segments)
        scale = shared if self.share else payload.parts[1]
        if not self.share and not (scale.isfinite() & (scale >= 0)).all():
            raise PayloadError("terngrad: a payload's scales must be finite and not negative")
        return ops.ternary_decode(total, count, scale, segments)

    def mean(self, payloads: Sequence[Payload], segments: Segments, shared: Tensor) -> Tensor:
        """Return the mean; with a shared scale the codes are added as integers, exactly."""
        if not self.share:
            return super().mean(payloads, segments, shared)
        return ops.ternary_decode(*self._sum(payloads, segments), shared, segments)

    def merge(
        self, payloads: Sequence[Payload], segments: Segments, shared: Tensor, key: Key
    ) -> Payload:
        """Return the integer sum of the codes, in ceil(log2(2N + 1)) bits: nothing is lost."""
        total, count = self._sum(payloads, segments)
        return Payload((ops.ternary_pack(total, count),), count)

    def summand(self, payload: Payload, workers: int, segments: Segments) -> Payload:
        """Return the codes in fields wide enough that packed words can be added."""
        words = ops.ternary_summand(payload.parts[0], workers, segments.numel)
        return Payload((words,))

    def decode_sum(self, payload: Payload, segments: Segments, shared: Tensor) -> Tensor:  # noqa: D102
        bits, n = ops.summand_bits(payload.count), segments.numel
        total = ops.ternary_unpack(payload.parts[0], payload.count, bits, n)
        return ops.ternary_decode(total, payload.count, shared, segments)

    def layout(self, segments: Segments, count: int = 1) -> Layout:  # noqa: D102
        bits = ops.ternary_bits(count)
        codes = (torch.int32, ops.packed_words(segments.numel, bits))
        return (codes,) if self.share else (codes, (torch.float32, len(segments)))
