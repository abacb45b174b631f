"""The 16-bit floating-point formats float16 and bfloat16, clipped and rounded to nearest even."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.ops.dispatch import operation, output, part, payload_faults, vector
from gcbench.ops.means import mean_of

NOT_FINITE = "a payload contains values that are not finite"


_fault = payload_faults({1: NOT_FINITE})


@operation()
def _encode(x: Tensor, n: int, brain: bool, out: Tensor) -> None:
    largest = torch.finfo(out.dtype).max
    out.copy_(x.clamp(-largest, largest))


def encode(x: Tensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Return `x`, float32, shape (n,), clipped to the largest value of `dtype` and rounded to it.

    `dtype`: torch.float16 or torch.bfloat16. Ties go to even, denormals are kept. `out`: the output
    tensor.
    """
    n = x.numel()
    x, out = vector(x, torch.float32, n), output(out, dtype, n, x.device)
    _encode(x, n, dtype is torch.bfloat16, out)
    return out


def decode(codes: Tensor, name: str, *, out: Tensor | None = None) -> Tensor:
    """Return float16 or bfloat16 `codes`, shape (n,), as float32. `out`: the output tensor.

    Raises:
        PayloadError: a value is not finite; the message starts with `name`.
    """
    return mean([(codes, 1)], name, out=out)


@operation(_fault)
def _mean(
    codes: Sequence[Tensor],
    counts: Sequence[int],
    n: int,
    brain: bool,
    name: str,
    out: Tensor,
) -> None:
    values = [value.float() for value in codes]
    if not all(value.isfinite().all() for value in values):
        raise _fault(1, {"name": name})
    out.copy_(mean_of(zip(values, counts, strict=True)))


def mean(payloads: Sequence[tuple[Tensor, int]], name: str, *, out: Tensor | None = None) -> Tensor:
    """Return the mean of all workers, float32, shape (n,): see `means.mean_of`.

    `payloads`: per payload codes of one dtype, as for `decode`, and the number of workers whose
    mean they encode. `out`: the output tensor.

    Raises:
        PayloadError: see `decode`; or dtype or shape differ between payloads.
        ValueError: there are no payloads, or the first is neither float16 nor bfloat16.
    """
    if not payloads:
        raise ValueError("mean needs at least one payload")
    first = payloads[0][0]
    n, dtype, device = first.numel(), first.dtype, first.device
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"codes have dtype {dtype}: expected torch.float16 or torch.bfloat16")
    codes = [part(codes, dtype, n, name) for codes, _ in payloads]
    counts = [count for _, count in payloads]
    out = output(out, torch.float32, n, device)
    _mean(codes, counts, n, dtype is torch.bfloat16, name, out)
    return out
