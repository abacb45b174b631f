"""Native ternary codes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import pack

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.cpu.library import addresses, c, output, stream, unzipped
from gcbench.ops.reference import packed_words, ternary_bits


def ternary_encode(
    x: Tensor,
    limit: Tensor | None,
    scale: Tensor,
    segments: Segments,
    key: Key,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.ternary_encode`."""
    n, m, x = segments.numel, len(segments), x.contiguous()
    words = packed_words(n, 2)
    out = output(out, torch.int32, words)
    c.gc_ternary_encode(
        c.gc_tensor_address(x, torch.float32, n),
        n,
        segments.table.data_ptr(),
        m,
        None if limit is None else c.gc_tensor_address(limit, torch.float32, m),
        c.gc_tensor_address(scale, torch.float32, m),
        *stream(key),
        c.gc_tensor_address(out, torch.int32, words),
        torch.get_num_threads(),
    )
    return out


@lru_cache
def _codes(
    counts: tuple[int, ...], n: int, bits: int | None
) -> tuple[tuple[int, ...], tuple[int, ...], bytes, bytes]:
    """Return the bits and the words of each payload, and the bits and largest codes as C arrays."""
    widths = tuple(bits or ternary_bits(count) for count in counts)
    sizes = tuple(packed_words(n, width) for width in widths)
    ints = f"{len(counts)}i"
    return widths, sizes, pack(ints, *widths), pack(ints, *(2 * count for count in counts))


def _check_words(payloads: Sequence[Tensor], widths: Sequence[int], n: int) -> None:
    for words, width in zip(payloads, widths, strict=True):
        if words.dtype is not torch.int32 or words.shape != (packed_words(n, width),):
            raise PayloadError(f"ternary payloads of {n} codes in {width} bits: a length is wrong")


def _payloads(
    payloads: Sequence[tuple[Tensor, int]], n: int, bits: int | None
) -> tuple[tuple[bytes, bytes, bytes, int, int], object]:
    """Return C arrays and their length and the workers of all, and what is kept alive."""
    words, counts = unzipped(payloads)
    widths, sizes, packed_widths, tops = _codes(counts, n, bits)
    (places,), kept = addresses(
        ((words, torch.int32, sizes),), lambda: _check_words(words, widths, n)
    )
    return (places, packed_widths, tops, len(counts), sum(counts)), kept


def _check(bad: int, payloads: Sequence[tuple[Tensor, int]]) -> None:
    if bad < 0:
        raise PayloadError("ternary payload: scales must be finite and not negative")
    if bad:
        _, count = payloads[bad - 1]
        raise PayloadError(
            f"ternary payload of {count} worker(s), number {bad - 1}: a code above {2 * count}"
        )


def ternary_mean(
    payloads: Sequence[tuple[Tensor, int]],
    scale: Tensor,
    segments: Segments,
    *,
    bits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.ternary_mean`."""
    n, m = segments.numel, len(segments)
    (places, widths, tops, number, workers), _kept = _payloads(payloads, n, bits)
    out = output(out, torch.float32, n)
    bad = c.gc_ternary_mean(
        places,
        widths,
        tops,
        number,
        workers,
        c.gc_tensor_address(scale, torch.float32, m),
        n,
        segments.table.data_ptr(),
        m,
        c.gc_tensor_address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    _check(bad, payloads)
    return out


def ternary_merge(
    payloads: Sequence[tuple[Tensor, int]], n: int, *, out: Tensor | None = None
) -> tuple[Tensor, int]:
    """Serve `ops.ternary_merge`."""
    (places, widths, tops, number, workers), _kept = _payloads(payloads, n, None)
    width = ternary_bits(workers)
    words = packed_words(n, width)
    out = output(out, torch.int32, words)
    bad = c.gc_ternary_merge(
        places,
        widths,
        tops,
        number,
        n,
        width,
        c.gc_tensor_address(out, torch.int32, words),
        torch.get_num_threads(),
    )
    _check(bad, payloads)
    return out, workers


KERNELS = {
    "ternary_encode": ternary_encode,
    "ternary_mean": ternary_mean,
    "ternary_merge": ternary_merge,
}
