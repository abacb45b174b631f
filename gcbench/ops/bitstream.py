"""Bit streams of variable-length codes: Elias omega codes, and QSGD's two codings with them.

Bit order. Bit i of a stream is bit 31 - i % 32 of int32 word i // 32: words and codes begin with
their most significant bit. The last word is padded with zeros; an empty stream has no words.

Elias omega code of k >= 1 (Elias 1975, as in QSGD): start with "0"; while k > 1, prepend the binary
digits of k, and replace k by their number minus one. Lengths: 1 bit for 1, 3 for 2 and 3, 6 for 4
to 7, 7 for 8 to 15, 11 for 16 to 31.

Reading. The start of a code depends on all codes before it. The vectorized definition first
computes, for every bit, the length of the code that would start there, and so the start of the next
code. Composing this map with itself gives the start of the code 2, 4, 8, ... codes ahead; these
maps locate all actual starts by repeated halving of the distance between known starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gcbench.core.errors import PayloadError
from gcbench.ops.dispatch import Operation, operation, output
from gcbench.ops.packing import BLOCK

OMEGA_MAX = 2**31
"""The largest number with a code here; the code has 43 bits."""

_WORD = 0xFFFFFFFF
_GROUPS = 4
"""Groups of binary digits before the final zero of OMEGA_MAX's code; no code has more."""
_CHUNK = 1 << 16
"""Bits of a stream whose starts are located together; their maps fit in the cache."""
_AHEAD = 64
"""Bits after a chunk whose lengths are also computed, because the second code of a pair that starts
in the chunk may start there."""
_PREFIX = 11
"""The number of leading bits that determine a code's length. A group of digits followed by another
is that group's length minus one, hence below 32; such groups, and the bit that indicates another
group, end by bit 11."""


def omega_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Elias omega codes of integers and their lengths in bits, int64, of their shape.

    `values`: integers of any shape, each in [1, 2^31].

    Raises:
        ValueError: a value outside that range.
    """
    rest = values.long()
    if rest.numel() and not 1 <= int(rest.amin()) <= int(rest.amax()) <= OMEGA_MAX:
        raise ValueError(f"omega codes of [{rest.min()}, {rest.max()}]: expected 1 to 2^31")
    codes, lengths = torch.zeros_like(rest), torch.ones_like(rest)
    for _ in range(_GROUPS):
        # frexp's exponent is the number of binary digits; the code is complete when the rest is 1
        width = torch.where(rest > 1, torch.frexp(rest.double()).exponent.long(), 0)
        codes |= torch.where(rest > 1, rest << lengths, 0)
        lengths += width
        rest = torch.where(rest > 1, width - 1, 1)
    return codes, lengths


def write_codes(codes: Tensor, lengths: Tensor) -> Tensor:
    """Return the concatenated codes as a bit stream, int32 words.

    `codes`, `lengths`: int64, shape (m,). Code i is the lowest lengths[i] bits of codes[i], 0 to
    63; all higher bits are zero.
    """
    if not len(codes):
        return torch.empty(0, dtype=torch.int32, device=codes.device)
    ends = lengths.cumsum(0)
    words = torch.zeros((int(ends[-1]) + 31) // 32 + 2, dtype=torch.int64, device=codes.device)
    # A code may start at any bit of its first word, so it covers at most two more words.
    reached = (31 + int(lengths.amax()) + 31) // 32
    for code, length, end in zip(
        *(torch.split(t, BLOCK) for t in (codes, lengths, ends)), strict=True
    ):
        first = (end - length) >> 5
        reach = end - (first << 5)  # bits from the first word's start to the code's end
        for j in range(reached):
            shift = 32 * (j + 1) - reach
            part = (code >> (-shift).clamp_(min=0)) << shift.clamp_(0, 63)
            # Codes do not overlap, so addition equals `or`, in any order.
            words.scatter_add_(0, first + j, part & _WORD)
    return _signed(words[:-2])


def _signed(words: Tensor) -> Tensor:
    """Convert int64 words in [0, 2^32) to int32 with the same 32 bits."""
    return ((words ^ 0x80000000) - 0x80000000).int()


def _windows(words: Tensor, positions: Tensor) -> Tensor:
    """Return the 64 bits that start at each position, int64, shape of `positions`.

    `words`: int64 in [0, 2^32), with two words after that of the last position.
    """
    index, shift = positions >> 5, positions & 31
    high = words.take(index) << 32 | words.take(index + 1)
    return high << shift | words.take(index + 2) >> (32 - shift)


def _scan(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return value and length of the omega code at the start of each 64-bit window, int64.

    Without a code of a number below 2^32, the value is 2^32 and the length arbitrary, at most 43.
    """
    values, lengths = torch.ones_like(windows), torch.zeros_like(windows)
    for _ in range(_GROUPS):
        # A group starts with 1, so the window is negative; it has at most 32 digits.
        width = torch.where((windows < 0) & (values < 32), values + 1, 0)
        values = torch.where(width > 0, (windows >> 32 & _WORD) >> (32 - width), values)
        lengths += width
        windows = windows << width
    return values.masked_fill_(windows < 0, 1 << 32), lengths.add_(1)


@cache
def _prefix_lengths(device: torch.device) -> Tensor:
    """Return the length of the code for each value of its first `_PREFIX` bits, int64, (2^11,)."""
    return _scan(torch.arange(1 << _PREFIX, device=device) << (64 - _PREFIX))[1]


def _lengths(words: Tensor) -> Tensor:
    """Return the length of the omega code that would start at each bit of all words but the last.

    `words`: int64 in [0, 2^32), shape (w + 1,). The result is int64, shape (32 w,), arbitrary up to
    43 where no code starts; `_scan` then returns a value that the reader rejects.
    """
    pairs = (words[:-1] << 32 | words[1:]).unsqueeze(1)
    shifts = torch.arange(64 - _PREFIX, 32 - _PREFIX, -1, device=words.device)
    prefixes = pairs >> shifts & ((1 << _PREFIX) - 1)
    return _prefix_lengths(words.device).take(prefixes.view(-1))


def _starts(
    words: Tensor, first: int, count: int, jump: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, int]:
    """Return the bits at which `count` records start, int64, shape (count,), and the last one ends.

    `words`: int64 in [0, 2^32); `first`: the bit at which the first record starts. `jump(places,
    lengths)` returns the ends of records that start at `places`; `lengths` are those of the omega
    codes at these places and at 64 more.

    Raises:
        PayloadError: the stream ends before the last record.
    """
    chunks: list[Tensor] = []
    missing, bits = count, 32 * len(words)
    while missing > 0:
        if first >= bits:
            raise PayloadError(f"bit stream of {bits} bits lacks {missing} of {count} codes")
        base = first & ~31
        size = min(_CHUNK, bits - base)
        need = (size + _AHEAD) // 32 + 1
        have = words[base // 32 : base // 32 + need]
        lengths = _lengths(torch.nn.functional.pad(have, (0, need - len(have))))
        places = torch.arange(size + 2 * _AHEAD, device=words.device)
        # Places after the chunk map to themselves: the next chunk starts there.
        hop = places.int()
        hop[:size] = jump(places[:size], lengths)
        hops = [hop]
        while int(hops[-1][first - base]) < size and 1 << len(hops) < missing:
            hops.append(hops[-1].index_select(0, hops[-1]))
        starts = hop.new_tensor([first - base])
        for hop in reversed(hops):
            starts = torch.stack([starts, hop.index_select(0, starts)], dim=1).view(-1)
        starts = starts[starts < size][:missing].long()
        chunks.append(starts + base)
        missing -= len(starts)
        first = base + int(hops[0][starts[-1]])
    return torch.cat(chunks) if chunks else words.new_zeros(0), first


def check_stream(words: Tensor) -> None:
    """Check dtype and shape of a payload's bit stream.

    Raises:
        PayloadError: they are not one-dimensional int32.
    """
    if words.dtype != torch.int32 or words.dim() != 1:
        raise PayloadError(
            f"bit stream has dtype {words.dtype}, shape {tuple(words.shape)}: expected int32, 1-D"
        )


def check_codes(codes: Tensor, levels: int) -> None:
    """Check the range of codes.

    Raises:
        ValueError: one is not in [-levels, levels].
    """
    if codes.numel() and not -levels <= int(codes.amin()) <= int(codes.amax()) <= levels:
        raise ValueError(f"codes of [{codes.min()}, {codes.max()}]: expected -{levels} to {levels}")


def _unsigned(words: Tensor) -> Tensor:
    """Return the words of a payload as int64 in [0, 2^32).

    Raises:
        PayloadError: see `check_stream`.
    """
    check_stream(words)
    return words.long() & _WORD


def _read(words: Tensor, positions: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the values of the omega codes at bit positions, and their ends, int64.

    Raises:
        PayloadError: there is no code, or a value is above `top`.
    """
    padded = torch.nn.functional.pad(words, (0, 6))
    pieces = [_scan(_windows(padded, block)) for block in torch.split(positions, BLOCK)]
    values, lengths = (torch.cat(column) for column in zip(*pieces, strict=True))
    if len(values) and int(values.amax()) > top:
        raise PayloadError(f"bit stream contains a code that is not a number up to {top}")
    return values, positions + lengths


def _check_end(words: Tensor, end: int) -> None:
    """Raise PayloadError unless bit `end` is in the last word and only zeros follow."""
    bits = 32 * len(words)
    if not end <= bits < end + 32:
        raise PayloadError(f"bit stream of {bits} bits has codes up to bit {end} only")
    if end < bits and int(words[-1]) & ((1 << (bits - end)) - 1):
        raise PayloadError(f"bit stream has nonzero bits after its end at {end} of {bits}")


def _bit(words: Tensor, positions: Tensor) -> Tensor:
    """Return the bits at these positions, bool; False beyond the end of the stream."""
    padded = torch.nn.functional.pad(words, (0, 6))
    return (padded.take(positions >> 5) >> (31 - (positions & 31)) & 1).bool()


# ---- QSGD's dense and sparse coding --------------------------------------------------------------

_HEADER = 43
"""Bits of the longest omega code, an upper bound for the sparse coding's first number."""


@cache
def omega_bits(k: int) -> int:
    """Return the length of the omega code of k."""
    length = 1
    while k > 1:
        length += k.bit_length()
        k = k.bit_length() - 1
    return length


def _write(form: Operation[..., int], codes: Tensor, levels: int, longest: int) -> Tensor:
    """Return the words that the operation `form` writes: at most `longest` bits for each code."""
    if codes.is_floating_point() or codes.is_complex():
        raise ValueError(f"codes have dtype {codes.dtype}: expected integers")
    if codes.dtype is torch.int64:
        check_codes(codes, levels)  # before the upper bits are dropped
    n, codes = codes.numel(), codes.int().contiguous()
    if n >= OMEGA_MAX:
        raise ValueError(f"{n} codes: expected fewer than {OMEGA_MAX}")
    room = (_HEADER + longest * n + 31) // 32 + 1  # kernels write a word before it is complete
    out = output(None, torch.int32, room, codes.device)
    used: int = form(codes, n, levels, out)
    if used < 0:
        check_codes(codes, levels)
    return out.narrow_copy(0, 0, used)  # faster than slicing and cloning


def _filled(out: Tensor, stream: Tensor) -> int:
    out[: len(stream)] = stream
    return len(stream)


@operation()
def _omega_dense_write(codes: Tensor, n: int, levels: int, out: Tensor) -> int:
    check_codes(codes, levels)
    symbols = torch.arange(-levels, levels + 1, device=codes.device)
    table, lengths = omega_codes(symbols.abs() + 1)
    signed = symbols != 0
    table, lengths = torch.where(signed, table << 1 | (symbols < 0), table), lengths + signed
    index = codes.long() + levels
    return _filled(out, write_codes(table.take(index), lengths.take(index)))


def omega_dense_write(codes: Tensor, levels: int) -> Tensor:
    """Return signed codes in QSGD's dense coding, a bit stream in int32 words.

    `codes`: integers in [-levels, levels], shape (n,). Each is written as Elias(|code| + 1), and a
    sign bit (1: negative) unless it is zero (Alistarh et al. 2017, appendix A.3).

    Raises:
        ValueError: a code outside that range, or 2^31 codes or more.
    """
    return _write(_omega_dense_write, codes, levels, omega_bits(levels + 1) + 1)


@operation()
def _omega_sparse_write(codes: Tensor, n: int, levels: int, out: Tensor) -> int:
    check_codes(codes, levels)
    places = codes.nonzero().squeeze(1)
    values = codes.take(places).long()
    gaps = torch.diff(places, prepend=places.new_tensor([-1]))
    gap_codes, gap_lengths = omega_codes(gaps)
    table, table_lengths = omega_codes(torch.arange(1, levels + 1, device=codes.device))
    size = values.abs() - 1
    lengths = table_lengths.take(size)
    signed = table.take(size) | (values < 0).long() << lengths
    head = omega_codes(places.new_tensor([len(places) + 1]))
    stream = torch.cat([head[0], torch.stack([gap_codes, signed], dim=1).view(-1)])
    widths = torch.cat([head[1], torch.stack([gap_lengths, lengths + 1], dim=1).view(-1)])
    return _filled(out, write_codes(stream, widths))


def omega_sparse_write(codes: Tensor, levels: int) -> Tensor:
    """Return signed codes in QSGD's sparse coding, a bit stream in int32 words.

    `codes`: integers in [-levels, levels], shape (n,). Each nonzero code is written as
    Elias(distance from the previous nonzero code, or index plus 1), a sign bit (1: negative) and
    Elias(|code|) (Alistarh et al. 2017, section 3.1 and appendix A.2). The stream starts with
    Elias(1 + number of nonzero codes), because the number of words does not determine its end.

    Raises:
        ValueError: a code outside that range, or 2^31 codes or more.
    """
    # Elias(distance) has at most 2 distance - 1 bits, and distances sum to at most n.
    return _write(_omega_sparse_write, codes, levels, 2 + omega_bits(levels))


def _fault(number: int, arguments: Mapping[str, Any]) -> PayloadError:
    where, count = arguments["info"].tolist()
    bits = 32 * arguments["words"].numel()
    reason = {
        1: f"of {bits} bits lacks {where} of {count} codes",
        2: f"contains a code that is not a number up to {where}",
        3: f"of {bits} bits has codes up to bit {where} only",
        4: f"has nonzero bits after its end at {where} of {bits}",
        5: f"has index {where} of {arguments['n']} codes",
    }[number]
    return PayloadError(f"bit stream {reason}")


def _read_all(form: Operation[..., None], words: Tensor, n: int, levels: int) -> Tensor:
    check_stream(words)
    words = words.contiguous()
    codes = torch.zeros(n, dtype=torch.int32, device=words.device)
    info = torch.tensor([0, n])  # on the CPU: details of an error for `_fault`
    form(words, n, levels, codes, info)
    return codes


@operation(_fault)
def _omega_dense_read(words: Tensor, n: int, levels: int, codes: Tensor, info: Tensor) -> None:
    stream = _unsigned(words)
    starts, end = _starts(stream, 0, n, _dense_jump)
    values, ends = _read(stream, starts, levels + 1)
    _check_end(stream, end)
    values -= 1
    codes.copy_(torch.where((values > 0) & _bit(stream, ends), -values, values))


def omega_dense_read(words: Tensor, n: int, levels: int) -> Tensor:
    """Return the n codes that `omega_dense_write` wrote, int32, shape (n,).

    Raises:
        PayloadError: the stream does not encode n codes in [-levels, levels].
    """
    return _read_all(_omega_dense_read, words, n, levels)


def _dense_jump(places: Tensor, lengths: Tensor) -> Tensor:
    """Return the ends of dense records: an omega code, and a sign bit unless it encodes 1."""
    length = lengths[: len(places)]
    return places + length + (length > 1)


@operation(_fault)
def _omega_sparse_read(words: Tensor, n: int, levels: int, codes: Tensor, info: Tensor) -> None:
    stream = _unsigned(words)
    head, first = _read(stream, stream.new_zeros(1), n + 1)
    count = int(head) - 1
    starts, end = _starts(stream, int(first), count, _sparse_jump)
    gaps, signs = _read(stream, starts, n)
    values, _ = _read(stream, signs + 1, levels)
    _check_end(stream, end)
    places = gaps.cumsum(0) - 1
    if count and int(places[-1]) >= n:
        raise PayloadError(f"bit stream has index {int(places[-1])} of {n} codes")
    codes[places] = torch.where(_bit(stream, signs), -values, values).int()


def omega_sparse_read(words: Tensor, n: int, levels: int) -> Tensor:
    """Return the n codes that `omega_sparse_write` wrote, int32, shape (n,).

    Raises:
        PayloadError: the stream does not encode n codes in [-levels, levels].
    """
    return _read_all(_omega_sparse_read, words, n, levels)


def _sparse_jump(places: Tensor, lengths: Tensor) -> Tensor:
    """Return the ends of sparse records: an omega code, a sign bit, and another omega code."""
    second = places + lengths[: len(places)] + 1
    return second + lengths.take(second)
