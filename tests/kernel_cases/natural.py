"""Natural compression."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.compressor import TILE
from kernel_cases import CORRELATED, KEYS, Call, nonfinite, values


def cases(n: int) -> Iterator[Call]:
    for key in CORRELATED:
        yield Call("natural.encode", f"normal {key}", (next(values(n))[1], key))
    for key in KEYS:
        for what, x in (*values(n), *nonfinite(n), *edges(n, key)):
            yield Call("natural.encode", f"{what} {key}", (x, key))
    if n >= TILE:
        # The element of index 8,735,346 draws zero, which rounds no power of two up.
        key = KEYS[0]._replace(offset=8_735_346 - 8_735_346 % TILE)
        yield Call("natural.encode", "powers of two, draw 0", (torch.ones(TILE), key))
    good = payload(n, 0)
    yield Call("natural.decode", "", (good, n, "method"))
    yield Call("natural.decode", "truncated", (good[1:], n + (n == 0), "method"))
    yield Call("natural.decode", "bytes", (good.view(torch.uint8), n, "method"))
    for place in {0, n // 2, n - 1} if n else ():
        for code in (0x100, 0xFF, 0x1FF):
            wrong = payload(n, 0, {place: code})
            yield Call("natural.decode", f"code {code:#x} at {place}", (wrong, n, "method"))
    if n % 32:  # what lies after the last code is not read
        after = good.clone()
        after[-1] |= -1 << 31
        yield Call("natural.decode", "a bit after the last", (after, n, "method"))
    for counts in ((1,), (3,), (1, 1), (1, 1, 1), (2, 3, 1), (1,) * 8, (1,) * 70):
        if n > 5000 and len(counts) > 3:
            continue
        name = f"of {counts[:4]}, {len(counts)}"
        parts = [(payload(n, seed), count) for seed, count in enumerate(counts)]
        yield Call("natural.mean", name, (parts, n, "method"))
        for seed, (what, code) in enumerate((("infinity", 0xFF), ("minus zero", 0x100))):
            place = (seed + 1) * n // 3
            wrong = payload(n, len(counts), {place: code} if n else {})
            worse = [*parts[:-1], (wrong, counts[-1])]
            yield Call("natural.mean", f"{name} {what}", (worse, n, "method"))
        short = [*parts[:-1], (parts[-1][0][1:], counts[-1])]
        yield Call("natural.mean", f"{name} truncated", (short, n, "method"))


def edges(n: int, key) -> Iterator[tuple[str, Tensor]]:
    """Yield elements that their own draw just rounds up or not, and the ends of the range."""
    draws = ops.random.draws24(key, n)
    generator = torch.Generator().manual_seed(n)
    exponent = torch.randint(0, 256, (n,), generator=generator, dtype=torch.int32) << 23
    for what, fraction in (("at the draw", draws >> 1), ("above the draw", (draws >> 1) + 1)):
        x = (exponent | fraction & 0x7FFFFF).view(torch.float32)
        yield what, x.copysign(torch.randn(n, generator=generator))
    ends = torch.tensor([2.0**-126, 2.0**-149, 2.0**127, 2.0**-126 - 2.0**-149, 3.4e38, 1.0])
    yield "ends", ends.repeat(n // 6 + 1)[:n].copysign(torch.randn(n, generator=generator))


def payload(n: int, seed: int, wrong: dict[int, int] | None = None) -> Tensor:
    """Return words of random codes; `wrong` are those at some places."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(0, 255, (n,), generator=generator)
    sign = torch.randint(0, 2, (n,), generator=generator) * (exponent > 0)
    codes = sign << 8 | exponent
    for place, code in (wrong or {}).items():
        codes[place] = code
    return ops.packing.pack(codes, 9)
