"""Microscaling 4-bit floats: E2M1 elements in blocks of 32, each with a power of two as its scale.

    s = 2^(floor(log2 max |x|) - 2),   c = e2m1(x / s),   x' = c s

E2M1 has the magnitudes 0, .5, 1, 1.5, 2, 3, 4 and 6; x / s is below 8, and values above 6 saturate.
To nearest, ties to even: biased, and contractive.
With `rounding="stochastic"` the variance is (high - x)(x - low) per element, and only saturation is
biased.
NMSE of normal values .0132, Laplace .0161 (test_blockfloat.py::test_the_error).
Wire: 4 bits per element, packed, and 8 bits (E8M0) per block: 4.25 bits, up and down; the owner
adds in float32 and encodes the mean again. A block below 2^-100 is sent as zeros, with the byte 0.
Zeros lose their sign.
Source: Rouhani et al. 2023, arXiv:2310.10537; Open Compute Project, Microscaling formats (MX)
version 1.0, sections 5 and 6.3.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("mxfp4")
>>> method.decompress(method.compress(torch.tensor([4.0, -1.0, 0.3, -2.6])))
tensor([ 4.0000, -1.0000,  0.5000, -3.0000])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gcbench.ops.blockfloat import E2M1, Element

from ._blockfloat import BlockFloatClaims, Microscaling


@dataclass(frozen=True)
class MXFP4(Microscaling):
    """Blocks of 32 elements in 4 bits."""

    element: ClassVar[Element] = E2M1


class MXFP4Claims(BlockFloatClaims[MXFP4], of=MXFP4):
    """Contractive: the largest of a block loses at most a quarter."""

    nominal_bits = 4.25
