"""Random rotations, and their elements as centroids of N(0, 1)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gcbench.core.compressor import Segments
from gcbench.ops import packing
from gcbench.ops.eden import MASK, MAX_BITS
from kernel_cases import KEYS, Call, nonfinite, segmentations, values


def cases(n: int) -> Iterator[Call]:
    blocks = [(f"blocks of {size}", Segments.of([(n,)], size)) for size in (1024, 100, 3)]
    for index, (cut, segments) in enumerate((*segmentations(n), *blocks)):
        inputs = [*values(n), *nonfinite(n)]
        for number, (what, x) in enumerate(inputs if n <= 5000 else inputs[:2] + inputs[-2:]):
            turn = index + number
            bits, rotations = 1 + turn % MAX_BITS, 1 + turn // 2 % 2
            for least in (False, True):
                code = x, bits, rotations, least, segments, KEYS[turn % 2]._replace(stream=0)
                yield Call("eden.encode", f"{what} {cut} {code[1:4]}", code)
        for bits in range(1, MAX_BITS + 1):
            yield from payloads(n, cut, segments, bits, 1 + (bits + index) % 2)


def payloads(n: int, cut: str, segments: Segments, bits: int, rotations: int) -> Iterator[Call]:
    codes = torch.arange(n).mul(7).remainder(2**bits)
    scales = torch.rand(len(segments), generator=torch.Generator().manual_seed(n)) * 3
    scales[1::5], scales[3::5] = 2.0**-100, 3e38
    address = torch.tensor([5, MASK, 4321, 2**13], dtype=torch.int32)

    def decoded(what: str, codes: Tensor, scales: Tensor, address: Tensor = address) -> Call:
        parts = packing.pack(codes, bits), scales, address
        name = f"{cut} {bits} bits, {rotations} rotations, {what}"
        return Call("eden.decode", name, (parts, bits, rotations, segments, ""))

    yield decoded("", codes, scales)
    zeros, none = torch.full((n,), 2 ** (bits - 1) - 1), torch.zeros(len(segments))
    yield decoded("zeros", zeros, none)
    for place in {0, n // 2, n - 1} if n else ():
        coded = zeros.clone()
        coded[place] += 1
        yield decoded(f"scale 0, code at {place}", coded, none)
    for value in (torch.nan, torch.inf, -1.0, -0.0, 2.0**-101):
        wrong = scales.clone()
        wrong[len(wrong) // 2 :] = value
        yield decoded(f"scale {value}", codes, wrong)
    for place in range(4):
        wrong = address.clone()
        wrong[place] = (-1, MASK + 1)[place % 2]
        yield decoded(f"address {place}", codes, scales, wrong)
