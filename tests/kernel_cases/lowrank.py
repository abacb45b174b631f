"""Matrices of low rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernel_cases import Call, nonfinite, values


def cases(n: int) -> Iterator[Call]:
    inputs = [*values(n), *nonfinite(n)]
    for what, x in inputs if n <= 5000 else (*inputs[:2], *inputs[-2:]):
        for r in (1, 2, 5):
            if n < 2 * r:
                continue
            right = torch.stack([x.roll(3 * k)[-2000:] for k in range(r)])
            left = torch.stack([x.roll(k)[:5] for k in range(r)])
            yield Call("lowrank.product", f"{what}, rank {r}", (left, right))
            yield Call("lowrank.product", f"{what}, rank {r}, turned", (right, left))
            if what in ("huge", "mixed", "inf", "-inf", "nan") and n > 5000:
                continue  # such rows are drawn anew
            rows = torch.stack([x.roll(17 * k * k) for k in range(r)])
            yield Call("lowrank.orthonormalize", f"{what}, {r} rows", (rows,))
            yield Call("lowrank.orthonormalize", f"{what}, {r} of some", (rows[:, : n // 2],))
