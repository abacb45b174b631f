"""Block floating point: elements of 4 and 8 bits under scales of 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gcbench.core.compressor import Segments
from gcbench.ops import blockfloat, packing
from gcbench.ops.blockfloat import E2M1, E4M3, Element
from kernel_cases import KEYS, Call, nonfinite, segmentations, values


def edges(n: int, element: Element) -> Tensor:
    """Return all values, what lies halfway between two, the floats beside, and what saturates."""
    sizes = torch.tensor(element.values)
    middle = (sizes[1:] + sizes[:-1]) / 2
    sizes = torch.cat((sizes, middle, element.top * torch.tensor([1.01, 1.05, 1.1, 1.14])))
    x = torch.cat((sizes, -sizes)).repeat(2 * n // len(sizes) + 1)[:n].clone()
    x[1::3] = x[1::3].nextafter(torch.tensor(0.0))
    x[2::3] = x[2::3].nextafter(torch.tensor(1e9))
    x[::31] = element.top
    return x


def encoded(n: int, cut: str, segments: Segments) -> Iterator[Call]:
    inputs = [*values(n), *nonfinite(n)]
    inputs += [(f"edges {e.bits}", edges(n, e)) for e in (E2M1, E4M3)]
    for what, x in inputs if n <= 5000 else (inputs[0], *inputs[-2:]):
        for key in (None, *KEYS) if n <= 5000 else (None, KEYS[1]):
            name = f"{what} {cut} {key}"
            for element in (E2M1, E4M3):
                arguments = (x, element, segments, key)
                yield Call("blockfloat.encode_mx", f"{name} {element.bits} bits", arguments)
            yield Call("blockfloat.encode_nv", name, (x, segments, key))


def wrong(codes: Tensor, places: set[int], value: int) -> Iterator[Tensor]:
    """Yield copies of `codes` with `value` at one place."""
    for place in places if codes.numel() else ():
        other = codes.clone()
        other[place] = value
        yield other


def written(codes: Tensor, element: Element) -> Tensor:
    return codes.byte() if element.bits == 8 else packing.pack(codes, 4)


def decoded(n: int, cut: str, segments: Segments) -> Iterator[Call]:
    places, random = {0, n // 2, n - 1}, torch.Generator().manual_seed(n)
    for element in (E2M1, E4M3):
        half = 1 << element.bits - 1
        numbers = torch.arange(n).remainder(2 * len(element.values))
        codes = (
            numbers.remainder(len(element.values)) + numbers.div(len(element.values)).int() * half
        )
        zeros = torch.arange(n).remainder(2) * half
        m = len(segments)
        least, most = 27 - element.exponent, 254 - element.exponent
        scales = torch.randint(least, most + 1, (m,), generator=random).byte()
        none = torch.zeros(m, dtype=torch.uint8)

        def call(what: str, codes: Tensor, scales: Tensor, element: Element = element) -> Call:
            parts = written(codes, element), scales
            return Call("blockfloat.decode_mx", f"{cut} {what}", (parts, element, segments, ""))

        yield call("", codes, scales)
        yield call("zeros", zeros, none)
        for other in wrong(zeros, places, 1):
            yield call("scale 0, a code", other, none)
        if element is E4M3:
            for other in (*wrong(codes, places, 127), *wrong(codes, places, 255)):
                yield call("NaN", other, scales)
        for scale in (1, least - 1, least, most, most + 1, 255):
            for other in wrong(scales, {m // 2}, scale):
                yield call(f"scale {scale}", codes, other)
        if element is E2M1:
            yield from shared(n, cut, segments, codes, zeros)


def shared(n: int, cut: str, segments: Segments, codes: Tensor, zeros: Tensor) -> Iterator[Call]:
    random = torch.Generator().manual_seed(n)
    blocks, m = blockfloat.block_count(segments), len(segments)
    scales = torch.randint(1, 127, (blocks,), generator=random).byte()
    tops = torch.rand(m, generator=random) * 3
    tops[1::5], tops[2::5] = 2.0**-100, blockfloat.FLOAT_MAX

    def call(what: str, *parts: Tensor) -> Call:
        return Call("blockfloat.decode_nv", f"{cut} {what}", (parts, segments, ""))

    words, none = written(codes, E2M1), torch.zeros(blocks, dtype=torch.uint8)
    yield call("", words, scales, tops)
    yield call("zeros", written(zeros, E2M1), none, torch.zeros(m))
    for other in wrong(zeros, {0, n // 2, n - 1}, 1):
        yield call("scale 0, a code", written(other, E2M1), none, torch.zeros(m))
    for scale in (0, 126, 127, 129):
        for other in wrong(scales, {0, blocks // 2, blocks - 1}, scale):
            yield call(f"scale {scale}", words, other, tops)
    for top in (torch.nan, torch.inf, -1.0, -0.0, 2.0**-101):
        for other in wrong(tops, {m // 2}, top):
            yield call(f"top {top}", words, scales, other)


def cases(n: int) -> Iterator[Call]:
    blocks = [(f"blocks of {size}", Segments.of([(n,)], size)) for size in (32, 20)]
    for cut, segments in (*segmentations(n), *blocks):
        yield from encoded(n, cut, segments)
        yield from decoded(n, cut, segments)
