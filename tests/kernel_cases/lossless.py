"""bfloat16 with coded exponents."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gcbench.core.compressor import Segments
from gcbench.ops import lossless, packing
from kernel_cases import Call, nonfinite, segmentations, values


def cases(n: int) -> Iterator[Call]:
    every = torch.arange(n).mul(40_503).remainder(65_536).sub(32_768).short().view(torch.bfloat16)
    blocks = [(f"blocks of {size}", Segments.of([(n,)], size)) for size in (4096, 100, 3)]
    for cut, segments in (*segmentations(n), *blocks):
        inputs = [*values(n), *nonfinite(n)]
        for what, x in inputs if n <= 5000 else inputs[:2] + inputs[-2:]:
            yield Call("lossless.encode", f"{what} {cut}", (x.bfloat16(), segments))
            if not x.isnan().any():  # torch and the kernels round NaN to different bits
                yield Call("lossless.encode", f"float32, {what} {cut}", (x, segments))
        yield Call("lossless.encode", f"every pattern {cut}", (every, segments))
        for x in (next(values(n))[1].bfloat16(), every):
            yield from payloads(n, cut, segments, lossless.encode(x, segments))


def payloads(n: int, cut: str, segments: Segments, parts: tuple[Tensor, ...]) -> Iterator[Call]:
    fractions, words, tops, escaped = parts

    def decoded(what: str, words: Tensor, tops: Tensor, escaped: Tensor) -> Call:
        changed = fractions, words, tops, escaped
        dtype = torch.float32 if len(what) % 2 else torch.bfloat16
        return Call("lossless.decode", f"{cut} {what} {dtype}", (changed, segments, "", dtype))

    yield decoded("", words, tops, escaped)
    yield decoded("f", words, tops, escaped)
    yield decoded("an exponent more", words, tops, torch.cat((escaped, escaped.new_zeros(1))))
    yield decoded("an exponent less", words, tops, escaped[1:])
    yield decoded("high exponents", words, tops, escaped + 200)
    yield decoded("no top", words, tops + 1, escaped)
    yield decoded("small tops", words, tops.clamp(max=3), escaped)
    codes = packing.unpack(words, lossless.BITS, n)
    lengths = torch.tensor(segments.lengths, dtype=torch.int64)
    limit = tops.int().repeat_interleave(lengths)[codes == lossless.ESCAPE] - lossless.ESCAPE
    for above in (0, 1):  # the largest exponents that may be escaped, and one more
        yield decoded(f"{above} above", words, tops, (limit + above).clamp(min=0).byte())
    for place in {0, n // 2, n - 1} if n else ():
        for code in (0, 1, 6, 7):
            other = codes.clone()
            other[place] = code
            yield decoded(f"{code} at {place}", packing.pack(other, lossless.BITS), tops, escaped)
    ones = packing.pack(codes.clamp(min=1), lossless.BITS)
    yield decoded("codes above 0", ones, tops, escaped)
