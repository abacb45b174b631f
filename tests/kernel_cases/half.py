"""The 16-bit floating-point formats."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernel_cases import Call, nonfinite, values

DTYPES = (torch.float16, torch.bfloat16)


def cases(n: int) -> Iterator[Call]:
    for dtype in DTYPES:
        for what, x in (*values(n), *nonfinite(n), *edges(n, dtype)):
            yield Call("half.encode", f"{what} {dtype}", (x, dtype))
        for what, codes in payloads(n, dtype):
            yield Call("half.decode", f"{what} {dtype}", (codes, "method"))
        yield from means(n, dtype)


def edges(n: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield ties between two codes and what is right beside them, over the whole range."""
    every = all_codes(n, dtype)
    code = torch.where(every.isfinite(), every, 0).float()
    above = torch.where(every.isfinite(), every.view(torch.int16) + 1, 0).view(dtype).float()
    ties = ((code.double() + above.double()) / 2).float()  # infinity beyond the largest value
    for what, toward in (("below ties", 0.0), ("ties", None), ("above ties", torch.inf)):
        x = ties if toward is None else ties.nextafter(torch.tensor(toward).copysign(ties))
        yield what, x
    largest = torch.tensor(torch.finfo(dtype).max)
    x = largest.nextafter(torch.tensor(torch.inf)).repeat(n)
    x[::2] = -largest.nextafter(torch.tensor(0.0))
    yield "beside the largest", x


def all_codes(n: int, dtype: torch.dtype) -> Tensor:
    """Return codes that are all different, up to 2^16 of them."""
    return (torch.arange(n) * 24_571).to(torch.int16).view(dtype)


def payloads(n: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    finite = finite_codes(n, dtype)
    yield "finite", finite
    for value in (torch.inf, -torch.inf, torch.nan):
        for place in {0, n // 2, n - 1} if n else ():
            wrong = finite.clone()
            wrong[place] = value
            yield f"{value} at {place}", wrong


def finite_codes(n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    codes = all_codes(n + seed, dtype)[seed:]
    return torch.where(codes.isfinite(), codes, -codes.new_zeros(1))


def means(n: int, dtype: torch.dtype) -> Iterator[Call]:
    """Sums that overflow and others, those of negative zeros, and payloads that are wrong."""
    for counts in ((1,), (3,), (1, 1), (1, 1, 1), (2, 3, 1), (1,) * 8, (1,) * 70):
        if n > 5000 and len(counts) > 3:
            continue
        name = f"{dtype} of {counts[:4]}, {len(counts)}"
        parts = [(finite_codes(n, dtype, seed), count) for seed, count in enumerate(counts)]
        yield Call("half.mean", name, (parts, "method"))
        small = [
            (torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype), count)
            for seed, count in enumerate(counts)
        ]
        yield Call("half.mean", f"{name} normal", (small, "method"))
        zeros = [(torch.full((n,), -0.0, dtype=dtype), count) for count in counts]
        yield Call("half.mean", f"{name} zeros", (zeros, "method"))
        for value in (torch.inf, torch.nan):
            wrong = small[-1][0].clone()
            wrong[n // 3 : n // 3 + 1] = value
            worse = [*small[:-1], (wrong, counts[-1])]
            yield Call("half.mean", f"{name} {value}", (worse, "method"))
