"""Elias omega streams."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import torch

from gcbench import ops
from kernel_cases import Call


def alike(n: int) -> Iterator[Call]:
    """Codes that repeat: who begins to read between two of them may never find a beginning."""
    index = torch.arange(n)
    for name, codes, levels in (
        ("all 2", torch.full((n,), 2), 3),
        ("all -14", torch.full((n,), -14), 14),  # the most of which four take 32 bits
        ("all 15", torch.full((n,), 15), 15),
        ("all -127", torch.full((n,), -127), 127),  # the most of which two do
        ("1 and -3 in turn", 1 - 4 * (index % 2), 3),
        ("of 20 bits and more", (index * 7919 % 200_001) - 100_000, 100_000),
        ("every fifth -1", -(index % 5 == 0).int(), 1),
        ("records of 37 bits", (index % 130 == 0) * 32767, 32767),
    ):
        for form in ("dense", "sparse"):
            words = getattr(ops.bitstream, f"omega_{form}_write")(codes.int(), levels)
            yield Call(f"bitstream.omega_{form}_write", name, (codes.int(), levels))
            yield Call(f"bitstream.omega_{form}_read", name, (words, n, levels))


def cases(n: int) -> Iterator[Call]:
    yield from alike(n)
    generator = torch.Generator().manual_seed(n)
    for levels, share in ((1, 0.5), (7, 1.0), (7, 0.01), (300, 0.3), (32767, 1.0), (127, 0.0)):
        if n > 5000 and levels > 7:
            continue
        size = torch.randint(1, levels + 1, (n,), generator=generator)
        sign = 1 - 2 * torch.randint(0, 2, (n,), generator=generator)
        codes = (size * sign * (torch.rand(n, generator=generator) < share)).int()
        for form in ("dense", "sparse"):
            write, read = f"bitstream.omega_{form}_write", f"bitstream.omega_{form}_read"
            name = f"{levels} levels, {share} not zero"
            yield Call(write, name, (codes, levels))
            yield Call(write, f"{name}, long", (codes.long(), levels))
            words = attrgetter(write)(ops)(codes, levels)
            yield Call(read, name, (words, n, levels))
            for what, other in (
                ("cut", words[:-1]),
                ("longer", torch.cat([words, words[:1]])),
                ("of ones", torch.full_like(words, -1)),
                ("of zeros", torch.zeros_like(words)),
                ("of floats", words.float()),
            ):
                yield Call(read, f"{name} {what}", (other, n, levels))
            yield Call(read, f"{name}, one code less", (words, max(0, n - 1), levels))
            yield Call(read, f"{name}, one code more", (words, n + 1, levels))
            yield Call(read, f"{name}, of fewer levels", (words, n, max(1, levels // 2)))
            for place in (0, len(words) // 3, len(words) - 1) if len(words) else ():
                flipped = words.clone()
                flipped[place] ^= 1 << int(torch.randint(0, 31, (1,), generator=generator))
                yield Call(read, f"{name} flipped at {place}", (flipped, n, levels))
