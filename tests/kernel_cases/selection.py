"""Selection of the largest elements, positions on the wire, scatter and gather."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.compressor import TILE, Key, Segments
from gcbench.ops.selection import gaps_low_bits
from kernel_cases import KEYS, Call, nonfinite, segmentations, values

WRAPPING = Key(5, 1, 2, 2**34 - 1000)
"""The low word of the counter of whole words wraps within its elements."""
BOUNDS = (0.0, 1e-50, 1e-42, 0.01, 0.5, 2.5, 1e9, 3e38, 1e39)
"""Of magnitudes; as a float32 the second is 0, and the last would be infinite."""
DEVICE = {"device": "cpu"}
"""Where random positions are made, unless a test says another device."""


def misleading(n: int) -> Iterator[tuple[str, Tensor]]:
    """Yield inputs whose sample says little about where the largest elements are."""
    yield "rising", torch.arange(n, dtype=torch.float32)
    spike = torch.zeros(n)
    spike[n // 2 : n // 2 + n // 50] = torch.arange(n // 50, dtype=torch.float32) + 1
    yield "spike", spike
    rare = torch.ones(n)
    rare[n - n // 300 :] = -2.0
    yield "rare", rare
    last = torch.randn(n, generator=torch.Generator().manual_seed(n))
    last.view(torch.int32)[::7] = -1  # NaNs, and above their magnitude there is no integer
    yield "last", last
    powers = 2.0 ** -(torch.arange(n) % 37).float()
    yield "powers", powers
    if n > 4096:  # what the kernel samples of one segment is large, and nothing else is
        size = max(1024, min(n // 64, 4096))
        index = torch.arange(size)
        stride = n // size
        sampled = torch.ones(n)
        sampled[index * stride + ((index * 2654435761 & 0xFFFFFFFF) * stride >> 32)] = 3.0
        yield "sampled", sampled


def cases(n: int) -> Iterator[Call]:
    for cut, segments in segmentations(n):
        few = n > 5000 and cut in ("groups", "columns")
        for inputs, ratios in (
            (values(n), (0.01, 0.15) if few else (0.001, 0.01, 0.15, 1.0)),
            ((*nonfinite(n), *misleading(n)), (0.01, 0.15)),
        ):
            for (what, x), ratio in product(inputs, ratios):
                runs = ops.selection.kept_runs(segments, ratio)
                yield Call("selection.largest_elements", f"{what} {cut} {ratio}", (x, runs))
        for (what, x), bound in product((*values(n), *nonfinite(n)), BOUNDS):
            yield Call("selection.reaching", f"{what} {cut} {bound}", (x, segments, bound))
        for ratio in (0.001, 0.01, 0.15, 1.0):
            runs = ops.selection.kept_runs(segments, ratio)
            for key in (*KEYS, WRAPPING):
                yield Call(
                    "selection.random_positions", f"{cut} {ratio} {key}", (key, runs), DEVICE
                )
            x = torch.randn(n, generator=torch.Generator().manual_seed(n))
            selected = ops.selection.largest(ops.selection.magnitude_order(x), runs)
            yield from wire(n, selected, runs, f"{cut} {ratio}")
            yield Call("selection.gather", f"{cut} {ratio}", (x, selected))
            some = x[selected].mul_(0.3)
            yield Call("selection.scatter", f"{cut} {ratio}", (some, selected, n))
            other = ops.selection.largest(ops.selection.magnitude_order(x.roll(3)), runs)
            many = [(some, selected), (x[other], other), (-some, selected)]
            yield Call("selection.scatter_mean", f"{cut} {ratio}", (many, n, 5))
            yield Call("selection.scatter_mean", f"{cut} {ratio} one", (many[:1], n, 1))
    first = Segments((0, n)).shard(n // 3, n)[0]
    yield Call(
        "selection.random_positions",
        "shard",
        (KEYS[0], ops.selection.kept_runs(first, 0.3)),
        DEVICE,
    )
    yield Call(
        "selection.scatter", "into", (some, selected, n), {"out": torch.full((n,), torch.nan)}
    )


def long(n: int) -> Iterator[Call]:
    """Yield selections of one segment, long enough for several threads."""
    runs = [ops.selection.kept_runs(Segments((0, n)), ratio) for ratio in (1e-5, 0.01, 0.3, 0.97)]
    for what, x in (*values(n), *nonfinite(n), *misleading(n)):
        for selected in runs:
            yield Call("selection.largest_elements", f"{what} {selected}", (x, selected))
        for bound in (0.5, 3.0, 1e9):
            yield Call("selection.reaching", f"{what} {bound}", (x, Segments((0, n)), bound))
    for selected in runs:
        yield Call("selection.random_positions", f"{selected}", (WRAPPING, selected), DEVICE)


def wire(
    n: int, selected: Tensor, runs: Sequence[ops.selection.KeptRun], what: str
) -> Iterator[Call]:
    """Yield both ways of each coding; unpacked also with bits that are wrong in different ways."""
    generator = torch.Generator().manual_seed(n)
    for coding in ("smallest", *ops.selection.POSITION_CODINGS):
        parts = ops.selection.pack_positions(selected, n, coding)
        yield Call("selection.pack_positions", f"{what} {coding}", (selected, n, coding))
        yield Call("selection.unpack_positions", f"{what} {coding}", (parts, n, coding, runs, "x"))
        for part, local in enumerate(parts):
            if not len(local):
                continue
            for trial in range(6):
                bad = local.clone()
                place = int(torch.randint(len(local), (), generator=generator))
                if trial < 3:  # one bit
                    flip = 1 << int(torch.randint(31, (), generator=generator))
                    bad[place] ^= flip
                elif trial == 3:  # one of the bits after the last
                    bad[-1] |= -(2**31)
                elif trial == 4:  # any bits
                    bad[place:] = -1
                else:  # a bit is moved
                    bad[place], bad[place - 1] = local[place - 1].clone(), local[place].clone()
                broken = (*parts[:part], bad, *parts[part + 1 :])
                name = f"{what} {coding} corrupt {part} {trial}"
                yield Call("selection.unpack_positions", name, (broken, n, coding, runs, "x"))
    if rest := n % TILE:
        lanes = -(-rest // 32)
        if rest < 32 * lanes:  # the first of the bits after the last
            (bad,) = ops.selection.pack_positions(selected, n, "bitmap")
            bad[rest % lanes - lanes] |= 1 << rest // lanes if rest // lanes < 31 else -(2**31)
            yield Call(
                "selection.unpack_positions",
                f"{what} a bit too many",
                ([bad], n, "bitmap", runs, "x"),
            )
    if len(selected):
        shifted = [run._replace(start=run.start + 1) for run in runs]
        parts = ops.selection.pack_positions(selected, n, "gaps")
        name = f"{what} segments moved, {gaps_low_bits(n, len(selected))} low bits"
        yield Call("selection.unpack_positions", name, (parts, n, "gaps", shifted, "x"))
