"""Segment tables, flags and argument structures for the host code of several families."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_void_p

import torch
from torch import Tensor

from gcbench.core.compressor import TILE, Segments
from gcbench.ops.cuda.launch import blocks_for, f32
from gcbench.ops.dispatch import UNRAISED

THREADS = 256
"""Threads per block: eight warps, one per tile."""
MOST_PAYLOADS = 64
"""Maximum number of payloads per launch."""

SHORT = 1024
"""Maximum number of elements of a segment that a single warp processes."""

_tables: weakref.WeakKeyDictionary[Segments, dict[torch.device, Tensor]] = (
    weakref.WeakKeyDictionary()
)
_longest: weakref.WeakKeyDictionary[Segments, int] = weakref.WeakKeyDictionary()


def table(segments: Segments, device: torch.device) -> Tensor:
    """Return `segments.table` on a device; the copy is cached."""
    copies = _tables.setdefault(segments, {})
    if device not in copies:
        copies[device] = segments.table.to(device)
    return copies[device]


def longest(segments: Segments) -> int:
    """Return the length of the longest segment; the result is cached."""
    if segments not in _longest:
        _longest[segments] = max(segments.lengths, default=0)
    return _longest[segments]


def grid(tiles: int) -> int:
    """Return the number of blocks with one warp per tile."""
    return blocks_for(32 * tiles, THREADS)


def tiles_of(n: int) -> int:
    """Return the number of tiles of n elements."""
    return -(-n // TILE)


class Payloads(Structure):
    """The kernels' `Payloads`: words, bits per code and largest code of each; their number."""

    _fields_ = (
        ("words", c_void_p * MOST_PAYLOADS),
        ("bits", c_int32 * MOST_PAYLOADS),
        ("tops", c_int32 * MOST_PAYLOADS),
        ("number", c_int32),
    )


class SegmentSummands(Structure):
    """The kernels' `SegmentSummands`: the payloads of one launch of a mean.

    Each payload has codes, one or two values per segment, and a number of workers.
    """

    _fields_ = (
        ("parts", c_void_p * MOST_PAYLOADS),
        ("high", c_void_p * MOST_PAYLOADS),
        ("low", c_void_p * MOST_PAYLOADS),
        ("counts", c_float * MOST_PAYLOADS),
        ("number", c_int32),
    )


def segment_summands(
    codes: Sequence[Tensor],
    low: Sequence[Tensor] | None,
    high: Sequence[Tensor],
    counts: Sequence[int],
) -> list[tuple[SegmentSummands, f32]]:
    """Return the payloads and the divisor of each launch of a mean.

    `low`: the second value per segment, or None. The last launch divides by the number of all
    workers, the others by 1.
    """
    launches = []
    for start in range(0, len(codes), MOST_PAYLOADS):
        argument = SegmentSummands(number=min(MOST_PAYLOADS, len(codes) - start))
        for i in range(argument.number):
            argument.parts[i], argument.counts[i] = codes[start + i].data_ptr(), counts[start + i]
            argument.high[i] = high[start + i].data_ptr()
            if low is not None:
                argument.low[i] = low[start + i].data_ptr()
        launches.append((argument, f32(1.0)))
    launches[-1] = launches[-1][0], f32(sum(counts))
    return launches


def flag(device: torch.device) -> Tensor:
    """Return a new error flag, int32, shape (1,), with the value `UNRAISED`: see `Flag`."""
    return torch.full((1,), UNRAISED, dtype=torch.int32, device=device)
