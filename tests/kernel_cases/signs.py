"""Signs: packing, values, votes, 1-bit codes with the means of their classes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.compressor import Segments
from kernel_cases import KEYS, Call, nonfinite, segmentations, values


def cases(n: int) -> Iterator[Call]:
    inputs = [*values(n), *nonfinite(n)]
    if n > 5000:  # what is left: several ranges of tiles
        inputs = [(what, x) for what, x in inputs if what in ("mixed", "nan")]
    for what, x in inputs:
        for bits in (1, 2):
            yield Call("sign.pack", f"{what} {bits}", (x, bits))
    cuts = [*segmentations(n), *more_segmentations(n)]
    for cut, segments in cuts:
        for what, x in inputs:
            name = f"{what} {cut}"
            if cut in ("model", "tensors"):
                yield Call("sign.pack_above", name, (x, 0.7, segments))
            residual = x.flip(0).mul(0.7)
            for kind in ("scaled", "class"):
                yield Call(f"sign.{kind}_encode", name, (x, segments))
                yield Call(f"sign.{kind}_feedback", name, (x, residual, segments, "method"))
        yield from decodings(n, cut, segments)
    yield from votes(n)


def more_segmentations(n: int) -> Iterator[tuple[str, Segments]]:
    """Yield segments that threads' ranges cut, many in a tile, and one too long for a cache."""
    yield "1000s", Segments.of([(n,)], 1000)
    yield "100s", Segments.of([(n,)], 100)
    edges = (0, 0, 7, 5000, 5000, 50_000, n - 1)
    yield "long", Segments((*sorted(min(edge, max(n, 0)) for edge in edges if edge >= 0), n, n))


def decodings(n: int, cut: str, segments: Segments) -> Iterator[Call]:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    x[n // 4 : n // 3].abs_()
    x[n // 2 : n // 2 + 1500].abs_().neg_()
    total = x.flip(0)
    words, low, high = ops.sign.class_encode(x, segments)
    scale = high - low
    scale[::3] = 0
    scale[1::3] = -0.0
    m = len(segments)
    parts: dict[str, tuple[Tensor, ...]] = {"class": (low, high), "scaled": (scale,)}
    for kind, means in parts.items():
        decode = f"sign.{kind}_decode"
        yield Call(decode, cut, (words, *means, segments, "method"))
        for count in (1, 3):
            yield Call(
                decode,
                f"{cut} onto, count {count}",
                (words, *means, segments, "method"),
                {"total": total, "count": count},
            )
        yield from several(n, cut, kind, segments)
        yield Call(decode, f"{cut} truncated", (words[1:], *means, segments, "method"))
        yield Call(decode, f"{cut} all bits", (words | -1, *means, segments, "method"))
        yield Call(decode, f"{cut} no bits", (words & 0, *means, segments, "method"))
        places = {m // 2, m - 1} if m and n <= 5000 else ()
        for place, bad in product(places, (torch.nan, -torch.inf, 0.5, -0.5)):
            for k in range(len(means)):
                wrong = [mean.clone() for mean in means]
                wrong[k][place] = bad
                name = f"{cut} value {k} of segment {place} is {bad}"
                yield Call(decode, name, (words, *wrong, segments, "method"))
    # One element of the other class, at the beginning, the end and a tile's edge of a segment.
    for s in {m // 2, 0 if n <= 5000 else m // 2} if m else ():
        start, stop = segments.offsets[s : s + 2]
        ones = (torch.ones(n), torch.full((n,), -1.0))
        for place in {start, (start + stop) // 2 // 1024 * 1024, stop - 1, None}:
            for x in ones:
                x = x.clone()
                if place is not None and start <= place < stop:
                    x[place].neg_()
                high = torch.ones(len(segments))
                name = f"{cut} all but {place} of {start}:{stop}"
                yield Call(
                    "sign.class_decode", name, (ops.sign.pack(x), -high, high, segments, "m")
                )
                only = (ops.sign.pack(x), -(torch.arange(len(segments)) == s).float(), high * 0)
                yield Call("sign.class_decode", f"{name}, one value", (*only, segments, "m"))


def several(n: int, cut: str, kind: str, segments: Segments) -> Iterator[Call]:
    """Several payloads, alike in nothing, of which one in turn is wrong; more than one launch."""
    parts = []
    for rank, count in enumerate((1, 3, 1, 2, 1, 1, 1, 1)):
        x = torch.randn(n, generator=torch.Generator().manual_seed(rank)) * 2.0 ** (10 * rank)
        start, stop = segments.offsets[len(segments) // 2 :][:2] if len(segments) else (0, 0)
        x[start:stop] = (0, 1, -1)[rank % 3]  # a class that is empty beside others
        words, *values = (ops.sign.class_encode if kind == "class" else ops.sign.scaled_encode)(
            x, segments
        )
        parts.append((words, tuple(values), count))
    for number in (1, 3, 8) if n <= 5000 else (3,):
        yield Call("sign.mean", f"{cut} {kind} of {number}", (parts[:number], segments, "m"))
    if n in (33, 1025):
        many = (parts * 9)[2:]
        yield Call("sign.mean", f"{cut} {kind} of 70", (many, segments, "m"))
        many[-1] = (many[-1][0] & 0, *many[-1][1:])
        yield Call("sign.mean", f"{cut} {kind} of 70, the last one wrong", (many, segments, "m"))
    for number, place in product(range(7), (0, 1, 2)):
        words, values, count = parts[place]
        middle = torch.arange(len(segments)) == len(segments) // 2
        what, wrong = (
            ("all bits", (words | -1, values)),
            ("no bits", (words & 0, values)),
            ("few", (words[1:], values)),
            ("NaN", (words, (*values[:-1], values[-1] + torch.nan * middle))),
            ("negative", (words, tuple(-value for value in values))),
            ("one up", (words, (*values[:-1], values[-1] + middle.float()))),
            ("one down", (words, (values[0] - middle.float(), *values[1:]))),
        )[number]
        worse = [*parts[:place], (*wrong, count), *parts[place + 1 : 3]]
        if n <= 5000 or place == number % 3:
            yield Call("sign.mean", f"{cut} {kind} {what} at {place}", (worse, segments, "m"))


def votes(n: int) -> Iterator[Call]:
    for counts, bits in (
        ((1,), (1,)),
        ((1,) * 2, (1,) * 2),
        ((1,) * 8, (1,) * 8),
        ((1,) * 64, (1,) * 64),
        ((5,), (1,)),
        ((1, 3, 2), (1, 1, 1)),
        ((1,), (2,)),
        ((1,) * 4, (2,) * 4),
        ((1, 2, 1, 3), (1, 2, 1, 2)),
        ((2**29, 7), (1, 2)),
    ):
        if n > 5000 and len(counts) not in (1, 3, 4):
            continue
        words = [payload(n, size, seed) for seed, size in enumerate(bits)]
        name = f"{counts[:4]} of {bits[:4]} bits, {len(counts)}"
        args = (words, counts, bits, n, "method")
        yield Call("sign.vote", name, args, {"width": 1})
        if len(counts) < 5:
            for key in KEYS:
                yield Call("sign.vote", f"{name} {key}", args, {"width": 1, "coin": key})
        for quorum in (1, 3, 9):
            yield Call("sign.vote", f"{name} quorum {quorum}", args, {"width": 2, "quorum": quorum})
        for what, wrong in (
            ("truncated", words[-1][1:]),
            ("all bits", words[-1] | -1),
            ("a word of ones", broken(words[-1])),
        ):
            args = ([*words[:-1], wrong], counts, bits, n, "method")
            if len(counts) < 5:
                yield Call("sign.vote", f"{name} {what}", args, {"width": len(counts) % 2 + 1})
    for counts in ((0, 1), (2**30 - 1, 1)):
        args = ([payload(n, 1, 0)] * 2, counts, (1, 1), n, "method")
        yield Call("sign.vote", f"counts {counts}", args, {"width": 1})
    for bits in (1, 2):
        words = payload(n, bits, 3)
        for what, settings in (
            ("", words),
            ("truncated", words[1:]),
            ("all bits", words | -1),
            ("a word of ones", broken(words)),
            *after_last(words, n, bits),
        ):
            yield Call("sign.decode", f"{bits} {what}", (settings, bits, n, "method"))


def after_last(words: Tensor, n: int, bits: int) -> Iterator[tuple[str, Tensor]]:
    """Yield payloads with one more bit set, in the last words."""
    for back in range(1, min(4, len(words)) + 1):
        for bit in range(0, 32, 5):
            wrong = words.clone()
            wrong[-back] |= -(2**31) if bit == 31 else 1 << bit
            yield f"bit {bit} of word -{back}", wrong


def payload(n: int, bits: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return ops.packing.pack(torch.randint(0, bits + 1, (n,), generator=generator), bits)


def broken(words: Tensor) -> Tensor:
    """Set all bits of one word in the middle."""
    words = words.clone()
    words[len(words) // 2 : len(words) // 2 + 1] = -1
    return words
