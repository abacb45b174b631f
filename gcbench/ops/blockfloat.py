"""Block floating point: small floats in blocks, each block with a scale of 8 bits.

Elements are `E2M1` (4 bits) or `E4M3` (8 bits). Scales are powers of two (microscaling, OCP MX 1.0)
or e4m3 values relative to one float32 per segment (NVFP4).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.ops import packing, random, statistics
from gcbench.ops.dispatch import operation, output, outputs, part, payload_faults, vector
from gcbench.ops.statistics import FLOAT_MAX, TINY, coded_in_zeros, scale_, valid_scales


class Element(NamedTuple):
    """A format of elements: a sign and a magnitude, without infinities."""

    bits: int
    exponent: int
    """The exponent of the largest value."""
    values: tuple[float, ...]
    """The magnitudes, by code without the sign, increasing."""

    @property
    def top(self) -> float:
        """The largest value."""
        return self.values[-1]

    def table(self, device: torch.device) -> Tensor:
        """Return the magnitudes, float32."""
        return torch.tensor(self.values, dtype=torch.float32, device=device)


_E4M3 = (c * 2.0**-9 if c < 8 else (8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(127))
E2M1 = Element(4, 2, (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
E4M3 = Element(8, 8, tuple(_E4M3))
ELEMENTS = {element.bits: element for element in (E2M1, E4M3)}
BLOCK = {"mx": 32, "nv": 16}
NO_DRAWS = Key(0, 0, 0)
BIAS = 127
"""Of a power of two as a byte: E8M0."""
FAULTS = {
    1: "a scale that no encoder sends",
    2: "a code that is NaN",
    3: "nonzero codes in a block of scale 0",
}


_fault = payload_faults(FAULTS)


# ---- elements ------------------------------------------------------------------------------------


def nearest(v: Tensor, element: Element) -> Tensor:
    """Return the magnitude code nearest to each v >= 0, float32, ties to even; saturates."""
    table = element.table(v.device)
    edges = (table[1:] + table[:-1]) / 2
    # A tie at an edge above an odd code goes up; `bucketize` takes it down.
    edges[1::2] = torch.nextafter(edges[1::2], edges.new_zeros(()))
    return torch.bucketize(v, edges, out_int32=True)


def _stochastic(v: Tensor, element: Element, key: Key) -> Tensor:
    """Return the code below or above each v, the latter with the probability that is unbiased."""
    table = element.table(v.device)
    below = torch.bucketize(v, table[1:-1], out_int32=True, right=True)
    low, high = table[below], table[below + 1]
    share = (v - low) / (high - low)
    return below + (random.uniform(key, v.numel(), v.device) < share).int()


def _codes(
    x: Tensor, scales: Tensor, element: Element, stochastic: bool, key: Key, blocks: Segments
) -> Tensor:
    """Return the codes of x / scale, int32; 0 in blocks of scale 0."""
    divisor = torch.where(scales > 0, scales, torch.inf)
    v = x.nan_to_num(nan=0.0)
    for which, rows in blocks.views(v):
        rows.div_(divisor[which].unsqueeze(1))
    size = v.abs()
    codes = _stochastic(size, element, key) if stochastic else nearest(size, element)
    sign = torch.signbit(v) & (codes > 0)
    return codes + (sign.int() << element.bits - 1)


def _write(codes: Tensor, element: Element, out: Tensor) -> None:
    if element.bits == 8:
        out.copy_(codes)
    else:
        packing.pack(codes, element.bits, out=out)


def _read(words: Tensor, element: Element, n: int, arguments: Mapping[str, Any]) -> Tensor:
    """Return the values of the codes, float32, shape (n,)."""
    codes = words.int() if element.bits == 8 else packing.unpack(words, element.bits, n)
    table = element.table(words.device)
    half = 1 << element.bits - 1
    table = torch.cat([table, table.new_full((half - len(table),), torch.nan)])
    values = torch.cat([table, -table]).index_select(0, codes)
    if values.isnan().any():
        raise _fault(2, arguments)
    return values


def _scaled(
    values: Tensor, scales: Tensor, blocks: Segments, arguments: Mapping[str, Any]
) -> Tensor:
    if coded_in_zeros(values, scales, blocks):
        raise _fault(3, arguments)
    return scale_(values, scales, blocks)


def code_words(n: int, element: Element) -> tuple[torch.dtype, int]:
    """Return dtype and size of the codes of n elements."""
    return (torch.uint8, n) if element.bits == 8 else (torch.int32, packing.packed_words(n, 4))


# ---- scales that are powers of two ---------------------------------------------------------------


def _power(exponents: Tensor) -> Tensor:
    """Return 2^(byte - 127), float32; 0 for the byte 0."""
    power = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - BIAS)
    return torch.where(exponents > 0, power, 0.0)


@operation()
def _encode_mx(
    x: Tensor,
    bits: int,
    stochastic: bool,
    key: Key,
    segments: Segments,
    words: Tensor,
    scales: Tensor,
) -> None:
    element = ELEMENTS[bits]
    top = statistics.absmax(x, segments)
    valid = (top >= TINY) & top.isfinite()
    exponent = torch.frexp(torch.where(valid, top, 1.0)).exponent - 1 - element.exponent
    scales.copy_(torch.where(valid, exponent + BIAS, 0))
    _write(_codes(x, _power(scales), element, stochastic, key, segments), element, words)


def encode_mx(
    x: Tensor,
    element: Element,
    segments: Segments,
    key: Key | None = None,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return codes and scales, one byte for each segment.

    The scale is s = 2^(floor(log2 max |x|) - element.exponent), its byte the exponent plus 127; 0
    stands for s = 0, where the maximum is below `TINY` or not finite. Codes are x / s, rounded to
    nearest, ties to even, or, with a `key`, at random without bias; magnitudes above element.top
    saturate. Codes of 8 bits are uint8, shape (n,); those of 4 are packed in int32 words. `x`:
    float32, shape (n,); `out`: output tensors for both.
    """
    n = segments.numel
    x = vector(x, torch.float32, n)
    sizes = code_words(n, element), (torch.uint8, len(segments))
    words, scales = outputs(out, x.device, *sizes)
    _encode_mx(x, element.bits, key is not None, key or NO_DRAWS, segments, words, scales)
    return words, scales


@operation(_fault)
def _decode_mx(
    words: Tensor, scales: Tensor, bits: int, segments: Segments, name: str, out: Tensor
) -> None:
    arguments, element = {"name": name}, ELEMENTS[bits]
    least, most = BIAS - 100 - element.exponent, BIAS + 127 - element.exponent
    if not ((scales == 0) | ((scales >= least) & (scales <= most))).all():
        raise _fault(1, arguments)
    values = _read(words, element, segments.numel, arguments)
    out.copy_(_scaled(values, _power(scales), segments, arguments))


def decode_mx(
    parts: Sequence[Tensor],
    element: Element,
    segments: Segments,
    name: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the decoded tensor, float32, shape (n,); `parts` as `encode_mx` returns them.

    Raises:
        PayloadError: wrong dtype or shape; a code is NaN; a scale is out of the encoder's range; a
            segment of scale 0 has nonzero codes. The message starts with `name`.
    """
    n = segments.numel
    words = part(parts[0], *code_words(n, element), f"{name}: codes")
    scales = part(parts[1], torch.uint8, len(segments), f"{name}: scales")
    out = output(out, torch.float32, n, words.device)
    _decode_mx(words, scales, element.bits, segments, name, out)
    return out


# ---- scales that are e4m3 ------------------------------------------------------------------------


def blocks_of(segments: Segments) -> Segments:
    """Return the blocks of 16 elements inside each segment, the last of which may be shorter."""
    starts = itertools.chain.from_iterable(
        range(start, stop, BLOCK["nv"])
        for start, stop in itertools.pairwise(segments.offsets)
        if stop > start
    )
    return Segments((*starts, segments.numel)) if segments.numel else Segments((0,))


def block_count(segments: Segments) -> int:
    """Return the number of blocks in all segments."""
    return sum(-(-length // BLOCK["nv"]) for length in segments.lengths)


def per_block(values: Tensor, segments: Segments) -> Tensor:
    """Repeat each segment's value, shape (m,), for its blocks of 16."""
    counts = [-(-length // BLOCK["nv"]) for length in segments.lengths]
    return values.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device=values.device))


@operation()
def _encode_nv(
    x: Tensor,
    stochastic: bool,
    key: Key,
    segments: Segments,
    words: Tensor,
    scales: Tensor,
    tops: Tensor,
) -> None:
    top = statistics.absmax(x, segments)
    valid = (top >= TINY) & top.isfinite()
    tops.copy_(torch.where(valid, top, 0.0))
    blocks = blocks_of(segments)
    peak = per_block(tops, segments)
    share = statistics.absmax(x, blocks).nan_to_num() / torch.where(peak > 0, peak, torch.inf)
    # A block's scale relative to the largest, 448; at least the smallest e4m3 value.
    bytes_ = torch.where(peak > 0, nearest(share * E4M3.top, E4M3).clamp(min=1), 0)
    scales.copy_(bytes_)
    codes = _codes(x, _nv_scales(scales, tops, segments), E2M1, stochastic, key, blocks)
    _write(codes, E2M1, words)


def _nv_scales(scales: Tensor, tops: Tensor, segments: Segments) -> Tensor:
    """Return each block's scale: its e4m3 value times top / (448 * 6)."""
    unit = per_block(tops / (E4M3.top * E2M1.top), segments)
    return E4M3.table(scales.device).index_select(0, scales.int()) * unit


def encode_nv(
    x: Tensor, segments: Segments, key: Key | None = None, *, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales of blocks of 16, uint8, and each segment's largest magnitude a, float32.

    A scale is the e4m3 value nearest to 448 max |block| / a, at least 2^-9; a code is x over
    scale * a / (448 * 6), in E2M1, rounded as in `encode_mx`. All are 0 where a is below `TINY` or
    not finite. `x`: float32, shape (n,); `out`: output tensors for the three.
    """
    n = segments.numel
    x = vector(x, torch.float32, n)
    sizes = (torch.uint8, block_count(segments)), (torch.float32, len(segments))
    words, scales, tops = outputs(out, x.device, code_words(n, E2M1), *sizes)
    _encode_nv(x, key is not None, key or NO_DRAWS, segments, words, scales, tops)
    return words, scales, tops


@operation(_fault)
def _decode_nv(
    words: Tensor, scales: Tensor, tops: Tensor, segments: Segments, name: str, out: Tensor
) -> None:
    arguments = {"name": name}
    if not valid_scales(tops) or (scales > 126).any():
        raise _fault(1, arguments)
    if not torch.equal(scales > 0, per_block(tops, segments) > 0):
        raise _fault(1, arguments)
    values = _read(words, E2M1, segments.numel, arguments)
    scales = _nv_scales(scales, tops, segments)
    out.copy_(_scaled(values, scales, blocks_of(segments), arguments).clamp_(-FLOAT_MAX, FLOAT_MAX))


def decode_nv(
    parts: Sequence[Tensor], segments: Segments, name: str, *, out: Tensor | None = None
) -> Tensor:
    """Return the decoded tensor, float32, shape (n,); `parts` as `encode_nv` returns them.

    Raises:
        PayloadError: wrong dtype or shape; a scale is NaN, negative, or 0 where a is not; a is
            negative, not finite, or below `TINY` but not 0; nonzero codes where a is 0. The message
            starts with `name`.
    """
    n = segments.numel
    words = part(parts[0], *code_words(n, E2M1), f"{name}: codes")
    scales = part(parts[1], torch.uint8, block_count(segments), f"{name}: scales")
    tops = part(parts[2], torch.float32, len(segments), f"{name}: largest magnitudes")
    out = output(out, torch.float32, n, words.device)
    _decode_nv(words, scales, tops, segments, name, out)
    return out
