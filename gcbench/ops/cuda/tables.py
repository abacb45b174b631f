"""What the host code of several families needs: tables of segments, flags, payloads by address."""

from __future__ import annotations

import weakref
from ctypes import Structure, c_int32, c_void_p

import torch
from torch import Tensor

from gcbench.compressor import TILE, Segments
from gcbench.ops.cuda.launch import blocks_for

THREADS = 256
"""Threads of a block: eight warps, each of which has a tile."""
MOST_PAYLOADS = 64
"""Payloads that one launch takes."""

_tables: weakref.WeakKeyDictionary[Segments, dict[torch.device, Tensor]] = (
    weakref.WeakKeyDictionary()
)


def table(segments: Segments, device: torch.device) -> Tensor:
    """Return `segments.table` on a device; it is copied there once."""
    known = _tables.setdefault(segments, {})
    if device not in known:
        known[device] = segments.table.to(device)
    return known[device]


def grid(tiles: int) -> int:
    """Return the blocks that give each of `tiles` a warp."""
    return blocks_for(32 * tiles, THREADS)


def tiles_of(n: int) -> int:
    """Return the tiles of n elements."""
    return -(-n // TILE)


class Payloads(Structure):
    """`Payloads` of the kernels: words, bits of a code, the largest code allowed, how many."""

    _fields_ = (
        ("words", c_void_p * MOST_PAYLOADS),
        ("bits", c_int32 * MOST_PAYLOADS),
        ("tops", c_int32 * MOST_PAYLOADS),
        ("number", c_int32),
    )


def flag(device: torch.device) -> Tensor:
    """Return what kernels lower to the number of the first payload with a fault, int32."""
    return torch.full((1,), 2**31 - 1, dtype=torch.int32, device=device)


def raised(bad: Tensor) -> int | None:
    """Return the number that a kernel has put into `flag`, which waits for the device.

    None: there is none, or it cannot be told, as a CUDA graph is being captured.
    """
    if bad.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    number = int(bad)
    return None if number == 2**31 - 1 else number
