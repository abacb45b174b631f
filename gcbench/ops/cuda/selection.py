"""Host code of selection.cu."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gcbench.core.compressor import Key
from gcbench.core.errors import PayloadError
from gcbench.ops.backend import Kernels
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import Argument, KeyArgument, blocks_for, f32, i32, i64, launcher
from gcbench.ops.reference import packed_words
from gcbench.ops.selection import KeptRun, gaps_low_bits, kept_total, position_coding

CHUNK = 8192
"""Elements that a block looks at: a segment of no more is one block's."""
SAMPLE = 8192
"""Elements of a longer one that its first limit is found from."""
DENSE = 1 / 3
"""Share from which on candidates save nothing."""
BINS = 2048
STATE_WORDS = 7
"""Words of 64 bits of `State` of the kernels."""
MOST_BLOCKS = 1024
"""Blocks that look at candidates, as there are few of these: each may have several chunks."""
SPAN_BITS = 32 * 1024
"""Bits of a bitmap that a block has."""


class _Source(Structure):
    """`Source` of the kernels: floats, or the key of random words."""

    _fields_ = (("x", c_void_p), ("key", KeyArgument))


class _Long(Structure):
    """`Long` of the kernels: the table of long segments, scratch, and where results go."""

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
    """`Sparse` of the kernels: values, positions and how many, of each sparse tensor."""

    _fields_ = (
        ("values", c_void_p * tables.MOST_PAYLOADS),
        ("positions", c_void_p * tables.MOST_PAYLOADS),
        ("totals", c_int64 * tables.MOST_PAYLOADS),
        ("number", c_int32),
    )


ADD, ONTO, DIVIDE = 1, 2, 4

# ---- which elements ------------------------------------------------------------------------------


class _Team(NamedTuple):
    """Segments that one kernel selects from, a warp or a block each."""

    number: int
    which: Tensor | None
    """Their numbers; None: all there are."""


class _Plan(NamedTuple):
    """Which kernel selects from which segment."""

    segments: Tensor
    """(4, m) of segments that are not empty: first element, elements, k, place of the first kept.
    """
    warps: _Team
    blocks: _Team
    long: Tensor | None
    """(7, segments + 1): the same four of long segments, the chunks and the room for candidates
    before each, and what their first limit follows from."""
    chunks: int
    room: int
    """Of all long segments."""


def _guess(length: Tensor, keep: Tensor, words: bool) -> tuple[Tensor, Tensor]:
    """Return what each first limit follows from, and how many candidates have room, 0 for none.

    For floats the rank in a sample, some five deviations beyond the expected one; for words the
    limit itself.
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
    """Return the plan of some runs; it is made and copied to the device once."""
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
    source: _Source, runs: Sequence[KeptRun], device: torch.device, values: Tensor | None
) -> Tensor:
    """Return the positions of the largest, and write their elements to `values` unless None."""
    kind = "random" if values is None else "largest"
    plan = _plan(tuple(runs), device, values is None)
    positions = torch.empty(kept_total(runs), dtype=torch.int64, device=device)
    run, m = launcher(device).launch, i64(plan.segments.shape[1])
    for name, team, beside in (("warps", plan.warps, 8), ("blocks", plan.blocks, 1)):
        if team.number:
            which: tuple[Argument, ...] = (team.which, i64(team.number))
            args = (source, plan.segments, m, *which, positions, values)
            grid = blocks_for(team.number, beside)
            run("selection", f"{kind}_{name}", grid, tables.THREADS, args)
    if plan.long is None:
        return positions
    number, chunks, room = plan.long.shape[1] - 1, plan.chunks, plan.room
    # In words of 64 bits; bits of marks and elements of candidates have 32.
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
    return positions


def largest_elements(x: Tensor, runs: Sequence[KeptRun]) -> tuple[Tensor, Tensor]:
    """Serve `ops.largest_elements`.

    Raises:
        ValueError: `x` is not float32, or segments end beyond it.
    """
    n, end = x.numel(), max((run.start + run.rows * run.length for run in runs), default=0)
    if end > n:
        raise ValueError(f"segments that end at {end} in a tensor of {n} elements")
    x = tables.checked(x, torch.float32, n)
    values = torch.empty(kept_total(runs), device=x.device, dtype=torch.float32)
    return _select(_Source(x.data_ptr()), runs, x.device, values), values


def random_positions(
    key: Key, runs: Sequence[KeptRun], device: torch.device | str = "cuda"
) -> Tensor:
    """Serve `ops.random_positions`.

    Raises:
        ValueError: step, rank or stream out of range.
    """
    source = _Source(None, KeyArgument.of(key))
    where = torch.empty(0, device=device).device  # with its number
    return _select(source, runs, where, None)


# ---- scatter and gather --------------------------------------------------------------------------


def gather(x: Tensor, positions: Tensor) -> Tensor:
    """Serve `ops.gather`; a position out of range ends the kernel, as it does in torch on a GPU."""
    n, total = x.numel(), positions.numel()
    x = tables.checked(x, torch.float32, n)
    positions = tables.checked(positions, torch.int64, total)
    out = torch.empty(total, device=x.device, dtype=torch.float32)
    if total:
        grid = blocks_for(total, tables.THREADS)
        args = (x, i64(n), positions, i64(total), out)
        launcher(x.device).launch("selection", "gather", grid, tables.THREADS, args)
    return out


def _scatter(
    sparse: Sequence[tuple[Tensor, Tensor]], n: int, what: int, divisor: float, out: Tensor | None
) -> Tensor:
    """Launch `scatter` for as many at a time as it takes."""
    device, most = sparse[0][0].device, tables.MOST_PAYLOADS
    out = tables.output(out, torch.float32, n, device)
    kept = [
        (
            tables.checked(values, torch.float32, positions.numel()),
            tables.checked(positions, torch.int64, positions.numel()),
        )
        for values, positions in sparse
    ]
    if not n:
        return out
    for first in range(0, len(kept), most):
        few = kept[first : first + most]
        argument = _Sparse(number=len(few))
        for i, (values, positions) in enumerate(few):
            argument.values[i] = values.data_ptr()
            argument.positions[i] = positions.data_ptr()
            argument.totals[i] = positions.numel()
        here = what if first + most >= len(kept) else what & ~DIVIDE
        args = (argument, i64(n), i32(here | (ONTO if first else 0)), f32(divisor), out)
        grid = blocks_for(n, CHUNK)
        launcher(device).launch("selection", "scatter", grid, tables.THREADS, args)
    return out


def scatter(values: Tensor, positions: Tensor, n: int, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.scatter`; positions out of range or order end the kernel."""
    return _scatter([(values, positions)], n, 0, 1.0, out)


def scatter_mean(
    sparse: Sequence[tuple[Tensor, Tensor]], n: int, count: int, *, out: Tensor | None = None
) -> Tensor:
    """Serve `ops.scatter_mean`; positions out of range or order end the kernel."""
    return _scatter(sparse, n, ADD | DIVIDE, float(count), out)


# ---- positions on the wire -----------------------------------------------------------------------


def pack_positions(positions: Tensor, n: int, coding: str) -> tuple[Tensor, ...]:
    """Serve `ops.pack_positions`; positions out of range or order end the kernel."""
    total, device = positions.numel(), positions.device
    positions = tables.checked(positions, torch.int64, total)
    coding = position_coding(coding, n, total)
    if coding == "int32":
        return (positions.int(),)
    run, low, bits = launcher(device).launch, 0, n
    parts: list[Tensor] = []
    if coding == "gaps":
        low = gaps_low_bits(n, total)
        bits = total + ((n - total) >> low)
        parts.append(torch.empty(packed_words(total, low), dtype=torch.int32, device=device))
        if low and total:
            grid, codes = tables.grid(tables.tiles_of(total)), (i64(total), i32(low), parts[0])
            run("selection", "pack_low_bits", grid, tables.THREADS, (positions, *codes))
    parts.append(torch.empty(packed_words(bits, 1), dtype=torch.int32, device=device))
    if bits:
        args = (positions, i64(total), i64(n), i32(low), i64(bits), parts[-1])
        run("selection", "set_bits", blocks_for(bits, SPAN_BITS), tables.THREADS, args)
    return tuple(parts)


def unpack_positions(
    parts: Sequence[Tensor], n: int, coding: str, runs: Sequence[KeptRun], name: str
) -> Tensor:
    """Serve `ops.unpack_positions`."""
    total, device = kept_total(runs), parts[-1].device
    coding = position_coding(coding, n, total)
    positions = torch.empty(total, dtype=torch.int64, device=device)
    run, threads, bad = launcher(device).launch, tables.THREADS, tables.flag(device)
    indices, counts, bits, low = None, None, n, 0
    if coding == "int32":
        indices = tables.checked(parts[0], torch.int32, total)
    else:
        codes = None
        if coding == "gaps":
            low = gaps_low_bits(n, total)
            bits = total + ((n - total) >> low)
            codes = tables.checked(parts[0], torch.int32, packed_words(total, low))
        words = tables.checked(parts[-1], torch.int32, packed_words(bits, 1))
        if bits:
            blocks = blocks_for(bits, SPAN_BITS)
            counts = torch.empty(blocks + 1, dtype=torch.int64, device=device)
            ticket = torch.zeros(1, dtype=torch.int32, device=device)
            args = (words, i64(bits), i64(total), counts, ticket, bad)
            run("selection", "count_bits", blocks, threads, args)
            more = (counts, codes, i32(low), i64(total), positions, bad)
            run("selection", "write_bits", blocks, threads, (words, i64(bits), *more))
    if total:
        segments = _plan(tuple(runs), device, False).segments
        m = segments.shape[1]
        check = (indices, positions, i64(total), segments, i64(m), bad)
        run("selection", "check_positions", blocks_for(max(total, m), threads), threads, check)
    number = tables.raised(bad)
    if number is not None:
        found = total if counts is None else int(counts[-1])
        reason = {
            1: f"a bit is set after the last of {bits} codes",
            2: f"a bitmap with {found} bits set: {total} expected",
            3: f"a bit is set after the last of {total} codes",
            4: "positions must increase",
            5: "a segment has more or fewer positions than its own",
        }[number]
        raise PayloadError(f"{name}: {reason}")
    return positions


KERNELS: Kernels = {
    "gather": gather,
    "largest_elements": largest_elements,
    "pack_positions": pack_positions,
    "random_positions": random_positions,
    "scatter": scatter,
    "scatter_mean": scatter_mean,
    "unpack_positions": unpack_positions,
}
