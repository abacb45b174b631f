"""Levels of a norm (QSGD)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gcbench import ops
from gcbench.core.compressor import TILE, Segments
from kernel_cases import CORRELATED, KEYS, Call, nonfinite, segmentations, values

LEVELS = (1, 3, 7, 15, 100, 127, 4093, 32767)


def cases(n: int) -> Iterator[Call]:
    few = n > 5000
    for index, (cut, segments) in enumerate(segmentations(n)):
        inputs = [*values(n), *nonfinite(n)]
        for number, (what, x) in enumerate(inputs[index::4] if few else inputs):
            levels, norm = LEVELS[(number + index) % 8], ops.levels.NORMS[(number + index) % 2]
            keys = KEYS[0], KEYS[1], CORRELATED[index % 4]
            key, name = keys[(number // 2) % 3], f"{what} {cut} {levels} {norm}"
            yield Call("levels.norms", name, (x, segments, norm, levels))
            norms = ops.levels.norms(x, segments, norm, levels)
            yield Call("levels.encode", name, (x, norms, levels, "fixed", segments, key))
            yield Call("levels.encode_max", name, (x, levels, segments, key))
            yield Call("levels.codes", name, (x, norms, levels, segments, key))
        for levels in (7, 100)[index % 2 :][:1] if few else LEVELS:
            yield from borders(n, cut, segments, levels)
            yield from payloads(n, cut, segments, levels)
        for levels in (7, 3, 100, 15)[index:][:1] if few else LEVELS:
            yield from means(n, cut, segments, levels)
        for coding in () if few else ops.levels.CODINGS[1:]:
            yield Call(
                "levels.encode", f"{cut} {coding}", (x, norms * 0 + 9, 9, coding, segments, key)
            )
    if n == 1025:
        yield from rows()
    if not few:
        yield from every_quotient(n)
    if n >= TILE:
        yield from extreme_draws()


def borders(n: int, cut: str, segments: Segments, levels: int) -> Iterator[Call]:
    """Elements on, right below and right above a level, and where their own draw just decides."""
    norms = torch.rand(len(segments), generator=torch.Generator().manual_seed(levels)) + 0.5
    norms[::3] = levels * 2.0**-100
    norms[1::3] *= 2.0**127
    key = KEYS[levels % 2]
    one = ops.levels.values(torch.full((n,), levels), norms, levels, segments)
    code = torch.randint(0, levels, (n,), generator=torch.Generator().manual_seed(levels))
    below, above = (ops.levels.values(code + k, norms, levels, segments) for k in (0, 1))
    draws = ops.random.draws24(key, n).float().add_(0.5).mul_(2.0**-24)
    border = (below + draws * (above - below)).clamp_(max=one)
    for what, size in (("level", above), ("border", border)):
        size[1::3] = size[1::3].nextafter(torch.tensor(0.0))
        size[2::3] = size[2::3].nextafter(one[2::3])
        x = size.copysign(torch.randn(n, generator=torch.Generator().manual_seed(n)))
        arguments = (x, norms, levels, "fixed", segments, key)
        yield Call("levels.encode", f"{what} {cut} {levels}", arguments)


def payloads(n: int, cut: str, segments: Segments, levels: int) -> Iterator[Call]:
    """Good payloads, each alone and onto others, and those that no encoder sends."""
    generator = torch.Generator().manual_seed(levels)
    x = torch.randn(n, generator=generator)
    onto = torch.randn(n, generator=generator)
    short = levels in (7, 100)
    for norm in ops.levels.NORMS:
        norms = ops.levels.norms(x, segments, norm, levels)
        for coding in ops.levels.CODINGS if short and n <= 5000 else ("fixed",):
            words = ops.levels.encode(x, norms, levels, coding, segments, KEYS[0])
            rest = (norm, levels, coding, segments)
            name = f"{norm} {levels} {coding} {cut}"
            yield Call("levels.decode", name, (words, norms, *rest))
            for count in (1, 3):
                more = {"onto": onto, "count": count}
                yield Call("levels.decode", f"{name} onto {count}", (words, norms, *rest), more)
            if len(words) and short:
                flipped = words.clone()
                flipped[len(words) // 2] ^= -1
                yield Call("levels.decode", f"{name} flipped", (flipped, norms, *rest))
                yield Call("levels.decode", f"{name} cut", (words[1:], norms, *rest))
                yield Call("levels.decode", f"{name} bytes", (words.float(), norms, *rest))
        if short and len(segments):
            words = ops.levels.encode(x, norms, levels, "fixed", segments, KEYS[0])
            rest = (norm, levels, "fixed", segments)
            for value in (torch.nan, torch.inf, -1.0, 0.0, -0.0, 2.0**-101, 1e-42):
                wrong = norms.clone()
                wrong[len(segments) // 2] = value
                name = f"{norm} {levels} {cut} norm {value}"
                yield Call("levels.decode", name, (words, wrong, *rest))
            yield Call("levels.decode", f"{norm} {levels} {cut} few", (words, norms[1:], *rest))
            yield from unreached(norm, levels, cut, segments, n)


def means(n: int, cut: str, segments: Segments, levels: int) -> Iterator[Call]:
    """Several payloads, alike in nothing, of which one in turn is wrong; more than one launch."""
    norm = ops.levels.NORMS[levels in (3, 15, 127)]
    parts = []
    for rank, count in enumerate((1, 3, 1, 2)):
        x = torch.randn(n, generator=torch.Generator().manual_seed(rank)) * 2.0 ** (10 * rank)
        start, stop = segments.offsets[len(segments) // 2 :][:2] if len(segments) else (0, 0)
        x[start:stop] *= rank % 2  # a norm of 0 beside others
        norms = ops.levels.norms(x, segments, norm, levels)
        words = ops.levels.encode(x, norms, levels, "fixed", segments, KEYS[rank % 2])
        parts.append((words, norms, count))
    rest, name = (norm, levels, "fixed", segments), f"{norm} {levels} {cut}"
    yield Call("levels.mean", f"{name} of 1", (parts[:1], *rest))
    yield Call("levels.mean", f"{name} of 4", (parts, *rest))
    if levels in (7, 100) and n in (33, 1025):
        many = (parts * 18)[2:]
        yield Call("levels.mean", f"{name} of 70", (many, *rest))
        zeros = ops.packing.pack(torch.full((n,), levels), ops.levels.bits(levels))
        many[-1] = (zeros, *many[-1][1:])  # whose norms are not reached
        yield Call("levels.mean", f"{name} of 70, the last one wrong", (many, *rest))
        for coding in ops.levels.CODINGS[1:]:
            codes = [
                ops.packing.unpack(words, ops.levels.bits(levels), n) - levels
                for words, _, _ in parts
            ]
            streams = [
                (
                    ops.levels.pack(code, levels, coding),
                    norms,
                    count,
                )
                for code, (_, norms, count) in zip(codes, parts, strict=True)
            ]
            yield Call("levels.mean", f"{name} {coding}", (streams, norm, levels, coding, segments))
    for number in range(7):
        place = (number + levels) % 4
        words, norms, count = parts[place]
        middle = (torch.arange(len(words)) == len(words) // 2).int()
        what, wrong = (
            ("flipped", (words ^ -middle, norms)),
            ("halved", (words, norms / 2)),
            ("negative", (words, -norms)),
            ("cut", (words[1:], norms)),
            ("few", (words, norms[1:])),
            ("double", (words, norms.double())),
            ("of no norm", (words, norms * 0)),
        )[number]
        worse = [*parts[:place], (*wrong, count), *parts[place + 1 :]]
        yield Call("levels.mean", f"{name} {what} at {place}", (worse, *rest))
    yield from unreached_means(n, cut, segments, levels)


def rows() -> Iterator[Call]:
    """Means over segments of 1 to 9 whole rows of 32, which begin anywhere in the packed words."""
    edges = torch.tensor([*range(1, 10), *range(9, 0, -1)]).cumsum(0).mul(32).tolist()
    for levels in (1, 7, 127, 32767):  # whose codes fill words
        yield from means(edges[-1], "rows", Segments((0, *edges)), levels)


def unreached_means(n: int, cut: str, segments: Segments, levels: int) -> Iterator[Call]:
    """The calls of `unreached`, with such a payload as one of three."""
    if levels not in (7, 100) or not len(segments):
        return
    for norm in ops.levels.NORMS:
        for number, call in enumerate(unreached(norm, levels, cut, segments, n)):
            words, norms, *rest = call.args
            ends = torch.full((n,), 2 * levels)
            for length, start in zip(segments.lengths, segments.offsets, strict=False):
                ends[start : start + length : 2] = 0
            several = [(ops.packing.pack(ends, ops.levels.bits(levels)), norms, 1)] * 2
            several.insert(number % 3, (words, norms, 2))
            what = f"{call.what}, payload {number % 3}"
            yield Call("levels.mean", what, (several, *rest))


def unreached(norm: str, levels: int, cut: str, segments: Segments, n: int) -> Iterator[Call]:
    """One segment's codes all below the top, or one code above it, wherever the segment lies."""
    norms = torch.tensor([float(length > 0) for length in segments.lengths])
    offsets = torch.tensor(segments.offsets)
    places = [i for i, length in enumerate(segments.lengths) if length]
    for place in {places[0], places[len(places) // 2], places[-1]} if places else ():
        start, stop = (int(offset) for offset in offsets[place : place + 2])
        for what, top in (("below", levels - 1), ("above", levels + 1)):
            codes = torch.full((n,), -levels)
            codes[start:stop] = top if what == "below" else levels
            codes[(start + stop) // 2] = top
            words = ops.packing.pack(codes + levels, ops.levels.bits(levels))
            arguments = (words, norms, norm, levels, "fixed", segments)
            yield Call("levels.decode", f"{norm} {levels} {cut} {what} at {place}", arguments)


def every_quotient(n: int) -> Iterator[Call]:
    """Codes over levels at random, of which a product by a reciprocal misses every tenth."""
    generator = torch.Generator().manual_seed(n)
    segments = Segments((0, n))
    for levels in torch.randint(1, 2**15, (20,), generator=generator).tolist():
        codes = torch.randint(-levels, levels + 1, (n,), generator=generator)
        words = ops.packing.pack(codes + levels, ops.levels.bits(levels))
        norms = torch.full((1,), 1.0)
        arguments = (words, norms, "2", levels, "fixed", segments)
        yield Call("levels.decode", f"quotients of {levels}", arguments)


def extreme_draws() -> Iterator[Call]:
    """A tile right beside levels, one element with the smallest or the largest of all draws.

    Only there is the neighbour of a level rounded another way if the level is guessed wrong.
    """
    segments = Segments((0, TILE))
    generator = torch.Generator().manual_seed(0)
    for place, draw in ((8_735_346, 0), (15_286_095, 2**24 - 1)):
        key = KEYS[0]._replace(offset=place - place % TILE)
        assert int(ops.random.draws24(key, TILE)[place % TILE]) == draw
        for levels in (1, 2, 3, 6, 7, 13, 15, 100, 127, 500, 4093):
            for _ in range(4):
                norms = torch.rand(1, generator=generator) + 0.5
                code = torch.randint(1, levels + 1, (TILE,), generator=generator)
                code[:: TILE - 1] = levels
                level = ops.levels.values(code, norms, levels, segments)
                toward = norms if draw == 0 else norms * 0
                x = torch.where(code < levels, level.nextafter(toward), level)
                arguments = (x, norms, levels, "fixed", segments, key)
                yield Call("levels.encode", f"{levels} levels, draw {draw}", arguments)
    # Right above these levels a product by the reciprocal of the step falls below them.
    key = KEYS[0]._replace(offset=8_735_346 - 8_735_346 % TILE)
    for levels, number, norm in ((100, 59, 0.704696774482727), (4093, 2952, 0.9588109850883484)):
        norms = torch.tensor([norm])
        level = ops.levels.values(torch.full((TILE,), number), norms, levels, segments)
        arguments = (level.nextafter(norms), norms, levels, "fixed", segments, key)
        yield Call("levels.encode", f"{levels} levels, draw 0, a low guess", arguments)
