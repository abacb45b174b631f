"""Native selection of the largest elements, their positions on the wire, scatter and gather."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from struct import pack

import torch
from torch import Tensor

from gcbench.core.compressor import Key
from gcbench.core.errors import PayloadError
from gcbench.ops.cpu.library import (
    addresses,
    c,
    c_array,
    new_float32,
    new_int32,
    new_int64,
    output,
    stream,
    unzipped,
)
from gcbench.ops.reference import packed_words
from gcbench.ops.selection import KeptRun, gaps_low_bits, kept_total, position_coding


@lru_cache
def _table(runs: tuple[KeptRun, ...]) -> tuple[int, int, bytes, int]:
    """Return where segments end, how many elements are kept, and the runs as the kernels take them.

    These are an array of four integers a run, and the number of runs.
    """
    end = max((run.start + run.rows * run.length for run in runs), default=0)
    return end, kept_total(runs), c_array(chain.from_iterable(runs)), len(runs)


def largest_elements(x: Tensor, runs: Sequence[KeptRun]) -> tuple[Tensor, Tensor]:
    """Serve `ops.largest_elements`."""
    n, x = x.numel(), x.contiguous()
    end, total, *table = _table(tuple(runs))
    if end > n:
        raise ValueError(f"segments that end at {end} in a tensor of {n} elements")
    positions, values = new_int64(total), new_float32(total)
    c.gc_largest_elements(
        c.gc_tensor_address(x, torch.float32, n),
        *table,
        positions.data_ptr(),
        values.data_ptr(),
        torch.get_num_threads(),
    )
    return positions, values


def random_positions(
    key: Key, runs: Sequence[KeptRun], device: torch.device | str = "cpu"
) -> Tensor:
    """Serve `ops.random_positions`."""
    _, total, *table = _table(tuple(runs))
    positions = new_int64(total)
    c.gc_random_positions(
        *stream(key),
        *table,
        positions.data_ptr(),
        torch.get_num_threads(),
    )
    return positions


def gather(x: Tensor, positions: Tensor) -> Tensor:
    """Serve `ops.gather`."""
    n, total, x, positions = x.numel(), positions.numel(), x.contiguous(), positions.contiguous()
    out = new_float32(total)
    bad = c.gc_gather(
        c.gc_tensor_address(x, torch.float32, n),
        n,
        c.gc_tensor_address(positions, torch.int64, total),
        total,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if bad:
        raise IndexError(f"a position is not in [0, {n})")
    return out


def scatter(values: Tensor, positions: Tensor, n: int, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.scatter`."""
    total, values, positions = positions.numel(), values.contiguous(), positions.contiguous()
    out = output(out, torch.float32, n)
    bad = c.gc_scatter(
        c.gc_tensor_address(values, torch.float32, total),
        c.gc_tensor_address(positions, torch.int64, total),
        total,
        c.gc_tensor_address(out, torch.float32, n),
        n,
        torch.get_num_threads(),
    )
    if bad:
        raise IndexError(f"positions do not increase, or one is not in [0, {n})")
    return out


def scatter_mean(
    sparse: Sequence[tuple[Tensor, Tensor]], n: int, count: int, *, out: Tensor | None = None
) -> Tensor:
    """Serve `ops.scatter_mean`."""
    number, (values, positions) = len(sparse), unzipped(sparse)
    totals = tuple(map(Tensor.numel, positions))
    (starts, places), _kept = addresses(
        ((values, torch.float32, totals), (positions, torch.int64, totals))
    )
    out = output(out, torch.float32, n)
    bad = c.gc_scatter_mean(
        starts,
        places,
        pack(f"{number}q", *totals),
        number,
        count,
        c.gc_tensor_address(out, torch.float32, n),
        n,
        torch.get_num_threads(),
    )
    if bad:
        raise IndexError(f"positions do not increase, or one is not in [0, {n})")
    return out


def pack_positions(positions: Tensor, n: int, coding: str) -> tuple[Tensor, ...]:
    """Serve `ops.pack_positions`."""
    total, positions = positions.numel(), positions.contiguous()
    coding = position_coding(coding, n, total)
    if coding == "int32":
        return (positions.int(),)
    where, threads = c.gc_tensor_address(positions, torch.int64, total), torch.get_num_threads()
    if coding == "bitmap":
        words = new_int32(packed_words(n, 1))
        bad = c.gc_pack_bitmap(where, total, n, words.data_ptr(), threads)
        parts: tuple[Tensor, ...] = (words,)
    else:
        low = gaps_low_bits(n, total)
        codes = new_int32(packed_words(total, low))
        bits = new_int32(packed_words(total + ((n - total) >> low), 1))
        bad = c.gc_pack_gaps(where, total, n, low, codes.data_ptr(), bits.data_ptr(), threads)
        parts = codes, bits
    if bad:
        raise IndexError(f"positions do not increase, or one is not in [0, {n})")
    return parts


def unpack_positions(
    parts: Sequence[Tensor], n: int, coding: str, runs: Sequence[KeptRun], name: str
) -> Tensor:
    """Serve `ops.unpack_positions`."""
    _, total, *table = _table(tuple(runs))
    coding = position_coding(coding, n, total)
    positions = new_int64(total)
    wanted = *table, total, positions.data_ptr(), torch.get_num_threads()
    held, low = n, 0
    if coding == "int32":
        (indices,) = parts
        indices = indices.contiguous()
        bad = c.gc_unpack_int32(c.gc_tensor_address(indices, torch.int32, total), *wanted)
    elif coding == "bitmap":
        (words,) = parts
        words = words.contiguous()
        place = c.gc_tensor_address(words, torch.int32, packed_words(n, 1))
        bad = c.gc_unpack_bitmap(place, n, *wanted)
    else:
        low = gaps_low_bits(n, total)
        held = total + ((n - total) >> low)
        codes, words = parts
        codes, words = codes.contiguous(), words.contiguous()
        bad = c.gc_unpack_gaps(
            c.gc_tensor_address(codes, torch.int32, packed_words(total, low)),
            c.gc_tensor_address(words, torch.int32, packed_words(held, 1)),
            low,
            n,
            *wanted,
        )
    if bad:
        reason = {
            1: f"a bit is set after the last of {held} codes",
            2: f"a bitmap with {bad >> 3} bits set: {total} expected",
            3: "positions must increase",
            4: "a segment has more or fewer positions than its own",
            5: f"a bit is set after the last of {total} codes",
        }[bad & 7]
        raise PayloadError(f"{name}: {reason}")
    return positions


KERNELS = {
    "gather": gather,
    "largest_elements": largest_elements,
    "pack_positions": pack_positions,
    "random_positions": random_positions,
    "scatter": scatter,
    "scatter_mean": scatter_mean,
    "unpack_positions": unpack_positions,
}
