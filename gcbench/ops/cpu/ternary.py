"""Native ternary codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.compressor import Key, Segments
from gcbench.errors import PayloadError
from gcbench.ops.cpu.library import address, c, c_array, output, place, stream
from gcbench.ops.reference import packed_words, ternary_bits

SIGNATURES = {
    "gc_ternary_encode": "plplppQQIIpi",
    "gc_ternary_mean": "pppllplplpi",
    "gc_ternary_merge": "pppllipi",
}


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
        address(x, torch.float32, n),
        n,
        segments.table.data_ptr(),
        m,
        None if limit is None else address(limit, torch.float32, m),
        address(scale, torch.float32, m),
        *stream(key),
        address(out, torch.int32, words),
        torch.get_num_threads(),
    )
    return out


def _payloads(
    payloads: Sequence[tuple[Tensor, int]], n: int, bits: int | None
) -> tuple[int, tuple[int, int, int, int], object]:
    """Return the workers of all payloads, the C arguments, and what these point into."""
    number, workers, known = len(payloads), 0, -1
    places, widths, tops = [], [], []
    kept = []
    for words, count in payloads:
        if count != known:
            known, width = count, bits or ternary_bits(count)
            size = packed_words(n, width)
        if words.dtype is not torch.int32 or words.numel() != size or words.dim() != 1:
            raise PayloadError(f"ternary payloads of {n} codes in {width} bits: a length is wrong")
        words = words.contiguous()
        kept.append(words)
        places.append(place(words))
        widths.append(width)
        tops.append(2 * count)
        workers += count
    arrays = c_array(places), c_array(widths, "i"), c_array(tops, "i")
    first, second, third = (numbers.buffer_info()[0] for numbers in arrays)
    return workers, (first, second, third, number), (*kept, *arrays)


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
    workers, arguments, _kept = _payloads(payloads, n, bits)
    out = output(out, torch.float32, n)
    bad = c.gc_ternary_mean(
        *arguments,
        workers,
        address(scale, torch.float32, m),
        n,
        segments.table.data_ptr(),
        m,
        address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    _check(bad, payloads)
    return out


def ternary_merge(
    payloads: Sequence[tuple[Tensor, int]], n: int, *, out: Tensor | None = None
) -> tuple[Tensor, int]:
    """Serve `ops.ternary_merge`."""
    workers, arguments, _kept = _payloads(payloads, n, None)
    width = ternary_bits(workers)
    words = packed_words(n, width)
    out = output(out, torch.int32, words)
    bad = c.gc_ternary_merge(
        *arguments, n, width, address(out, torch.int32, words), torch.get_num_threads()
    )
    _check(bad, payloads)
    return out, workers


KERNELS = {
    "ternary_encode": ternary_encode,
    "ternary_mean": ternary_mean,
    "ternary_merge": ternary_merge,
}
