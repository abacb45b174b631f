"""Brain float: bfloat16, the exponent of float32 and 7 bits of fraction.

x' = flb16(max(-L, min(L, x))), L = (2 - 2^-7) 2^127 = 3.39e38, rounded to nearest, ties to even;
denormals are kept.

Biased; per element |x - x'| <= max(u |x|, min(|x|, 2^-134), |x| - L), u = 2^-8: rounding, the
denormal range, clipping. Normal input of any scale has a relative squared error of u^2 / (8 ln 2)
= 2.75e-6 to within 0.5 %, 64 times float16's.
Wire: 16 bits an element, up and down. Two-shot and all-gather add in float32, and two-shot rounds
the mean once more on the way down. There is no all-reduce: halves that are added as halves lose a
bit at every worker, which no residual sees.
Source: Kalamkar et al. 2019, arXiv:1905.12322: the upper half of a float32.
A plain cast sends infinity above 3.396e38; here nothing infinite is ever sent
(tests/test_half.py::test_nothing_infinite_is_sent).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ._half import HalfPrecision


@dataclass(frozen=True)
class BFloat16(HalfPrecision):
    """The gradient rounded to bfloat16."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    unit: ClassVar[float] = 2.0**-8
    half_step: ClassVar[float] = 2.0**-134
