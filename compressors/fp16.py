"""Half precision: float16, 5 bits of exponent and 10 of fraction.

x' = fl16(max(-65504, min(65504, x))), rounded to nearest, ties to even; denormals are kept.

Biased; per element |x - x'| <= max(u |x|, min(|x|, 2^-25), |x| - 65504), u = 2^-11: rounding, the
denormal range (magnitudes up to 2^-25 become 0), clipping. Normally distributed input within that
range has a relative squared error of u^2 / (8 ln 2) = 4.30e-8 to within 0.5 %.
Wire: 16 bits per element, up and down. Two-shot and all-gather add in float32; two-shot rounds the
mean again. All-reduce is not supported: 16-bit sums would be rounded at every addition, an error
that no residual contains.
Source: IEEE 754-2008 binary16, section 3.6; without loss scaling or gradient clipping.
Differs from a plain cast, which maps values above 65520 to infinity
(test_half.py::test_nothing_infinite_is_sent).

>>> import gcbench, torch
>>> method = gcbench.get_compressor("fp16")
>>> packed = method.compress(torch.tensor([1.0, 0.1, -3.14159, 1e9]))
>>> packed.payload.nbytes
8
>>> method.decompress(packed).tolist()
[1.0, 0.0999755859375, -3.140625, 65504.0]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ._half import HalfPrecision


@dataclass(frozen=True)
class Float16(HalfPrecision):
    """The gradient rounded to float16."""

    dtype: ClassVar[torch.dtype] = torch.float16
    unit: ClassVar[float] = 2.0**-11
    half_step: ClassVar[float] = 2.0**-25
