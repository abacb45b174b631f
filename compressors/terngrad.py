"""TernGrad: gradients in three levels, {-s, 0, +s}.

f(g) = max(-c sigma, min(c sigma, g)), sigma the standard deviation of the segment;
s = max over workers and elements of |f(g)|;  t_k = sign(f_k) b_k,  P(b_k = 1) = |f_k| / s;
every worker applies s * sum_i t_i / N.

Bias and variance: unbiased for f(g), hence for g without clipping; E||s t||^2 = s ||f||_1 exactly,
so the variance is s ||f||_1 - ||f||^2. Not contractive: no error feedback. A segment of equal
values, or of one, has sigma = 0 and is clipped to zeros: keep such tensors dense, or clip=0.
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


@dataclass(frozen=True)
class TernGrad(Compressor):
    """Stochastic ternary codes; a payload of `count` workers holds their sum, offset by count."""

    clip: float = 2.5  # standard deviations; 0 switches clipping off
    scale: str = "clipped-max"  # or "c-sigma", the rule of the authors' code
    share: bool = True  # agree on the largest scale of all workers first
    granularity: str | int = "tensor"  # or "model", "column", or a group size

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allreduce", "allgather")
    unbiased = True
    requantizes = False
    variants = ({}, {"clip": 0.0}, {"scale": "c-sigma"}, {"share": False}, {"granularity": 512})

    def __post_init__(self) -> None:
        if not (math.isfinite(self.clip) and self.clip >= 0):
            raise ValueError(f"clip={self.clip}: a number of standard deviations, 0 for none")
        if self.scale not in ("clipped-max", "c-sigma"):
            raise ValueError(f"scale={self.scale!r}: 'clipped-max' or 'c-sigma' allowed")
        if self.scale == "c-sigma" and not self.clip:
            raise ValueError("scale='c-sigma' is clip * sigma: it needs clip > 0")

    @property
    def exact_for(self) -> tuple[str, ...]:
        return () if self.clip else ("ternary",)

    def legal_collectives(self) -> tuple[str, ...]:
        # Codes of different scales cannot be added as integers.
        return self.collectives if self.share else ("allgather",)

    def nominal_bits(self) -> float:
        return math.log2(3)

    def gaussian_error(self) -> float | None:
        # Integrals over the normal density; tests/test_terngrad.py computes them.
        known = {2.0: 0.65281, 2.5: 1.00953, 3.0: 1.39676}
        return None if isinstance(self.granularity, int) else known.get(self.clip)

    def _own(self, x: Tensor, segments: Segments) -> tuple[Tensor | None, Tensor]:
        """Return c sigma of each segment, shape (m,), or None, and the worker's own scales."""
        largest = ops.segment_absmax(x, segments)
        if not self.clip:
            return None, largest
        limit = ops.segment_std(x, segments).mul_(self.clip).clamp_(max=3e38)
        return limit, limit if self.scale == "c-sigma" else torch.minimum(largest, limit)

    def target(self, x: Tensor, segments: Segments, shared: Tensor) -> Tensor:
        limit, _ = self._own(x, segments)
        if self.scale == "c-sigma" and self.share:
            limit = shared  # what is in force, of all workers
        return x if limit is None else ops.clamp_(x.clone(), limit, segments)

    def variance(self, x: Tensor, segments: Segments, shared: Tensor) -> Tensor:
        f = self.target(x, segments, shared).double()
        scale = shared if self.share else self._own(x, segments)[1]
        return ops.scale_(f.abs(), scale.double(), segments) - f * f

    def statistic(self, x: Tensor, segments: Segments) -> Tensor:
        return self._own(x, segments)[1] if self.share else x.new_empty(0)

    def encode(self, x: Tensor, segments: Segments, shared: Tensor, key: Key) -> Payload:
        limit, own = self._own(x, segments)
        if self.scale == "c-sigma":
            limit = None  # the authors' code ternarizes the unclipped gradient
        words = ops.ternary_encode(x, limit, shared if self.share else own, segments, key)
        return Payload((words,) if self.share else (words, own))

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
        return ops.ternary_sum([(p.parts[0], p.count) for p in payloads], segments.numel)

    def decode(self, payload: Payload, segments: Segments, shared: Tensor) -> Tensor:
        codes = self._sum([payload], segments)
        return ops.ternary_decode(*codes, shared if self.share else payload.parts[1], segments)

    def mean(self, payloads: Sequence[Payload], segments: Segments, shared: Tensor) -> Tensor:
        if not self.share:
            return super().mean(payloads, segments, shared)
        return ops.ternary_decode(*self._sum(payloads, segments), shared, segments)

    def merge(
        self, payloads: Sequence[Payload], segments: Segments, shared: Tensor, key: Key
    ) -> Payload:
        """Return the integer sum of the codes, in ceil(log2(2N + 1)) bits: nothing is lost."""
        codes = self._sum(payloads, segments)
        return Payload((ops.ternary_pack(*codes),), codes[1])

    def summand(self, payload: Payload, workers: int, segments: Segments) -> Payload:
        return Payload((ops.ternary_summand(payload.parts[0], workers, segments.numel),))

    def decode_sum(self, payload: Payload, segments: Segments, shared: Tensor) -> Tensor:
        bits, count = ops.summand_bits(payload.count), payload.count
        total = ops.ternary_unpack(payload.parts[0], count, bits, segments.numel)
        return ops.ternary_decode(total, count, shared, segments)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        codes = (torch.int32, ops.packed_words(segments.numel, ops.ternary_bits(count)))
        return (codes,) if self.share else (codes, (torch.float32, len(segments)))
