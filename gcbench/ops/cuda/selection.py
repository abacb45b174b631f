"""Host code of selection.cu."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gcbench.core.compressor import Key
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import Argument, KeyArgument, blocks_for, f32, i32, i64, launcher
from gcbench.ops.dispatch import Flag, Kernel
from gcbench.ops.selection import KeptRun

CHUNK = 8192
"""Maximum number of elements of a segment that a single block processes; longer segments have
several chunks of this size."""
SAMPLE = 8192
"""Elements of a long segment to sample for a first limit, which selects candidates."""
DENSE = 1 / 3
"""The fraction of candidates above which collecting them is not faster."""
BINS = 2048
"""Bins of a histogram."""
STATE_WORDS = 7
"""64-bit words of the kernels' `State`."""
MOST_BLOCKS = 1024
"""Maximum number of blocks that process the few candidates; a block may have several chunks."""
SPAN_BITS = 32 * 1024
"""Bits of a bitmap per block."""


class _Source(Structure):
    """The kernels' `Source`: floats, or the key of random words."""

    _fields_ = (("x", c_void_p), ("key", KeyArgument))


class _Long(Structure):
    """The kernels' `Long`: the table of long segments, scratch buffers, and outputs."""

    _fields_ = (
        ("table", c_void_p),
        ("number", c_int64),
        ("states", c_void_p),
        ("bins", c_void_p),
        ("counts", c_void_p),
        ("bits", c_void_p),
        ("places", c_void_p),
        ("raws", c_void_p),
        ("positions", c_void_p),
        ("values", c_void_p),
    )


class _Sparse(Structure):
    """The kernels' `Sparse`: values, positions and their number of each tensor; the number of
    tensors."""

    _fields_ = (
        ("values", c_void_p * tables.MOST_PAYLOADS),
        ("positions", c_void_p * tables.MOST_PAYLOADS),
        ("totals", c_int64 * tables.MOST_PAYLOADS),
        ("number", c_int32),
    )


ADD, ONTO, DIVIDE = 1, 2, 4
"""Flags of the kernel `scatter`: add values instead of storing them; start with the content of the
output instead of zeros; divide the sum."""

# ---- selection -----------------------------------------------------------------------------------


class _Team(NamedTuple):
    """The segments of one kernel, which has a warp or a block per segment."""

    number: int
    """The number of segments."""
    which: Tensor | None
    """Their indices; None: all segments."""


class _Plan(NamedTuple):
    """Assignment of segments to kernels."""

    segments: Tensor
    """(4, m), of the segments that are not empty: first element, number of elements, k, and index
    of the first kept element in the output."""
    warps: _Team
    """The segments with one warp each."""
    blocks: _Team
    """The segments with one block each."""
    long: Tensor | None
    """(7, number + 1), of the longer segments: the same four rows, the chunks and the room for
    candidates before each, and the first limit as `_guess` returns it."""
    chunks: int
    """Chunks of all long segments."""
    room: int
    """Room for candidates of all long segments."""


def _guess(length: Tensor, keep: Tensor, words: bool) -> tuple[Tensor, Tensor]:
    """Return the parameters of each long segment's first limit, and the room for its candidates.

    For floats the former is a rank in the sample, about five standard deviations beyond the
    expected one; for random words it is the limit itself. A room of 0: no candidates are collected.
    """
    d, k = length.double(), keep.double()
    if words:
        wanted = k + 6 * k.sqrt() + 16
        share = wanted / d
        guess = ((1 - share).clamp(min=0) * 2.0**32).long()
        room = wanted + 6 * wanted.sqrt() + 16
    else:
        expected = k / d * SAMPLE
        guess = (expected + 5 * expected.sqrt()).long() + 8
        share = guess / SAMPLE
        room = share * d + 6 * d / SAMPLE * guess.sqrt() + 64
    return guess, torch.where(share > DENSE, 0, torch.minimum(room.long(), length))


@lru_cache(maxsize=64)
def _plan(runs: tuple[KeptRun, ...], device: torch.device, words: bool) -> _Plan:
    """Return the plan for runs on a device; it is cached. `words`: select from random words."""
    alive = [run for run in runs if run.rows and run.keep]
    start, rows, length, keep = torch.tensor(alive, dtype=torch.int64).view(-1, 4).unbind(1)
    row = torch.arange(int(rows.sum())) - (rows.cumsum(0) - rows).repeat_interleave(rows)
    length, keep = length.repeat_interleave(rows), keep.repeat_interleave(rows)
    start = start.repeat_interleave(rows) + row * length
    segments = torch.stack([start, length, keep, keep.cumsum(0) - keep])

    def team(chosen: Tensor) -> _Team:
        which = chosen.nonzero().view(-1)
        return _Team(len(which), None if len(which) == len(chosen) else which.to(device))

    one_warp, long = length <= tables.SHORT, length > CHUNK
    number = int(long.sum())
    table = torch.zeros((7, number + 1), dtype=torch.int64)
    table[:4, :number] = segments[:, long]
    guess, room = _guess(length[long], keep[long], words)
    table[4, 1:] = (-(-length[long] // CHUNK)).cumsum(0)
    table[5, 1:] = room.cumsum(0)
    table[6, :number] = guess
    return _Plan(
        segments.to(device),
        team(one_warp),
        team(~one_warp & ~long),
        table.to(device) if number else None,
        int(table[4, -1]),
        int(table[5, -1]),
    )


def _select(
    source: _Source, runs: tuple[KeptRun, ...], positions: Tensor, values: Tensor | None
) -> None:
    """Write the positions of the largest elements, and the elements to `values` if not None."""
    device = positions.device
    kind = "random" if values is None else "largest"
    plan = _plan(runs, device, values is None)
    run, m = launcher(device).launch, i64(plan.segments.shape[1])
    for name, team, beside in (("warps", plan.warps, 8), ("blocks", plan.blocks, 1)):
        if team.number:
            which: tuple[Argument, ...] = (team.which, i64(team.number))
            args = (source, plan.segments, m, *which, positions, values)
            grid = blocks_for(team.number, beside)
            run("selection", f"{kind}_{name}", grid, tables.THREADS, args)
    if plan.long is None:
        return
    number, chunks, room = plan.long.shape[1] - 1, plan.chunks, plan.room
    # Sizes in 64-bit words; the marks' words and the candidates' elements have 32 bits.
    sizes = [STATE_WORDS * number, BINS * number, 2 * chunks, chunks * tables.THREADS // 2, room]
    scratch = torch.empty(sum(sizes) + -(-room // 2), dtype=torch.int64, device=device)
    places, at = [], scratch.data_ptr()
    for size in (*sizes, 0):
        places.append(at)
        at += 8 * size
    written = positions.data_ptr(), None if values is None else values.data_ptr()
    whole = (source, _Long(plan.long.data_ptr(), number, *places, *written))
    run("selection", f"{kind}_start", number, tables.THREADS, whole)
    if room:
        run("selection", f"{kind}_mark", chunks, tables.THREADS, whole)
        run("selection", f"{kind}_collect", blocks_for(chunks, 8), tables.THREADS, whole)
    for step in ("histogram", "histogram", "histogram", "count", "write"):
        run("selection", f"{kind}_{step}", min(chunks, MOST_BLOCKS), tables.THREADS, whole)


def largest_elements(
    x: Tensor, runs: tuple[KeptRun, ...], positions: Tensor, values: Tensor
) -> None:
    """Run `selection.largest_elements`."""
    _select(_Source(x.data_ptr()), runs, positions, values)


def random_positions(key: Key, runs: tuple[KeptRun, ...], out: Tensor) -> None:
    """Run `selection.random_positions`."""
    _select(_Source(None, KeyArgument.of(key)), runs, out, None)


# ---- scatter and gather --------------------------------------------------------------------------


def gather(x: Tensor, n: int, positions: Tensor, total: int, out: Tensor) -> None:
    """Run `selection.gather`; a position out of range causes a device-side trap."""
    if total:
        args = (x, i64(n), positions, i64(total), out)
        grid = blocks_for(total, tables.THREADS)
        launcher(x.device).launch("selection", "gather", grid, tables.THREADS, args)


def _scatter(
    values: Sequence[Tensor],
    positions: Sequence[Tensor],
    n: int,
    what: int,
    divisor: float,
    out: Tensor,
) -> None:
    """Launch `scatter` once for every `MOST_PAYLOADS` sparse tensors."""
    most = tables.MOST_PAYLOADS
    for first in range(0, len(values) if n else 0, most):
        few = list(zip(values[first : first + most], positions[first : first + most], strict=True))
        argument = _Sparse(number=len(few))
        for i, (tensor, places) in enumerate(few):
            argument.values[i], argument.positions[i] = tensor.data_ptr(), places.data_ptr()
            argument.totals[i] = places.numel()
        here = what if first + most >= len(values) else what & ~DIVIDE
        args = (argument, i64(n), i32(here | (ONTO if first else 0)), f32(divisor), out)
        grid = blocks_for(n, CHUNK)
        launcher(out.device).launch("selection", "scatter", grid, tables.THREADS, args)


def scatter(values: Tensor, positions: Tensor, total: int, n: int, out: Tensor) -> None:
    """Run `selection.scatter`; positions out of range or order cause a device-side trap."""
    _scatter([values], [positions], n, 0, 1.0, out)


def scatter_mean(
    values: Sequence[Tensor],
    positions: Sequence[Tensor],
    totals: Sequence[int],
    count: float,
    n: int,
    out: Tensor,
) -> None:
    """Run `selection.scatter_mean`; positions out of range or order cause a device-side trap."""
    _scatter(values, positions, n, ADD | DIVIDE, count, out)


# ---- positions on the wire -----------------------------------------------------------------------


def _set_bits(positions: Tensor, total: int, n: int, low: int, bits: int, words: Tensor) -> None:
    if bits:
        args = (positions, i64(total), i64(n), i32(low), i64(bits), words)
        grid = blocks_for(bits, SPAN_BITS)
        launcher(words.device).launch("selection", "set_bits", grid, tables.THREADS, args)


def pack_bitmap(positions: Tensor, total: int, n: int, words: Tensor) -> None:
    """Run `selection.pack_bitmap`; positions out of range or order cause a device-side trap."""
    _set_bits(positions, total, n, 0, n, words)


def pack_gaps(
    positions: Tensor, total: int, n: int, low: int, codes: Tensor, words: Tensor
) -> None:
    """Run `selection.pack_gaps`; positions out of range or order cause a device-side trap."""
    if low and total:
        grid, args = tables.grid(tables.tiles_of(total)), (positions, i64(total), i32(low), codes)
        launcher(words.device).launch("selection", "pack_low_bits", grid, tables.THREADS, args)
    _set_bits(positions, total, n, low, total + ((n - total) >> low), words)


def _find_bits(
    words: Tensor, bits: int, codes: Tensor | None, low: int, total: int, out: Tensor, bad: Tensor
) -> Tensor | None:
    """Write the positions of set bits; return their number before each block, and in all."""
    if not bits:
        return None
    run, device = launcher(words.device).launch, words.device
    blocks = blocks_for(bits, SPAN_BITS)
    counts = torch.empty(blocks + 1, dtype=torch.int64, device=device)
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    args = (words, i64(bits), i64(total), counts, ticket, bad)
    run("selection", "count_bits", blocks, tables.THREADS, args)
    more = (counts, codes, i32(low), i64(total), out, bad)
    run("selection", "write_bits", blocks, tables.THREADS, (words, i64(bits), *more))
    return counts


def _checked(
    indices: Tensor | None,
    runs: tuple[KeptRun, ...],
    total: int,
    out: Tensor,
    bad: Tensor,
    counts: Tensor | None,
) -> Flag:
    """Launch the check of positions; return the flag of all kernels of the operation."""
    if total:
        segments = _plan(runs, out.device, False).segments
        m = segments.shape[1]
        args = (indices, out, i64(total), segments, i64(m), bad)
        grid = blocks_for(max(total, m), tables.THREADS)
        launcher(out.device).launch("selection", "check_positions", grid, tables.THREADS, args)

    def number(fault: int) -> int:
        """Map the kernels' error number to the operation's."""
        set_bits = total if counts is None else int(counts[-1])
        return {1: 1, 2: 2 | set_bits << 3, 3: 5, 4: 3, 5: 4}[fault]

    return Flag(bad, number)


def unpack_int32(
    indices: Tensor, n: int, runs: tuple[KeptRun, ...], total: int, name: str, out: Tensor
) -> Flag:
    """Run `selection.unpack_int32`."""
    return _checked(indices, runs, total, out, tables.flag(out.device), None)


def unpack_bitmap(
    words: Tensor, n: int, runs: tuple[KeptRun, ...], total: int, name: str, out: Tensor
) -> Flag:
    """Run `selection.unpack_bitmap`."""
    bad = tables.flag(out.device)
    counts = _find_bits(words, n, None, 0, total, out, bad)
    return _checked(None, runs, total, out, bad, counts)


def unpack_gaps(
    codes: Tensor,
    words: Tensor,
    low: int,
    held: int,
    n: int,
    runs: tuple[KeptRun, ...],
    total: int,
    name: str,
    out: Tensor,
) -> Flag:
    """Run `selection.unpack_gaps`."""
    bad = tables.flag(out.device)
    counts = _find_bits(words, held, codes, low, total, out, bad)
    return _checked(None, runs, total, out, bad, counts)


KERNELS: dict[str, Kernel] = {
    "selection.gather": gather,
    "selection.largest_elements": largest_elements,
    "selection.pack_bitmap": pack_bitmap,
    "selection.pack_gaps": pack_gaps,
    "selection.random_positions": random_positions,
    "selection.scatter": scatter,
    "selection.scatter_mean": scatter_mean,
    "selection.unpack_bitmap": unpack_bitmap,
    "selection.unpack_gaps": unpack_gaps,
    "selection.unpack_int32": unpack_int32,
}
