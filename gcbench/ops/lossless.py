"""bfloat16 without loss in fewer bits: exponents relative to the largest of their segment."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Segments
from gcbench.core.errors import PayloadError
from gcbench.ops import half, packing
from gcbench.ops.dispatch import operation, output, part, payload_faults, vector

BITS = 3
ESCAPE = 7
"""The code of exponents that are at least 7 below the largest; they follow in full."""
FAULTS = {
    1: "a code leads below the exponent 0",
    2: "not as many exponents as escapes",
    3: "an exponent is less than 7 below its segment's largest",
    4: "no element has its segment's largest exponent",
    5: half.NOT_FINITE,
}

_fault = payload_faults(FAULTS)


def _per_element(values: Tensor, segments: Segments) -> Tensor:
    """Repeat each segment's value for its elements."""
    lengths = torch.tensor(segments.lengths, dtype=torch.int64, device=values.device)
    return values.repeat_interleave(lengths)


@operation()
def _split(
    values: Tensor,
    single: bool,
    segments: Segments,
    fractions: Tensor,
    words: Tensor,
    tops: Tensor,
    escaped: Tensor,
) -> int:
    codes = half.encode(values, torch.bfloat16) if single else values
    bits = codes.view(torch.int16).int()
    fractions.copy_((bits >> 8 & 0x80) | (bits & 0x7F))
    exponents = bits >> 7 & 0xFF
    for which, rows in segments.views(exponents):
        tops[which] = rows.amax(1).to(torch.uint8) if rows.shape[1] else 0
    codes = (_per_element(tops, segments).int() - exponents).clamp_(max=ESCAPE)
    packing.pack(codes, BITS, out=words)
    large = exponents[codes == ESCAPE]
    escaped[: len(large)] = large.to(torch.uint8)
    return len(large)


def encode(values: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return signs and fractions, packed codes, largest exponents, escaped exponents.

    `values`: shape (n,), bfloat16 of any bits, or float32, rounded as by `half.encode`. The parts
    are uint8, shape (n,), sign in the upper bit; int32 words of 3-bit codes, largest exponent minus
    exponent, at most `ESCAPE`; uint8, shape (m,); and uint8, the exponents of the elements whose
    code is `ESCAPE`, in order.
    """
    n = segments.numel
    single = values.dtype is torch.float32
    values = vector(values, torch.float32 if single else torch.bfloat16, n, "values")
    fractions = output(None, torch.uint8, n, values.device)
    words = output(None, torch.int32, packing.packed_words(n, BITS), values.device)
    tops = output(None, torch.uint8, len(segments), values.device)
    escaped = output(None, torch.uint8, n, values.device)
    total = _split(values, single, segments, fractions, words, tops, escaped)
    return fractions, words, tops, escaped[:total].clone()


@operation(_fault)
def _join(
    fractions: Tensor,
    words: Tensor,
    tops: Tensor,
    escaped: Tensor,
    single: bool,
    segments: Segments,
    name: str,
    out: Tensor,
) -> None:
    arguments = {"name": name}
    codes = packing.unpack(words, BITS, segments.numel)
    top = _per_element(tops, segments).int()
    exponents, escapes = top - codes, codes == ESCAPE
    if bool(((exponents < 0) & ~escapes).any()):
        raise _fault(1, arguments)
    if int(escapes.sum()) != escaped.numel():
        raise _fault(2, arguments)
    exponents[escapes] = escaped.int()
    if bool(((top - exponents < ESCAPE) & escapes).any()):
        raise _fault(3, arguments)
    for _, rows in segments.views(codes):
        if rows.shape[1] and bool((rows != 0).all(1).any()):
            raise _fault(4, arguments)
    wide = fractions.int()
    bits = (wide & 0x80) << 8 | exponents << 7 | wide & 0x7F
    out.copy_(torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16).view(torch.bfloat16))
    if single and not bool(out.isfinite().all()):
        raise _fault(5, arguments)


def decode(
    parts: Sequence[Tensor],
    segments: Segments,
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the values, shape (n,), of the parts that `encode` returns.

    `dtype`: bfloat16, or float32 for the same values. `out`: the output tensor, undefined after an
    error.

    Raises:
        PayloadError: wrong dtype or shape, no values have these parts, or a float32 is not finite.
            The message starts with `name`.
    """
    if len(parts) != 4:
        raise PayloadError(f"{name}: payload has {len(parts)} parts: expected 4")
    n, m = segments.numel, len(segments)
    fractions = part(parts[0], torch.uint8, n, f"{name}: fractions")
    words = part(parts[1], torch.int32, packing.packed_words(n, BITS), f"{name}: codes")
    tops = part(parts[2], torch.uint8, m, f"{name}: largest exponents")
    escaped = part(parts[3], torch.uint8, parts[3].numel(), f"{name}: escaped exponents")
    out = output(out, dtype, n, fractions.device)
    _join(fractions, words, tops, escaped, dtype is torch.float32, segments, name, out)
    return out
