"""Native signs: packing, values, votes, 1-bit codes with the means of their classes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import pack

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.cpu.library import (
    addresses,
    c,
    new_float32,
    new_float64,
    new_int32,
    output,
    stream,
    summands,
)
from gcbench.ops.reference import packed_words
from gcbench.ops.sign import sign_voters, wrong


def sign_pack(x: Tensor, bits: int = 1, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.sign_pack`."""
    n, x = x.numel(), x.contiguous()
    words = packed_words(n, bits)
    out = output(out, torch.int32, words)
    c.gc_sign_pack(
        c.gc_tensor_address(x, torch.float32, n),
        n,
        bits,
        c.gc_tensor_address(out, torch.int32, words),
        torch.get_num_threads(),
    )
    return out


def sign_pack_above(
    x: Tensor, factor: float, segments: Segments, *, out: Tensor | None = None
) -> Tensor:
    """Serve `ops.sign_pack_above`."""
    n, m, x = segments.numel, len(segments), x.contiguous()
    words = packed_words(n, 2)
    out = output(out, torch.int32, words)
    square = new_float64(m)
    threads, table = torch.get_num_threads(), segments.table.data_ptr()
    place = c.gc_tensor_address(x, torch.float32, n)
    c.gc_segment_statistics(place, table, m, None, None, square.data_ptr(), threads)
    c.gc_sign_pack_above(
        place,
        table,
        m,
        square.data_ptr(),
        factor,
        c.gc_tensor_address(out, torch.int32, words),
        threads,
    )
    return out


def _packed(words: Tensor, bits: int, n: int) -> Tensor:
    """Return `words`, contiguous.

    Raises:
        PayloadError: they are not int32, or not as many as n codes take.
    """
    if words.dtype is not torch.int32 or words.shape != (packed_words(n, bits),):
        raise _mismatch(words, bits, n)
    return words.contiguous()


def _mismatch(words: Tensor, bits: int, n: int) -> PayloadError:
    return PayloadError(
        f"{tuple(words.shape)} words of {words.dtype} for {n} codes of {bits} bits: "
        f"{packed_words(n, bits)} of torch.int32 expected"
    )


def sign_decode(
    words: Tensor, bits: int, n: int, name: str, *, out: Tensor | None = None
) -> Tensor:
    """Serve `ops.sign_decode`."""
    words, out = _packed(words, bits, n), output(out, torch.float32, n)
    bad = c.gc_sign_decode(
        words.data_ptr(),
        n,
        bits,
        c.gc_tensor_address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    if bad:
        raise wrong(name, bad)
    return out


@lru_cache
def _ballots(
    counts: tuple[int, ...], bits: tuple[int, ...], n: int, name: str
) -> tuple[int, tuple[int, ...], bytes, bytes]:
    """Return the voters, the words of each payload, and counts and bits as C arrays.

    Raises:
        PayloadError: see `sign_voters`.
    """
    voters, number = sign_voters(counts, name), len(bits)
    sizes = tuple(packed_words(n, width) for width in bits)
    return voters, sizes, pack(f"{number}q", *counts), pack(f"{number}i", *bits)


def sign_vote(
    words: Sequence[Tensor],
    counts: Sequence[int],
    bits: Sequence[int],
    n: int,
    name: str,
    *,
    width: int,
    quorum: int = 1,
    coin: Key | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.sign_vote`."""
    size = packed_words(n, width)
    voters, sizes, votes, widths = _ballots(tuple(counts), tuple(bits), n, name)
    (places,), _kept = addresses(
        ((tuple(words), torch.int32, sizes),),
        lambda: [_packed(*pair, n) for pair in zip(words, bits, strict=True)],
    )
    out = output(out, torch.int32, size)
    bad = c.gc_sign_vote(
        places,
        votes,
        widths,
        len(sizes),
        voters,
        n,
        width,
        min(quorum, voters),
        coin is not None,
        *(stream(coin) if coin is not None else (0, 0, 0, 0)),
        c.gc_tensor_address(out, torch.int32, size),
        torch.get_num_threads(),
    )
    if bad:
        raise wrong(name, bad)
    return out


def _encode(
    x: Tensor, residual: Tensor | None, segments: Segments, classes: bool, left: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, int]:
    """Return the bits, what -1 and +1 are in each segment, and what is wrong.

    With `classes` -1 and +1 have a mean of their own; without them +1 is their common magnitude,
    and there is no other.
    """
    n, m, x = segments.numel, len(segments), x.contiguous()
    words, high = new_int32(packed_words(n, 1)), new_float32(m)
    low = new_float32(m) if classes else None
    if residual is not None:
        residual = residual.contiguous()
    bad = c.gc_sign_encode(
        c.gc_tensor_address(x, torch.float32, n),
        None if residual is None else c.gc_tensor_address(residual, torch.float32, n),
        segments.table.data_ptr(),
        m,
        words.data_ptr(),
        None if low is None else low.data_ptr(),
        high.data_ptr(),
        None if left is None else c.gc_tensor_address(left, torch.float32, n),
        torch.get_num_threads(),
    )
    return words, low, high, bad


def scaled_encode(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Serve `ops.scaled_encode`."""
    words, _, scale, _ = _encode(x, None, segments, False, None)
    return words, scale


def class_encode(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """Serve `ops.class_encode`."""
    words, low, high, _ = _encode(x, None, segments, True, None)
    assert low is not None
    return words, low, high


def scaled_feedback(
    x: Tensor, residual: Tensor, segments: Segments, name: str, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Serve `ops.scaled_feedback`."""
    out = output(out, torch.float32, segments.numel)
    words, _, scale, bad = _encode(x, residual, segments, False, out)
    if bad:
        raise wrong(name, bad)
    return words, scale, out


def class_feedback(
    x: Tensor, residual: Tensor, segments: Segments, name: str, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Serve `ops.class_feedback`."""
    out = output(out, torch.float32, segments.numel)
    words, low, high, bad = _encode(x, residual, segments, True, out)
    if bad:
        raise wrong(name, bad)
    assert low is not None
    return words, low, high, out


def _values(
    words: Tensor,
    low: Tensor | None,
    high: Tensor,
    segments: Segments,
    name: str,
    total: Tensor | None,
    count: int,
    out: Tensor | None,
) -> Tensor:
    n, m = segments.numel, len(segments)
    words, high = _packed(words, 1, n), high.contiguous()
    if low is not None:
        low = low.contiguous()
    if total is not None:
        total = total.contiguous()
    out = output(out, torch.float32, n)
    bad = c.gc_sign_values(
        words.data_ptr(),
        segments.table.data_ptr(),
        m,
        None if low is None else c.gc_tensor_address(low, torch.float32, m),
        c.gc_tensor_address(high, torch.float32, m),
        None if total is None else c.gc_tensor_address(total, torch.float32, n),
        1.0 if total is None else float(count),
        c.gc_tensor_address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    if bad:
        raise wrong(name, bad)
    return out


def scaled_decode(
    words: Tensor,
    scale: Tensor,
    segments: Segments,
    name: str,
    *,
    total: Tensor | None = None,
    count: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.scaled_decode`."""
    return _values(words, None, scale, segments, name, total, count, out)


def class_decode(
    words: Tensor,
    low: Tensor,
    high: Tensor,
    segments: Segments,
    name: str,
    *,
    total: Tensor | None = None,
    count: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.class_decode`."""
    return _values(words, low, high, segments, name, total, count, out)


def sign_mean(
    payloads: Sequence[tuple[Tensor, tuple[Tensor, ...], int]],
    segments: Segments,
    name: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.sign_mean`."""
    n, m = segments.numel, len(segments)
    classes = len(payloads[0][1]) if payloads else 0
    layout = (torch.int32, packed_words(n, 1)), *((torch.float32, m),) * classes
    (words, *means, counts, number, workers), _kept = summands(
        payloads, layout, lambda: [_packed(words, 1, n) for words, _, _ in payloads]
    )
    out = output(out, torch.float32, n)
    bad = c.gc_sign_mean(
        words,
        means[0] if len(means) == 2 else None,
        means[-1],
        counts,
        number,
        workers,
        segments.table.data_ptr(),
        m,
        c.gc_tensor_address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    if bad:
        raise wrong(name, bad)
    return out


KERNELS = {
    "class_decode": class_decode,
    "class_encode": class_encode,
    "class_feedback": class_feedback,
    "scaled_decode": scaled_decode,
    "scaled_encode": scaled_encode,
    "scaled_feedback": scaled_feedback,
    "sign_decode": sign_decode,
    "sign_mean": sign_mean,
    "sign_pack": sign_pack,
    "sign_pack_above": sign_pack_above,
    "sign_vote": sign_vote,
}
