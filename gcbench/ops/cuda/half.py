"""Host code of half.cu."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import i64, launcher
from gcbench.ops.dispatch import Flag, Kernel


def _format(brain: bool) -> str:
    return "bf16" if brain else "fp16"


def encode(x: Tensor, n: int, brain: bool, out: Tensor) -> None:
    """Run `half.encode`."""
    if n:
        grid = tables.grid(tables.tiles_of(n))
        kernel = f"half_encode_{_format(brain)}"
        launcher(x.device).launch("half", kernel, grid, tables.THREADS, (x, i64(n), out))


def mean(
    codes: Sequence[Tensor],
    counts: Sequence[int],
    workers: int,
    n: int,
    brain: bool,
    name: str,
    out: Tensor,
) -> Flag | None:
    """Run `half.mean`."""
    if not n:
        return None
    bad, before = tables.flag(out.device), None
    kernel, grid = f"half_mean_{_format(brain)}", tables.grid(tables.tiles_of(n))
    for part, divisor in tables.summands(codes, counts):
        args = (part, i64(n), before, divisor, out, bad)
        launcher(out.device).launch("half", kernel, grid, tables.THREADS, args)
        before = out
    return Flag(bad)


KERNELS: dict[str, Kernel] = {"half.encode": encode, "half.mean": mean}
