"""Host code of random.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from gcbench.core.compressor import TILE, Key
from gcbench.ops.backend import Kernels
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import KeyArgument, blocks_for, i64, launcher

THREADS = 256


def draws24(
    key: Key, n: int, device: torch.device | str = "cuda", *, out: Tensor | None = None
) -> Tensor:
    """Return integers uniform on [0, 2^24), int32, shape (n,), for elements key.offset + [0, n).

    Raises:
        ValueError: step, rank or stream out of range.
    """
    argument = KeyArgument.of(key)
    where = torch.device(device) if out is None else out.device
    out = tables.output(out, torch.int32, n, where)
    if n:
        tiles = (key.offset + n - 1) // TILE - key.offset // TILE + 1
        grid = blocks_for(64 * tiles, THREADS)  # two halves of 32 lanes
        args = (out, i64(n), i64(2 * tiles), argument)
        launcher(out.device).launch("random", "draws24", grid, THREADS, args)
    return out


def random_words(key: Key, n: int, device: torch.device | str = "cuda") -> Tensor:
    """Return independent integers uniform on [-2^31, 2^31), int32, shape (n,).

    Raises:
        ValueError: step, rank or stream out of range.
    """
    argument = KeyArgument.of(key)
    out = torch.empty(n, dtype=torch.int32, device=device)
    if n:
        blocks = (key.offset + n - 1) // 4 - key.offset // 4 + 1
        grid = blocks_for(blocks, THREADS)
        args = (out, i64(n), i64(blocks), argument)
        launcher(out.device).launch("random", "random_words", grid, THREADS, args)
    return out


KERNELS: Kernels = {"draws24": draws24, "random_words": random_words}
