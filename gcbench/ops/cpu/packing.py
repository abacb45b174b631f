"""Native packing and drawing."""

from __future__ import annotations

import torch
from torch import Tensor

from gcbench.core.compressor import Key
from gcbench.core.errors import PayloadError
from gcbench.ops.cpu.library import c, output, stream
from gcbench.ops.reference import check_bits, packed_words


def pack(codes: Tensor, bits: int, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.pack`."""
    check_bits(bits)
    if codes.is_floating_point():
        raise ValueError(f"codes of {codes.dtype}: integers expected")
    n, codes = codes.numel(), codes.contiguous()
    words = packed_words(n, bits)
    out = output(out, torch.int32, words)
    c.gc_pack(
        c.gc_tensor_address(codes, codes.dtype, n),
        codes.element_size(),
        n,
        bits,
        c.gc_tensor_address(out, torch.int32, words),
        torch.get_num_threads(),
    )
    return out


def unpack(words: Tensor, bits: int, n: int, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.unpack`."""
    check_bits(bits)
    size = packed_words(n, bits)
    if words.dtype != torch.int32 or words.shape[-1] != size:
        raise PayloadError(
            f"{words.shape[-1]} words of {words.dtype} for {n} codes of {bits} bits: "
            f"{size} of torch.int32 expected"
        )
    words = words.contiguous()
    if out is None:
        out = torch.empty((*words.shape[:-1], n), dtype=torch.int32)
    rows = words.numel() // size if n else 0
    c.gc_unpack(
        c.gc_tensor_address(words, torch.int32, words.numel()),
        rows,
        n,
        bits,
        c.gc_tensor_address(out, torch.int32, rows * n),
        torch.get_num_threads(),
    )
    return out


def draws24(
    key: Key, n: int, device: torch.device | str = "cpu", *, out: Tensor | None = None
) -> Tensor:
    """Serve `ops.draws24`."""
    out = output(out, torch.int32, n)
    c.gc_draws24(*stream(key), n, c.gc_tensor_address(out, torch.int32, n), torch.get_num_threads())
    return out


KERNELS = {"pack": pack, "unpack": unpack, "draws24": draws24}
