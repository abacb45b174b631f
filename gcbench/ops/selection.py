"""Operations of sparsifiers: selection of elements, and coding of their positions and values.

A selection keeps exactly k = max(1, ceil(ratio * d)) of the d elements of each nonempty segment, so
sizes depend only on the segments and the ratio, and no header is sent. Positions are indices of the
flat tensor of n elements, strictly increasing: p_0 < p_1 < ... < p_{K-1}, K the sum of all k.

Codings of the positions:

int32   p_j: 32 bits per position.
bitmap  1 bit per element, set if it is kept, packed by `packing.pack`.
gaps    Elias-Fano coding: q_j = p_j - j does not decrease and is at most n - K. Its low l bits are
        packed by `packing.pack`; the high bits form a bitmap of K + ((n - K) >> l) bits with bit
        (q_j >> l) + j set, the unary code of their increments. l minimizes the bytes and is about
        log2(ln 2 (n - K) / K). The coding takes l + 1 + (n - K) / (K 2^l) bits per position, at
        most 2 + log2(n / K), and within 0.6 bits of the entropy of all choices of K out of n if
        K << n. With l = 0 it is the bitmap.
        Elias, Efficient storage and retrieval by content and address of static files, JACM 21,
        1974; Fano, On the number of bits required to implement an associative memory, MIT 1971.

Codings of the values:

fp32    unchanged: 32 bits per value.
fp16    rounded to nearest, ties to even, saturating at +-65504: 16 bits per value.
range   the range float of `gcbench.ops.rangefloat` with 10 bits, 6 of them mantissa, which spans 8
        octaves if both signs occur: 10 bits per value, and an int32 grid per nonempty segment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Layout, Segments
from gcbench.core.errors import PayloadError
from gcbench.core.payload import all_finite
from gcbench.ops import packing, rangefloat, statistics
from gcbench.ops.dispatch import operation, output, outputs, vector
from gcbench.ops.packing import BLOCK, MAX_BITS, packed_words
from gcbench.ops.random import WORD, philox
from gcbench.ops.rangefloat import Groups, grouped_grids
from gcbench.ops.statistics import FLOAT_MAX

POSITION_CODINGS = ("int32", "bitmap", "gaps")
"""Codings of positions; "smallest" uses the first of those with equal sizes."""

VALUE_CODINGS = ("fp32", "fp16", "range")
"""Codings of values."""
HALF_MAX = 65504.0
"""The largest finite number of fp16."""
RANGE_BITS, RANGE_MANTISSA = 10, 6

ROUNDING = 2.0**-40
"""A generous bound on the relative rounding error of a sum in float64."""


class KeptRun(NamedTuple):
    """Adjacent segments of equal length, and the number of elements to keep in each."""

    start: int
    """Index of the first element in the flat tensor."""
    rows: int
    """Number of segments."""
    length: int
    """Elements per segment."""
    keep: int
    """Kept elements per segment."""

    @property
    def inverse(self) -> float:
        """d/k, and 0 for empty segments."""
        return self.length / max(1, self.keep)


# ---- which elements ------------------------------------------------------------------------------


def kept_runs(segments: Segments, ratio: float) -> tuple[KeptRun, ...]:
    """Return the runs of `segments` with k = max(1, ceil(ratio * d)), 0 for empty segments.

    `ratio` is above 0 and at most 1. Rounding of floats does not increase k: a ratio of 0.07 keeps
    7 of 100 elements, though 0.07 * 100 > 7 in floating point.
    """
    share = ratio * (1 - 2.0**-50)
    return tuple(
        KeptRun(start, which.stop - which.start, length, max(1, math.ceil(share * length)))
        if length
        else KeptRun(start, which.stop - which.start, 0, 0)
        for which, start, length in segments.runs
    )


def kept_total(runs: Sequence[KeptRun]) -> int:
    """Return K, the total number of kept elements."""
    return sum(run.rows * run.keep for run in runs)


def kept_values(values: Sequence[float], runs: Sequence[KeptRun]) -> Tensor:
    """Repeat one number per run for each kept element, float32, shape (K,), on the CPU."""
    counts = torch.tensor([run.rows * run.keep for run in runs], dtype=torch.int64)
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)


def dropped_energy(x: Tensor, segments: Segments, runs: Sequence[KeptRun]) -> float:
    """Return the sum over segments of (1 - k/d) ||x||^2, rounded up slightly.

    A random selection drops that energy on average, the selection of the k largest at most that
    (Stich et al. 2018, lemma A.1). `x`: float32, shape (n,); `runs`: `kept_runs(segments, ...)`.
    """
    square = statistics.moments(x, segments)[1]
    dropped = 0.0
    for (which, _, length), run in zip(segments.runs, runs, strict=True):
        if run.keep < length:
            dropped += (length - run.keep) / length * float(square[which].sum())
    return min(dropped * (1 + ROUNDING), float(square.sum()))


def magnitude_order(x: Tensor) -> Tensor:
    """Return integers ordered like |x|, int32, shape (n,): the bits of x without the sign."""
    return x.contiguous().view(torch.int32) & 0x7FFFFFFF


def largest(scores: Tensor, runs: Sequence[KeptRun]) -> Tensor:
    """Return the positions of each segment's k largest scores, int64, shape (K,), increasing.

    `scores`: int32, shape (n,). Ties are broken by lowest position.
    """
    pieces = [torch.empty(0, dtype=torch.int64, device=scores.device)]
    for start, rows, length, keep in runs:
        stop = start + rows * length
        if keep == length:
            pieces.append(torch.arange(start, stop, device=scores.device))
            continue
        table = scores[start:stop].view(rows, length)
        limit = torch.topk(table, keep, dim=1, sorted=False).values.amin(1, keepdim=True)
        selected = table >= limit
        places = selected.view(-1).nonzero().squeeze(1)
        if len(places) > rows * keep:  # keep only some of the elements equal to the limit
            above = table > limit
            tied = selected & ~above
            room = keep - above.sum(1, keepdim=True)
            selected = above | (tied & (tied.cumsum(1) <= room))
            places = selected.view(-1).nonzero().squeeze(1)
        pieces.append(places.add_(start))
    return torch.cat(pieces)


def _invalid_positions(number: int, arguments: Mapping[str, Any]) -> IndexError:
    return IndexError(f"positions must increase and be in [0, {arguments['n']})")


def increasing(positions: Tensor, n: int) -> bool:
    """Return whether positions, int64, shape (K,), increase and are in [0, n).

    True on a GPU, where the answer would have to be waited for.
    """
    if positions.numel() == 0 or not positions.is_cpu:
        return True
    within = int(positions[0]) >= 0 and int(positions[-1]) < n
    return within and bool((positions[1:] > positions[:-1]).all())


def _check_increasing(positions: Tensor, n: int) -> None:
    if not increasing(positions, n):
        raise _invalid_positions(1, {"n": n})


@operation()
def _largest_elements(
    x: Tensor, runs: Sequence[KeptRun], positions: Tensor, values: Tensor
) -> None:
    positions.copy_(largest(magnitude_order(x), runs))
    values.copy_(x[positions])


def largest_elements(x: Tensor, runs: Sequence[KeptRun]) -> tuple[Tensor, Tensor]:
    """Return the positions and the values of each segment's k elements of largest magnitude.

    `x`: float32, shape (n,). Positions are int64, increasing, values float32, shape (K,) each. Ties
    are broken by lowest position; NaN counts as larger than infinity.

    Raises:
        ValueError: `x` is not float32, or segments extend beyond it.
    """
    n, end = x.numel(), _end(runs)
    if end > n:
        raise ValueError(f"segments end at {end}, beyond the tensor of {n} elements")
    x, total = vector(x, torch.float32, n), kept_total(runs)
    positions = output(None, torch.int64, total, x.device)
    values = output(None, torch.float32, total, x.device)
    _largest_elements(x, tuple(runs), positions, values)
    return positions, values


def _reach(x: Tensor, segments: Segments, limits: Tensor) -> Tensor:
    """Return whether each element reaches its segment's limit and is not 0, bool, shape (n,)."""
    size, chosen = x.abs(), x != 0
    for (which, sizes), (_, marks) in zip(
        segments.views(size), segments.views(chosen), strict=True
    ):
        marks &= sizes >= limits[which].unsqueeze(1)
    return chosen


@operation()
def _limits(x: Tensor, segments: Segments, bound: float, limits: Tensor) -> int:
    limits.copy_(statistics.absmax(x, segments).clamp_(max=bound))
    return int(_reach(x, segments, limits).sum())


@operation()
def _reaching(
    x: Tensor, segments: Segments, limits: Tensor, positions: Tensor, values: Tensor
) -> None:
    positions.copy_(_reach(x, segments, limits).nonzero().squeeze(1))
    values.copy_(x[positions])


def reaching(x: Tensor, segments: Segments, bound: float) -> tuple[Tensor, Tensor]:
    """Return the positions and the values of the elements of large magnitude.

    These are the elements that are not 0 and whose magnitude is at least min(bound, max |x|) of
    their segment; none in a segment with NaN.

    `x`: float32, shape (n,); `bound`: at least 0. Positions are int64, increasing, values float32,
    shape (K,) each.

    Raises:
        ValueError: `x` is not float32 or its length differs from that of its segments.
    """
    x = vector(x, torch.float32, segments.numel)
    bound = min(bound, FLOAT_MAX)
    limits = output(None, torch.float32, len(segments), x.device)
    total = int(_limits(x, segments, bound, limits))
    positions = output(None, torch.int64, total, x.device)
    values = output(None, torch.float32, total, x.device)
    _reaching(x, segments, limits, positions, values)
    return positions, values


def _end(runs: Sequence[KeptRun]) -> int:
    """Return the end of the last segment."""
    return max((run.start + run.rows * run.length for run in runs), default=0)


def random_words(key: Key, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return independent integers uniform on [-2^31, 2^31), int32, shape (n,).

    Element e of the bucket uses word e % 4 of Philox block e // 4, so elements do not share bits,
    and the counters differ from those of `draws24`. Elements are key.offset + [0, n).
    """
    seed, step, who = key.words()
    out = torch.empty(n, dtype=torch.int32, device=device)
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        first, last = (key.offset + start) // 4, (key.offset + stop - 1) // 4
        block = torch.arange(first, last + 1, device=device)
        words = philox(
            (
                block & WORD,
                (block >> 32 << 8) | 2,  # draws24 uses 0 and 1 here
                torch.full_like(block, step),
                torch.full_like(block, who),
            ),
            seed,
        )
        skip = key.offset + start - 4 * first
        flat = torch.stack(words, dim=1).view(-1)[skip : skip + stop - start]
        out[start:stop] = flat - 2**31
    return out


@operation()
def _random_positions(key: Key, runs: Sequence[KeptRun], out: Tensor) -> None:
    out.copy_(largest(random_words(key, _end(runs), out.device), runs))


def random_positions(
    key: Key, runs: Sequence[KeptRun], device: torch.device | str = "cpu"
) -> Tensor:
    """Return k random positions of each segment, int64, shape (K,), increasing.

    They are drawn uniformly without replacement: the positions of the k largest `random_words`,
    ties by lowest position.

    Raises:
        ValueError: step, rank or stream of the key out of range.
    """
    key.words()
    where = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
    out = output(None, torch.int64, kept_total(runs), where)
    _random_positions(key, tuple(runs), out)
    return out


@operation(lambda number, arguments: IndexError(f"a position is not in [0, {arguments['n']})"))
def _gather(x: Tensor, n: int, positions: Tensor, total: int, out: Tensor) -> None:
    torch.index_select(x, 0, positions, out=out)


def gather(x: Tensor, positions: Tensor) -> Tensor:
    """Return the elements of `x`, float32, shape (n,), at `positions`, int64, shape (K,).

    Raises:
        IndexError: a position is not in [0, n); on a GPU a device-side assertion, as in torch.
    """
    n, total = x.numel(), positions.numel()
    x, positions = vector(x, torch.float32, n), vector(positions, torch.int64, total, "positions")
    out = output(None, torch.float32, total, x.device)
    _gather(x, n, positions, total, out)
    return out


@operation(_invalid_positions)
def _scatter(values: Tensor, positions: Tensor, total: int, n: int, out: Tensor) -> None:
    _check_increasing(positions, n)
    out.zero_()
    out[positions] = values


def scatter(values: Tensor, positions: Tensor, n: int, *, out: Tensor | None = None) -> Tensor:
    """Return zeros, float32, shape (n,), with `values`, float32, shape (K,), at `positions`.

    `positions`: int64, shape (K,), increasing, in [0, n). `out`: the output tensor.

    Raises:
        IndexError: positions do not increase or are out of range; on a GPU a device-side trap.
    """
    total = positions.numel()
    values = vector(values, torch.float32, total, "values")
    positions = vector(positions, torch.int64, total, "positions")
    out = output(out, torch.float32, n, values.device)
    _scatter(values, positions, total, n, out)
    return out


@operation(_invalid_positions)
def _scatter_mean(
    values: Sequence[Tensor],
    positions: Sequence[Tensor],
    totals: Sequence[int],
    count: float,
    n: int,
    out: Tensor,
) -> None:
    out.zero_()
    for summand, places in zip(values, positions, strict=True):
        _check_increasing(places, n)
        out[places] += summand
    # A GPU may replace division by a Python number, but not by a tensor, with a multiplication.
    out.div_(out.new_tensor(count))


def scatter_mean(
    sparse: Sequence[tuple[Tensor, Tensor]], n: int, count: int, *, out: Tensor | None = None
) -> Tensor:
    """Return the sum of sparse tensors, added in order, divided by `count`: float32, (n,).

    `sparse`: per tensor values, float32, shape (K,), and positions, int64, shape (K,), increasing,
    in [0, n); K may differ. `out`: the output tensor.

    Raises:
        IndexError: positions do not increase or are out of range; on a GPU a device-side trap.
        ValueError: there are no tensors.
    """
    if not sparse:
        raise ValueError("mean needs at least one payload")
    totals = [positions.numel() for _, positions in sparse]
    values = [
        vector(tensor, torch.float32, total, "values")
        for (tensor, _), total in zip(sparse, totals, strict=True)
    ]
    positions = [
        vector(tensor, torch.int64, total, "positions")
        for (_, tensor), total in zip(sparse, totals, strict=True)
    ]
    device = values[0].device
    out = output(out, torch.float32, n, device)
    _scatter_mean(values, positions, totals, float(count), n, out)
    return out


def mean(
    parts: Sequence[tuple[Tensor, Tensor, int]], n: int, *, out: Tensor | None = None
) -> Tensor:
    """Return the mean over workers of sparse tensors, added in order: float32, shape (n,).

    `parts`: per tensor positions and values, as for `scatter_mean`, and the number of workers whose
    mean it is; missing elements are 0. `out`: the output tensor.

    Raises:
        ValueError: there are no tensors.
    """
    sparse = [
        (values * count if count > 1 else values, positions) for positions, values, count in parts
    ]
    return scatter_mean(sparse, n, sum(count for *_, count in parts), out=out)


# ---- positions on the wire -----------------------------------------------------------------------


def _gaps_words(n: int, total: int, low: int) -> tuple[int, int]:
    """Return the words of the low bits, `low` per position, and of the high bits' bitmap."""
    return packed_words(total, low), packed_words(total + ((n - total) >> low), 1)


@cache
def gaps_low_bits(n: int, total: int) -> int:
    """Return the number of low bits that minimizes "gaps" for `total` positions below n."""
    return min(range(MAX_BITS + 1), key=lambda low: sum(_gaps_words(n, total, low)))


def position_layout(coding: str, n: int, total: int) -> Layout:
    """Return dtype and size of the parts for `total` positions below n.

    Raises:
        ValueError: an unknown coding, or "int32" for more than 2^31 elements.
    """
    match position_coding(coding, n, total):
        case "int32":
            if n > 2**31:
                raise ValueError(f"positions='int32' for {n} elements: expected at most 2^31")
            return ((torch.int32, total),)
        case "bitmap":
            return ((torch.int32, packed_words(n, 1)),)
        case "gaps":
            words = _gaps_words(n, total, gaps_low_bits(n, total))
            return tuple((torch.int32, size) for size in words)
    raise ValueError(f"positions={coding!r}: expected smallest, {', '.join(POSITION_CODINGS)}")


@cache
def position_coding(coding: str, n: int, total: int) -> str:
    """Return `coding`, or for "smallest" the one with the fewest bytes for `total` positions."""
    if coding != "smallest":
        return coding
    codings = [name for name in POSITION_CODINGS if name != "int32" or n <= 2**31]
    return min(codings, key=lambda c: sum(size for _, size in position_layout(c, n, total)))


def _bitmap(places: Tensor, n: int) -> Tensor:
    """Return `n` bits, set at `places`, as int32 words."""
    flags = torch.zeros(n, dtype=torch.int8, device=places.device)
    flags[places] = 1
    return packing.pack(flags, 1)


@operation(_invalid_positions)
def _pack_bitmap(positions: Tensor, total: int, n: int, words: Tensor) -> None:
    _check_increasing(positions, n)
    words.copy_(_bitmap(positions, n))


@operation(_invalid_positions)
def _pack_gaps(
    positions: Tensor, total: int, n: int, low: int, codes: Tensor, words: Tensor
) -> None:
    _check_increasing(positions, n)
    index = torch.arange(total, device=positions.device)
    rest = positions - index
    if low:
        packing.pack(rest & ((1 << low) - 1), low, out=codes)
    words.copy_(_bitmap((rest >> low) + index, total + ((n - total) >> low)))


def pack_positions(
    positions: Tensor, n: int, coding: str, *, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """Encode `positions`, int64, shape (K,), increasing and below n; return the parts.

    `coding`: one of `POSITION_CODINGS`, or "smallest". `out`: output tensors for the parts.

    Raises:
        IndexError: positions do not increase or are out of range; not with "int32" or on a GPU.
    """
    total, device = positions.numel(), positions.device
    coding = position_coding(coding, n, total)
    positions = vector(positions, torch.int64, total, "positions")
    layout = position_layout(coding, n, total)
    parts = tuple(outputs(out, device, *layout))
    if coding == "int32":
        parts[0].copy_(positions)
    elif coding == "bitmap":
        _pack_bitmap(positions, total, n, parts[0])
    else:
        low = gaps_low_bits(n, total)
        codes, words = parts
        _pack_gaps(positions, total, n, low, codes, words)
    return parts


def _no_positions(number: int, arguments: Mapping[str, Any]) -> PayloadError:
    """Return the error for a kernel's number: the lowest 3 bits are its kind, the rest a count."""
    n, total = arguments["n"], arguments["total"]
    reason = {
        1: f"a bit is set after the last of {arguments.get('held', n)} codes",
        2: f"a bitmap has {number >> 3} bits set: expected {total}",
        3: "positions must increase",
        4: "a position is outside its segment",
        5: f"a bit is set after the last of {total} codes",
    }[number & 7]
    return PayloadError(f"{arguments['name']}: {reason}")


def _clean(words: Tensor, bits: int, n: int, name: str) -> Tensor:
    """Return the codes in `words`, int32, shape (n,); PayloadError for bits set after the last."""
    held = packed_words(n, bits) // bits * 32  # capacity of the words in codes
    codes = packing.unpack(words, bits, held)
    if codes[n:].any():
        raise PayloadError(f"{name}: a bit is set after the last of {n} codes")
    return codes[:n]


def _set_bits(words: Tensor, n: int, total: int, name: str) -> Tensor:
    """Return the positions of the `total` set bits of a bitmap of `n`, int64, increasing."""
    places = _clean(words, 1, n, name).nonzero().squeeze(1)
    if places.numel() != total:
        raise PayloadError(f"{name}: a bitmap has {places.numel()} bits set: expected {total}")
    return places


def _check_positions(positions: Tensor, runs: Sequence[KeptRun], name: str) -> None:
    """Raise PayloadError unless positions increase and each segment has exactly k of them."""
    device = positions.device
    alive = [run for run in runs if run.keep]
    if not alive:
        return
    if not (positions[1:] > positions[:-1]).all():
        raise PayloadError(f"{name}: positions must increase")
    start, rows, length, keep = torch.tensor(alive, device=device).unbind(1)
    # Per segment: its first element and length, and the range of its positions.
    row = torch.arange(int(rows.sum()), device=device)
    row -= (rows.cumsum(0) - rows).repeat_interleave(rows)
    length = length.repeat_interleave(rows)
    start = start.repeat_interleave(rows) + row * length
    end = keep.repeat_interleave(rows).cumsum(0)
    begin = end - keep.repeat_interleave(rows)
    if (positions[begin] < start).any() or (positions[end - 1] >= start + length).any():
        raise PayloadError(f"{name}: a position is outside its segment")


@operation(_no_positions)
def _unpack_int32(
    indices: Tensor, n: int, runs: Sequence[KeptRun], total: int, name: str, out: Tensor
) -> None:
    out.copy_(indices)
    _check_positions(out, runs, name)


@operation(_no_positions)
def _unpack_bitmap(
    words: Tensor, n: int, runs: Sequence[KeptRun], total: int, name: str, out: Tensor
) -> None:
    out.copy_(_set_bits(words, n, total, name))
    _check_positions(out, runs, name)


@operation(_no_positions)
def _unpack_gaps(
    codes: Tensor,
    words: Tensor,
    low: int,
    held: int,
    n: int,
    runs: Sequence[KeptRun],
    total: int,
    name: str,
    out: Tensor,
) -> None:
    index = torch.arange(total, device=words.device)
    high = _set_bits(words, held, total, name) - index
    torch.add(high << low, index, out=out)
    if low:
        out += _clean(codes, low, total, name)
    _check_positions(out, runs, name)


def unpack_positions(
    parts: Sequence[Tensor], n: int, coding: str, runs: Sequence[KeptRun], name: str
) -> Tensor:
    """Decode positions, int64, shape (K,), from parts of `position_layout(coding, n, K)`.

    Raises:
        PayloadError: positions do not increase, a segment does not have exactly k of them, or an
            unused bit is set; the message starts with `name`.
        ValueError: a part has the wrong dtype or size.
    """
    total, device = kept_total(runs), parts[-1].device
    coding = position_coding(coding, n, total)
    layout = position_layout(coding, n, total)
    held = [
        vector(tensor, dtype, size, f"{name}: positions")
        for tensor, (dtype, size) in zip(parts, layout, strict=True)
    ]
    out = output(None, torch.int64, total, device)
    rest = n, tuple(runs), total, name, out
    if coding == "int32":
        _unpack_int32(held[0], *rest)
    elif coding == "bitmap":
        _unpack_bitmap(held[0], *rest)
    else:
        low = gaps_low_bits(n, total)
        bits = total + ((n - total) >> low)
        _unpack_gaps(held[0], held[1], low, bits, *rest)
    return out


# ---- values on the wire --------------------------------------------------------------------------


def value_layout(coding: str, runs: Sequence[KeptRun]) -> Layout:
    """Return dtype and size of the parts for the values of the kept elements."""
    total = kept_total(runs)
    match coding:
        case "fp32":
            return ((torch.float32, total),)
        case "fp16":
            return ((torch.float16, total),)
        case "range":
            grids = grouped_grids(kept_groups(runs))
            return (torch.int32, packed_words(total, RANGE_BITS)), (torch.int32, grids)
    raise ValueError(f"values={coding!r}: expected {', '.join(VALUE_CODINGS)}")


def kept_groups(runs: Sequence[KeptRun], width: int = 1) -> Groups:
    """Return the range float's groups: one per nonempty segment, `width` values per element."""
    return [(run.rows, width * run.keep) for run in runs if run.rows and run.keep]


def pack_values(
    values: Tensor,
    coding: str,
    runs: Sequence[KeptRun],
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Encode `values`, float32, finite, shape (K,); return the parts, in `out` if given."""
    if coding == "range":
        groups = kept_groups(runs)
        return rangefloat.pack(values, groups, RANGE_BITS, RANGE_MANTISSA, out=out)
    if coding == "fp16":
        values = values.clamp(-HALF_MAX, HALF_MAX).half()
    return (values if out is None else out[0].copy_(values),)


def unpack_values(
    parts: Sequence[Tensor], coding: str, runs: Sequence[KeptRun], name: str
) -> Tensor:
    """Decode values, float32, shape (K,), from parts of `value_layout(coding, runs)`.

    Raises:
        PayloadError: no encoder sends such a value or grid; the message starts with `name`.
    """
    if coding == "range":
        words, grids = parts
        return rangefloat.unpack(words, grids, kept_groups(runs), RANGE_BITS, RANGE_MANTISSA, name)
    values = parts[0].float()
    if not all_finite(values):
        raise PayloadError(f"{name}: a payload contains values that are not finite")
    return values


def value_error(x: Tensor, segments: Segments, coding: str, runs: Sequence[KeptRun]) -> float:
    """Return a bound on the squared error that `coding` adds to the kept elements of `x`, (n,).

    fp16: the error is at most 2^-11 |x| for |x| >= 2^-14, 2^-25 below that, and |x| - 65504 above
    65504. range: it is at most 2^-6 |x| for |x| >= eps (half of that unless x would round up to
    infinity), eps below, and 2^-132 if eps is not a normal float. A segment's grid has 510 steps
    below its largest magnitude, so eps^2 <= 2^-13 max |x|^2.
    """
    if coding == "fp32":
        return 0.0
    square = float(statistics.moments(x, segments)[1].sum()) * (1 + ROUNDING)
    total = kept_total(runs)
    if coding == "fp16":
        beyond = float((x.abs().double() - HALF_MAX).clamp_(min=0).square().sum())
        return 2.0**-22 * square + 2.0**-50 * total + beyond * (1 + ROUNDING)
    top = statistics.absmax(x, segments).double().square()
    below = 0.0
    for (which, *_), run in zip(segments.runs, runs, strict=True):
        below += run.keep * float(top[which].sum())
    return 2.0**-12 * square + 2.0**-13 * below + 2.0**-264 * total


# ---- sparse payloads: positions and values -------------------------------------------------------


def sparse_layout(n: int, runs: Sequence[KeptRun], positions: str, values: str) -> Layout:
    """Return the layout of a sparse payload: positions, then values."""
    where = position_layout(positions, n, kept_total(runs))
    return (*where, *value_layout(values, runs))


def sparse_encode(
    x: Tensor,
    runs: Sequence[KeptRun],
    positions: str,
    values: str,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Encode the largest elements of each segment of `x`, float32, (n,); return the parts.

    `positions`, `values`: the codings. `out`: output tensors for the parts.
    """
    indices, largest_values = largest_elements(x, runs)
    cut = len(position_layout(positions, x.numel(), kept_total(runs)))
    first, last = (None, None) if out is None else (out[:cut], out[cut:])
    where = pack_positions(indices, x.numel(), positions, out=first)
    return (*where, *pack_values(largest_values, values, runs, out=last))


def sparse_unpack(
    parts: Sequence[Tensor],
    n: int,
    runs: Sequence[KeptRun],
    positions: str,
    values: str,
    name: str,
) -> tuple[Tensor, Tensor]:
    """Decode positions, int64, and values, float32, shape (K,) each, from a sparse payload's parts.

    Raises:
        PayloadError: see `unpack_positions` and `unpack_values`.
    """
    cut = len(parts) - len(value_layout(values, runs))
    indices = unpack_positions(parts[:cut], n, positions, runs, name)
    return indices, unpack_values(parts[cut:], values, runs, name)
