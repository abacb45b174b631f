"""Microscaling 8-bit floats: e4m3 elements in blocks of 32, each with a power of two as its scale.

    s = 2^(floor(log2 max |x|) - 8),   c = e4m3(x / s),   x' = c s

448 = 1.75 * 2^8 is the largest value of e4m3, so x / s is below 512, and values above 448 saturate.
To nearest, ties to even: biased, and contractive.
With `rounding="stochastic"` the variance is (high - x)(x - low) per element, and only saturation is
biased.
NMSE of normal values 8.6e-4, Laplace 1.0e-3 (test_blockfloat.py::test_the_error). On the wire no
matrix product follows, and `int8` in 8.13 bits has 17 times less error on normal values
(test_blockfloat.py::test_beside_int8).
Wire: 8 bits per element and 8 bits (E8M0) per block: 8.25 bits, up and down; the owner adds in
float32 and encodes the mean again. A block below 2^-100 is sent as zeros, with the byte 0.
Zeros lose their sign.
Source: Rouhani et al. 2023, arXiv:2310.10537; Open Compute Project, Microscaling formats (MX)
version 1.0, sections 5 and 6.3.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("mxfp8")
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.3, -2.55]))
>>> packed.payload.parts[1]
tensor([121], dtype=torch.uint8)
>>> method.decompress(packed)
tensor([ 4.0000, -1.0000,  0.3125, -2.5000])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gcbench.ops.blockfloat import E4M3, Element

from ._blockfloat import BlockFloatClaims, Microscaling


@dataclass(frozen=True)
class MXFP8(Microscaling):
    """Blocks of 32 elements in 8 bits."""

    element: ClassVar[Element] = E4M3


class MXFP8Claims(BlockFloatClaims[MXFP8], of=MXFP8):
    """Contractive: the largest of a block loses at most an eighth."""

    nominal_bits = 8.25
