"""Host code of random.cu."""

from __future__ import annotations

from torch import Tensor

from gcbench.core.compressor import TILE, Key
from gcbench.ops.cuda.launch import KeyArgument, blocks_for, i64, launcher
from gcbench.ops.dispatch import Kernel

THREADS = 256


def draws24(key: Key, x: Tensor | None, n: int, out: Tensor) -> None:
    """Run `random.draws24`; its independent draws do not depend on x."""
    tiles = (key.offset + n - 1) // TILE - key.offset // TILE + 1
    grid = blocks_for(64 * tiles, THREADS)  # two halves of 32 lanes
    args = (out, i64(n), i64(2 * tiles), KeyArgument.of(key))
    launcher(out.device).launch("random", "draws24", grid, THREADS, args)


KERNELS: dict[str, Kernel] = {"random.draws24": draws24}
