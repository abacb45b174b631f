"""Ternary codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gcbench import ops
from kernel_cases import CORRELATED, KEYS, Call, nonfinite, segmentations, values


def cases(n: int) -> Iterator[Call]:
    for cut, segments in segmentations(n):
        m = len(segments)
        for what, x in (*values(n), *nonfinite(n)):
            limit, scale = ops.ternary.scales(x, segments, 2.5)
            for key in (*KEYS, CORRELATED[m % 4]):
                name = f"{what} {cut} {key}"
                yield Call("ternary.encode", name, (x, limit, scale, segments, key))
                yield Call(
                    "ternary.encode", f"{name} shared", (x, None, scale * 1.5, segments, key)
                )
        scale = torch.rand(m, generator=torch.Generator().manual_seed(m)) * 2
        scale[::5] = 2.0**-101
        for counts in ((1,), (4,), (1, 1, 1), (1, 3, 1, 2), (1,) * 130, (100, 28)):
            if n > 5000 and len(counts) > 100:
                continue
            name = f"{cut} of {counts[:4]}"
            payloads = [(payload(n, count, seed), count) for seed, count in enumerate(counts)]
            yield Call("ternary.mean", name, (payloads, scale, segments))
            yield Call("ternary.merge", name, (payloads, n))
            worse = [*payloads[:-1], (broken(payloads[-1][0]), counts[-1])]
            yield Call("ternary.mean", f"{name} corrupt", (worse, scale, segments))
            yield Call("ternary.merge", f"{name} corrupt", (worse, n))
            short = [*payloads[:-1], (payloads[-1][0][1:], counts[-1])]
            yield Call("ternary.merge", f"{name} truncated", (short, n))
        for count in (1, 2, 8, 200):
            fields = ops.packing.pack(codes(n, count, 9), ops.ternary.summand_bits(count))
            yield Call(
                "ternary.mean",
                f"{cut} fields of {count}",
                ([(fields, count)], scale, segments),
                {"bits": ops.ternary.summand_bits(count)},
            )
        bad = scale.clone()
        if m:
            bad[-1] = torch.nan
        yield Call("ternary.mean", f"{cut} scale NaN", (payloads[:1], bad, segments))


def codes(n: int, count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 2 * count + 1, (n,), generator=torch.Generator().manual_seed(seed))


def payload(n: int, count: int, seed: int) -> torch.Tensor:
    return ops.packing.pack(codes(n, count, seed), ops.ternary.bits(count))


def broken(words: torch.Tensor) -> torch.Tensor:
    """Set all bits of one word in the middle."""
    words = words.clone()
    words[len(words) // 2 : len(words) // 2 + 1] = -1
    return words
