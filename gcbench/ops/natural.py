"""Natural compression, floats rounded at random to powers of two, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Key
from gcbench.core.errors import PayloadError
from gcbench.ops.backend import op
from gcbench.ops.reference import draws24, into, mean_of, pack, packed_words, unpack

NATURAL_BITS = 9
NATURAL_TOP = 254
"""The exponent's code of 2^127; 255 are infinity and NaN."""

BAD_CODE = "a code of infinity, of NaN or of a negative zero"


def natural_power(exponent: Tensor) -> Tensor:
    """Return 2^(e - 127), and 0 for e = 0: the floats with exponents e, int32, and no fraction."""
    return (exponent << 23).view(torch.float32)


def natural_size(payloads: Sequence[tuple[Tensor, int]], n: int) -> int:
    """Return how many words a payload of `n` codes has, and check that all of them have so many.

    Raises:
        PayloadError: one has not, or they are not int32.
    """
    size = packed_words(n, NATURAL_BITS)
    for words, _ in payloads:
        if words.dtype != torch.int32 or words.shape != (size,):
            raise PayloadError(
                f"{tuple(words.shape)} words of {words.dtype} for {n} codes of {NATURAL_BITS} "
                f"bits: {size} of torch.int32 expected"
            )
    return size


@op
def natural_encode(x: Tensor, key: Key, *, out: Tensor | None = None) -> Tensor:
    """Draw each element's power of two, and pack its sign and exponent in 9 bits, int32 words.

    The exponent is the float's own, or the next one iff u < 2 f, u uniform on [0, 2^24) and f the
    23 bits of the fraction; at most that of 2^127. Denormals are 0, which has no sign.

    `x`: float32, shape (n,). `out`: where to write.
    """
    bits = x.view(torch.int32) & 0x7FFFFFFF
    up = draws24(key, x.numel(), x.device) < (bits & 0x7FFFFF) << 1
    exponent = bits >> 23
    exponent = (exponent + (up & (exponent > 0))).clamp_(max=NATURAL_TOP)
    sign = ((x < 0) & (exponent > 0)).int()
    return into(out, pack(sign << 8 | exponent, NATURAL_BITS))


@op
def natural_decode(words: Tensor, n: int, name: str, *, out: Tensor | None = None) -> Tensor:
    """Return what `n` packed codes stand for, float32, shape (n,). `out`: where to write.

    Raises:
        PayloadError: another number of words, or a code that no encoder sends; the message of the
            latter begins with `name`.
    """
    codes = unpack(words, NATURAL_BITS, n)
    exponent = codes & 0xFF
    if ((exponent > NATURAL_TOP) | (codes == 1 << 8)).any():
        raise PayloadError(f"{name}: {BAD_CODE}")
    size = natural_power(exponent)
    return into(out, torch.where(codes >> 8 == 1, -size, size))


@op
def natural_mean(
    payloads: Sequence[tuple[Tensor, int]], n: int, name: str, *, out: Tensor | None = None
) -> Tensor:
    """Return the mean of all workers, float32, shape (n,): see `mean_of`.

    `payloads`: words, as `natural_decode` takes them, and how many workers' mean they are. `out`:
    where to write.

    Raises:
        PayloadError: see `natural_decode`.
    """
    return into(out, mean_of((natural_decode(words, n, name), count) for words, count in payloads))
