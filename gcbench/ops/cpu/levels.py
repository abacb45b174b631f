"""Native levels of a norm (QSGD)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.cpu.bitstream import (
    omega_dense_read,
    omega_dense_write,
    omega_sparse_read,
    omega_sparse_write,
)
from gcbench.ops.cpu.library import c, new_float32, output, stream, summands
from gcbench.ops.quantize import (
    BAD_CODES,
    BAD_NORMS,
    check_norms,
    check_words,
    level_bits,
    one_by_one,
)
from gcbench.ops.reference import into, packed_words


def level_norms(x: Tensor, segments: Segments, norm: str, levels: int) -> Tensor:
    """Serve `ops.level_norms`."""
    m, x = len(segments), x.contiguous()
    norms = new_float32(m)
    c.gc_level_norms(
        c.gc_tensor_address(x, torch.float32, segments.numel),
        segments.table.data_ptr(),
        m,
        norm == "2",
        levels,
        norms.data_ptr(),
        torch.get_num_threads(),
    )
    return norms


def level_codes(
    x: Tensor,
    norms: Tensor,
    levels: int,
    segments: Segments,
    key: Key,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.level_codes`."""
    n, m, x, norms = segments.numel, len(segments), x.contiguous(), norms.contiguous()
    out = output(out, torch.int32, n)
    c.gc_level_codes(
        c.gc_tensor_address(x, torch.float32, n),
        n,
        segments.table.data_ptr(),
        m,
        c.gc_tensor_address(norms, torch.float32, m),
        levels,
        *stream(key),
        c.gc_tensor_address(out, torch.int32, n),
        torch.get_num_threads(),
    )
    return out


def level_encode(
    x: Tensor,
    norms: Tensor,
    levels: int,
    coding: str,
    segments: Segments,
    key: Key,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.level_encode`."""
    if coding != "fixed":
        write = omega_dense_write if coding == "omega-dense" else omega_sparse_write
        return into(out, write(level_codes(x, norms, levels, segments, key), levels))
    n, m, bits = segments.numel, len(segments), level_bits(levels)
    x, norms, words = x.contiguous(), norms.contiguous(), packed_words(n, bits)
    out = output(out, torch.int32, words)
    c.gc_level_encode(
        c.gc_tensor_address(x, torch.float32, n),
        n,
        segments.table.data_ptr(),
        m,
        c.gc_tensor_address(norms, torch.float32, m),
        levels,
        bits,
        *stream(key),
        c.gc_tensor_address(out, torch.int32, words),
        torch.get_num_threads(),
    )
    return out


def level_decode(
    words: Tensor,
    norms: Tensor,
    norm: str,
    levels: int,
    coding: str,
    segments: Segments,
    *,
    onto: Tensor | None = None,
    count: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.level_decode`."""
    n, m = segments.numel, len(segments)
    bits, numel = level_bits(levels), packed_words(n, level_bits(levels))
    if coding != "fixed":
        check_norms(norms, m)
        read = omega_dense_read if coding == "omega-dense" else omega_sparse_read
        words, bits, numel = read(words, n, levels), 0, n
    else:
        check_words(words, norms, n, bits, m)
    words, norms = words.contiguous(), norms.contiguous()
    out = output(out, torch.float32, n)
    fault = c.gc_level_decode(
        c.gc_tensor_address(words, torch.int32, numel),
        bits,
        c.gc_tensor_address(norms, torch.float32, m),
        norm == "max",
        levels,
        n,
        segments.table.data_ptr(),
        m,
        None if onto is None else c.gc_tensor_address(onto, torch.float32, n),
        count,
        c.gc_tensor_address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    if fault:
        raise PayloadError(BAD_NORMS if fault == 1 else BAD_CODES)
    return out


def level_mean(
    payloads: Sequence[tuple[Tensor, Tensor, int]],
    norm: str,
    levels: int,
    coding: str,
    segments: Segments,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.level_mean`; a stream is read in order, and each is added when it has been."""
    if coding != "fixed":
        return into(out, one_by_one(level_decode, payloads, norm, levels, coding, segments))
    n, m, bits = segments.numel, len(segments), level_bits(levels)

    def check() -> None:
        for words, norms, _ in payloads:
            check_words(words, norms, n, bits, m)

    layout = (torch.int32, packed_words(n, bits)), (torch.float32, m)
    arguments, _kept = summands(payloads, layout, check)
    out = output(out, torch.float32, n)
    fault = c.gc_level_mean(
        *arguments,
        bits,
        norm == "max",
        levels,
        n,
        segments.table.data_ptr(),
        m,
        c.gc_tensor_address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    if fault:
        raise PayloadError(BAD_NORMS if fault == 1 else BAD_CODES)
    return out


KERNELS = {
    "level_norms": level_norms,
    "level_codes": level_codes,
    "level_encode": level_encode,
    "level_decode": level_decode,
    "level_mean": level_mean,
}
