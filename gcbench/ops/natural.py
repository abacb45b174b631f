"""Natural compression: floats rounded at random to powers of two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Key
from gcbench.ops import packing
from gcbench.ops.dispatch import operation, output, part, payload_faults, vector
from gcbench.ops.means import mean_of
from gcbench.ops.packing import packed_words
from gcbench.ops.random import draws_for

BITS = 9
TOP = 254
"""The exponent field of 2^127; 255 is infinity and NaN."""

_fault = payload_faults({1: "a code is infinity, NaN or negative zero"})


def power(exponent: Tensor) -> Tensor:
    """Return 2^(e - 127), float32, for exponent fields e, int32, of any shape; 0 for e = 0."""
    return (exponent << 23).view(torch.float32)


@operation()
def _encode(x: Tensor, n: int, key: Key, out: Tensor) -> None:
    bits = x.view(torch.int32) & 0x7FFFFFFF
    up = draws_for(x, key) < (bits & 0x7FFFFF) << 1
    exponent = bits >> 23
    exponent = (exponent + (up & (exponent > 0))).clamp_(max=TOP)
    sign = ((x < 0) & (exponent > 0)).int()
    packing.pack(sign << 8 | exponent, BITS, out=out)


def encode(x: Tensor, key: Key, *, out: Tensor | None = None) -> Tensor:
    """Round each element at random to a power of two; pack sign and exponent in 9 bits, int32.

    The exponent is incremented iff u < 2 f, u uniform on [0, 2^24) and f the 23 bits of the
    fraction as an integer; it is at most that of 2^127. Denormals become 0, with sign bit 0.

    `x`: float32, shape (n,). `out`: the output tensor.
    """
    n = x.numel()
    x = vector(x, torch.float32, n)
    out = output(out, torch.int32, packed_words(n, BITS), x.device)
    _encode(x, n, key, out)
    return out


def decode(words: Tensor, n: int, name: str, *, out: Tensor | None = None) -> Tensor:
    """Return the values of `n` packed codes, float32, shape (n,). `out`: the output tensor.

    Raises:
        PayloadError: the wrong number of words, or a code that no encoder sends; the message starts
            with `name`.
    """
    return mean([(words, 1)], n, name, out=out)


def _values(words: Tensor, n: int, name: str) -> Tensor:
    codes = packing.unpack(words, BITS, n)
    exponent = codes & 0xFF
    if ((exponent > TOP) | (codes == 1 << 8)).any():
        raise _fault(1, {"name": name})
    size = power(exponent)
    return torch.where(codes >> 8 == 1, -size, size)


@operation(_fault)
def _mean(words: Sequence[Tensor], counts: Sequence[int], n: int, name: str, out: Tensor) -> None:
    values = (_values(packed, n, name) for packed in words)
    out.copy_(mean_of(zip(values, counts, strict=True)))


def mean(
    payloads: Sequence[tuple[Tensor, int]], n: int, name: str, *, out: Tensor | None = None
) -> Tensor:
    """Return the mean of all workers, float32, shape (n,): see `means.mean_of`.

    `payloads`: per payload words, as for `decode`, and the number of workers whose mean they
    encode. `out`: the output tensor.

    Raises:
        PayloadError: see `decode`.
        ValueError: there are no payloads.
    """
    if not payloads:
        raise ValueError("mean needs at least one payload")
    size, device = packed_words(n, BITS), payloads[0][0].device
    words = [
        part(packed, torch.int32, size, f"{name}: {n} codes of {BITS} bits")
        for packed, _ in payloads
    ]
    counts = [count for _, count in payloads]
    out = output(out, torch.float32, n, device)
    _mean(words, counts, n, name, out)
    return out
