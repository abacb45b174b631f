"""QSGD: each segment's gradient rounded at random to s evenly spaced levels of its norm.

Q(v)_i = ||v|| sgn(v_i) xi_i;  with a = |v_i| / ||v|| and l = floor(a s),
xi_i = (l + 1) / s with probability a s - l, else l / s;  zeta_i = s xi_i is sent.

Unbiased, to within 2^-23 of a step because draws have 24 bits; Var Q(v)_i = (||v|| / s)^2 p (1 - p)
exactly, p = a s - l. The sum over a segment of d elements is at most
min(d / s^2, sqrt(d) / s) ||v||_2^2 with the 2-norm (d / 4 s^2 holds too), and at most
min(d ||v||_inf^2 / 4 s^2, ||v||_inf ||v||_1 / s) with the maximum norm. Not contractive: no error
feedback.
With `noise="correlated"` the errors of N workers partly cancel (Suresh et al., ICML 2022,
arXiv:2203.04925; `gcbench.ops.random`): each worker has the same bytes, mean and variance, and the
mean of equal inputs has a variance of at most step^2 / (4 N^2) per element instead of up to
step^2 / (4 N); the step is ||v|| / s.
Wire: ceil(log2(2s + 1)) bits per element ("fixed"), or one bit stream over all segments:
"omega-dense" encodes each element as Elias(zeta + 1) and a sign if zeta > 0; "omega-sparse" encodes
each nonzero element as Elias(distance), a sign, Elias(zeta). One float32 norm per segment.
Source: Alistarh et al., NeurIPS 2017, arXiv:1610.02132: quantizer and both codes section 3.1,
bounds Theorem 3.2 and Corollary 3.3; buckets and norm="max", as in all experiments, section 4.
Differs from the paper: the distances of "omega-sparse" continue across segments, after the number
of nonzeros; 2.8 bits at s = sqrt(d) are not reached (test_qsgd.py::test_claimed_*). With the 2-norm
of a whole tensor, noise dominates the gradient (test_qsgd.py::test_whole_tensor_*).

>>> import gcbench, torch
>>> method = gcbench.get_compressor("qsgd", levels=4)
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> packed.payload.nbytes
20
>>> method.decompress(packed)
tensor([ 4., -1.,  1., -2.])
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
    Segments,
    check_noise,
)
from gcbench.core.errors import PayloadError
from gcbench.core.registry import LATER


@dataclass(frozen=True)
class QSGD(Compressor):
    """Stochastic rounding to levels -s..s of a norm. A merged payload is the encoded mean."""

    levels: int = 7  # s, the levels above zero; 2^(b - 1) - 1 of them use b bits
    norm: str = "max"  # or "2"
    granularity: int | str = 512  # the bucket; or "tensor", "column", "model"
    coding: str = "fixed"  # or "omega-dense", "omega-sparse"
    noise: str = field(default="independent", metadata=LATER)  # or "correlated" among workers

    collectives: ClassVar[tuple[str, ...]] = ("allgather", "twoshot", "ring")
    variants = (
        {},
        {"levels": 1, "granularity": "tensor"},
        {"norm": "2", "levels": 127, "granularity": 128},
        {"norm": "2", "levels": 32, "granularity": 1024, "coding": "omega-dense"},
        {"norm": "2", "levels": 4, "coding": "omega-sparse"},
        {"noise": "correlated"},
    )

    def __post_init__(self) -> None:
        if not 1 <= self.levels < 2**15:
            raise ValueError(f"levels={self.levels}: expected 1 to {2**15 - 1}")
        check_noise(self.noise)
        if self.norm not in ops.levels.NORMS:
            raise ValueError(f"norm={self.norm!r}: expected {' or '.join(ops.levels.NORMS)}")
        if self.coding not in ops.levels.CODINGS:
            raise ValueError(f"coding={self.coding!r}: expected {', '.join(ops.levels.CODINGS)}")

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        draws = ctx.draws(self.noise)
        if (self.norm, self.coding) == ("max", "fixed"):
            return ops.levels.encode_max(x, self.levels, ctx.segments, draws, out=ctx.part(0))
        norms = ops.levels.norms(x, ctx.segments, self.norm, self.levels)
        code = x, norms, self.levels, self.coding, ctx.segments, draws
        return ops.levels.encode(*code, out=ctx.part(0)), norms

    def _opened(self, payload: Payload) -> tuple[Tensor, Tensor, int]:
        """Return words, norms and count; omega codings declare no layout, so check their number."""
        if len(payload.parts) != 2:
            raise PayloadError(f"payload has {len(payload.parts)} parts: expected words and norms")
        return (*payload.parts, payload.count)

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        words, norms, _ = self._opened(payload)
        code = (words, norms, self.norm, self.levels, self.coding, ctx.segments)
        return ops.levels.decode(*code, out=ctx.out)

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        parts = [self._opened(payload) for payload in payloads]
        code = (self.norm, self.levels, self.coding, ctx.segments)
        return ops.levels.mean(parts, *code, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout | None:
        """Return the sizes of words and norms; None if the words depend on the data."""
        if self.coding != "fixed":
            return None
        words = ops.packing.packed_words(segments.numel, ops.levels.bits(self.levels))
        return (torch.int32, words), (torch.float32, len(segments))


class QSGDClaims(Claims[QSGD], of=QSGD):
    """Unbiased; the variance is exact, and bounded by lemma 3.1 or the module's docstring."""

    unbiased = True
    two_levels = True

    @property
    def exact_for(self) -> tuple[str, ...]:
        """Inputs whose elements all lie on levels, as in any bucket of one element."""
        if self.codec.granularity == 1:
            return ("signs", "ternary", "integers", "bytes", "sparse")
        if self.codec.norm == "2":
            return ("sparse",)
        whole = [
            name for name, top in (("integers", 7), ("bytes", 127)) if self.codec.levels % top == 0
        ]
        return ("signs", "ternary", "sparse", *whole)

    @property
    def smallest(self) -> float:
        """Return s 2^-100, so that the step between levels is not denormal."""
        return self.codec.levels * ops.statistics.TINY

    @property
    def nominal_bits(self) -> float | None:
        """Return the bits of code and norm; for "omega-dense" at s = sqrt(d), Corollary 3.3."""
        bucket = self.codec.granularity if isinstance(self.codec.granularity, int) else 0
        side = 32 / bucket if bucket else 0.0
        if self.codec.coding == "fixed":
            return ops.levels.bits(self.codec.levels) + side
        claimed = (
            self.codec.coding == "omega-dense"
            and self.codec.norm == "2"
            and self.codec.levels**2 == bucket
        )
        return 2.8 + side if claimed else None

    def omega(self, segments: Segments) -> float:
        """Return the module docstring's bound over ||x||^2; at worst ||x||_inf = ||x||.

        max-norm: ||v||_inf ||v||_1 <= (1 + sqrt d) / 2 ||v||^2, attained by one large element.
        """
        s, d = self.codec.levels, max(segments.lengths, default=0)
        near = math.sqrt(d) if self.codec.norm == "2" else (1 + math.sqrt(d)) / 2
        return min(d / (4 * s**2), near / s)

    def variance(self, x: Tensor, ctx: Context) -> Tensor:
        norms = ops.levels.norms(x, ctx.segments, self.codec.norm, self.codec.levels)
        return ops.levels.variance(x, norms, self.codec.levels, ctx.segments)

    def variance_bound(self, x: Tensor, ctx: Context) -> float:
        norms, s = (
            ops.levels.norms(x, ctx.segments, self.codec.norm, self.codec.levels).double(),
            self.codec.levels,
        )
        d = torch.tensor(ctx.segments.lengths, dtype=torch.float64, device=x.device)
        if self.codec.norm == "2":
            return float((torch.minimum(d / s**2, d.sqrt() / s) * norms.square()).sum())
        length = ops.statistics.moments(x.abs(), ctx.segments)[0]
        return float(torch.minimum(d * (norms / (2 * s)).square(), norms * length / s).sum())
