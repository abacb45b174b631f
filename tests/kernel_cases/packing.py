"""Codes to words and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gcbench import ops
from kernel_cases import Call


def cases(n: int) -> Iterator[Call]:
    draw = torch.Generator().manual_seed(n)
    for bits in range(1, 17):
        codes = torch.randint(0, 2**bits, (n,), generator=draw)
        kinds = [torch.int32, torch.int64] + [torch.int8] * (bits < 8) + [torch.bool] * (bits == 1)
        for dtype in kinds:
            yield Call("packing.pack", f"{bits} bits of {dtype}", (codes.to(dtype), bits))
        words = ops.packing.pack(codes, bits)
        yield Call("packing.unpack", f"{bits} bits", (words, bits, n))
        # bits set after the last code, as a corrupt payload may have them
        yield Call("packing.unpack", f"{bits} bits, all set", (torch.full_like(words, -1), bits, n))
        yield Call("packing.unpack", f"{bits} bits, too short", (words[1:], bits, n + (n == 0)))
    stack = torch.randint(
        -(2**31), 2**31, (2, 3, ops.packing.packed_words(n, 3)), dtype=torch.int32
    )
    yield Call("packing.unpack", "a stack", (stack, 3, n))
    yield Call("packing.pack", "every second code", (torch.arange(2 * n)[::2] % 8, 3))
