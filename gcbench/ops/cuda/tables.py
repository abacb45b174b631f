"""What the host code of several families needs: tables of segments, flags, payloads by address."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_void_p

import torch
from torch import Tensor

from gcbench.core.compressor import TILE, Segments
from gcbench.ops.cuda.launch import blocks_for, f32

THREADS = 256
"""Threads of a block: eight warps, each of which has a tile."""
MOST_PAYLOADS = 64
"""Payloads that one launch takes."""

SHORT = 1024
"""Elements of a segment that one warp takes whole."""

_tables: weakref.WeakKeyDictionary[Segments, dict[torch.device, Tensor]] = (
    weakref.WeakKeyDictionary()
)
_longest: weakref.WeakKeyDictionary[Segments, int] = weakref.WeakKeyDictionary()


def table(segments: Segments, device: torch.device) -> Tensor:
    """Return `segments.table` on a device; it is copied there once."""
    known = _tables.setdefault(segments, {})
    if device not in known:
        known[device] = segments.table.to(device)
    return known[device]


def longest(segments: Segments) -> int:
    """Return the elements of the longest segment; it is looked for once."""
    if segments not in _longest:
        _longest[segments] = max(segments.lengths, default=0)
    return _longest[segments]


def checked(
    tensor: Tensor, dtype: torch.dtype, numel: int, device: torch.device | None = None
) -> Tensor:
    """Return a contiguous tensor for a kernel that takes its type and length on trust.

    Raises:
        ValueError: another dtype or length, or another device than `device`, if that is given.
    """
    if tensor.dtype is not dtype or tensor.numel() != numel or device not in (None, tensor.device):
        where = "" if device is None else f" on {device}"
        raise ValueError(
            f"{tensor.numel()} {tensor.dtype} on {tensor.device}: {numel} {dtype}{where} expected"
        )
    return tensor.contiguous()


def output(given: Tensor | None, dtype: torch.dtype, numel: int, device: torch.device) -> Tensor:
    """Return the tensor to write into: `given`, or a new one.

    Raises:
        ValueError: `given` has another dtype, length or device, or is not contiguous.
    """
    if given is None:
        return torch.empty(numel, dtype=dtype, device=device)
    if not given.is_contiguous():
        raise ValueError(f"out has strides {given.stride()}: a contiguous tensor expected")
    return checked(given, dtype, numel, device)


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


class Summands(Structure):
    """`Summands` of the kernels: payloads, the number of workers of each, how many payloads."""

    _fields_ = (
        ("parts", c_void_p * MOST_PAYLOADS),
        ("counts", c_float * MOST_PAYLOADS),
        ("number", c_int32),
    )


def summands(
    payloads: Sequence[tuple[Tensor, int]], dtype: torch.dtype, numel: int, device: torch.device
) -> tuple[list[tuple[Summands, f32]], list[Tensor]]:
    """Return for each launch of a mean its payloads and by what it divides, and what these are in.

    The last launch divides by the number of all workers, those before by 1.

    Raises:
        ValueError: there is no payload, or one has another dtype, length or device.
    """
    if not payloads:
        raise ValueError("the mean of no payloads: one at least expected")
    kept = [checked(payload, dtype, numel, device) for payload, _ in payloads]
    launches = []
    for start in range(0, len(kept), MOST_PAYLOADS):
        part = Summands(number=len(kept[start : start + MOST_PAYLOADS]))
        for i in range(part.number):
            part.parts[i] = kept[start + i].data_ptr()
            part.counts[i] = payloads[start + i][1]
        launches.append((part, f32(1.0)))
    launches[-1] = launches[-1][0], f32(sum(count for _, count in payloads))
    return launches, kept


class SegmentSummands(Structure):
    """`SegmentSummands` of the kernels: payloads, their values of each segment, as above."""

    _fields_ = (
        ("parts", c_void_p * MOST_PAYLOADS),
        ("high", c_void_p * MOST_PAYLOADS),
        ("low", c_void_p * MOST_PAYLOADS),
        ("counts", c_float * MOST_PAYLOADS),
        ("number", c_int32),
    )


def segment_summands(
    payloads: Sequence[tuple[Tensor, Sequence[Tensor], int]],
    dtype: torch.dtype,
    numel: int,
    m: int,
    device: torch.device,
) -> tuple[list[tuple[SegmentSummands, f32]], list[Tensor]]:
    """Return what `summands` does, of payloads with values of each segment, float32, (m,).

    `payloads`: codes, the value of each segment, or its lower and its upper one, and workers.

    Raises:
        ValueError: there is no payload, or one has another dtype, length or device.
    """
    plain, kept = summands([(codes, count) for codes, _, count in payloads], dtype, numel, device)
    values = [[checked(value, torch.float32, m, device) for value in own] for _, own, _ in payloads]
    launches = []
    for start, (part, divisor) in zip(itertools.count(0, MOST_PAYLOADS), plain, strict=False):
        made = SegmentSummands(part.parts, counts=part.counts, number=part.number)
        for i, own in enumerate(values[start : start + MOST_PAYLOADS]):
            made.high[i] = own[-1].data_ptr()
            if len(own) == 2:
                made.low[i] = own[0].data_ptr()
        launches.append((made, divisor))
    return launches, [*kept, *itertools.chain(*values)]


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
