"""1-bit SGD: one bit per element, and the means of the two classes.

V = gradient + residual;  bit = [V >= 0];  m1 = mean{V : V >= 0}, m0 = mean{V : V < 0} of a column
(0 for an empty class);  V^ = m1 where the bit is 1, m0 elsewhere;  new residual = V - V^.

Biased; the sum of each class is preserved, and (m0, m1) minimizes the squared error for threshold
0: ||V - V^||^2 = ||V||^2 - sum_columns (n1 m1^2 + n0 m0^2), n0 and n1 the sizes of the classes. It
is at most (1 - 1/d) ||V||^2 for columns of d elements, and (1 - 2/pi) ||V||^2 for long normal ones.
Wire: 1 bit per element and two float32 per column, up and down: 1 + 64/d bits per element for
columns of d. The owner of a shard encodes the mean again, with another residual.
Source: Seide et al., Interspeech 2014: quantization with error feedback, the means of a column, the
exchange in stripes. Its double buffering is `--delay 1` with half the batch, and its cold start
`--start-step k`.
Differs: the residual is V - V^, as in CNTK; the paper prints G - V^, which drops the residual of
earlier steps (test_onebit.py::test_the_printed_residual_loses_mass). Workers are averaged; the
paper sums. CNTK stores weights column-major as outputs x inputs, so its column is one input's
outgoing weights; here a column is one output's incoming weights, which are contiguous in torch, and
a vector is one column (test_a_column_is_one_output_unit).

>>> import gcbench, torch
>>> method = gcbench.get_compressor("onebit")
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> packed.payload.nbytes
12
>>> method.decompress(packed)
tensor([ 2.2500, -1.7500,  2.2500, -1.7500])
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
class OneBit(Compressor):
    """One-bit quantization to two class means per segment; parts are the bits, m0 and m1."""

    granularity: str | int = "column"  # or "tensor", "model", or a group size

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allgather")
    memory: ClassVar[str] = "residual"
    variants = ({}, {"granularity": "tensor"}, {"granularity": 512})

    def __post_init__(self) -> None:
        Segments.of([(1,)], self.granularity)  # raises UsageError if it is unknown

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        return ops.sign.class_encode(x, ctx.segments, out=ctx.parts)

    def encode_feedback(self, x: Tensor, residual: Tensor, ctx: Context) -> Parts:
        words, low, high, _ = ops.sign.class_feedback(
            x, residual, ctx.segments, self.name, lost=residual, out=ctx.parts
        )
        return words, low, high

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        words, low, high = payload.parts
        return ops.sign.class_decode(words, low, high, ctx.segments, self.name, out=ctx.out)

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        parts = [(payload.parts[0], payload.parts[1:], payload.count) for payload in payloads]
        return ops.sign.mean(parts, ctx.segments, self.name, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        means = (torch.float32, len(segments))
        return ((torch.int32, ops.packing.packed_words(segments.numel, 1)), means, means)


class OneBitClaims(Claims[OneBit], of=OneBit):
    """Contractive: the two means are the best pair of values for threshold 0."""

    contractive = True
    exact_for = ("signs",)
    nominal_bits = 1.0
    gaussian_error = 1 - 2 / math.pi

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return ||x||^2 - sum(n1 m1^2 + n0 m0^2), the exact error up to rounding."""
        count, total, square = ops.sign.class_moments(x, ctx.segments)
        return ops.sign.mean_error(ops.sign.class_means(count, total), count, total, square)

    def delta(self, segments: Segments) -> float:
        """Return 1/d of the longest segment: sum_c n_c m_c^2 >= ||V||_1^2 / d >= ||V||^2 / d."""
        return (1 - 2.0**-18) / max(1, *segments.lengths, 1)
