"""Host code of packing.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from gcbench.core.errors import PayloadError
from gcbench.ops.backend import Kernels
from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import i32, i64, launcher
from gcbench.ops.reference import check_bits, packed_words

_KERNEL = {1: "pack_8", 4: "pack_32", 8: "pack_64"}
MOST_ROWS = 65535


def pack(codes: Tensor, bits: int, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.pack`."""
    check_bits(bits)
    if codes.is_floating_point():
        raise ValueError(f"codes of {codes.dtype}: integers expected")
    n, codes = codes.numel(), codes.contiguous()
    if codes.element_size() not in _KERNEL:
        codes = codes.int()
    out = tables.output(out, torch.int32, packed_words(n, bits), codes.device)
    if n:
        kernel, grid = _KERNEL[codes.element_size()], tables.grid(tables.tiles_of(n))
        args = (codes, i64(n), i32(bits), out)
        launcher(codes.device).launch("packing", kernel, grid, tables.THREADS, args)
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
    numel = words.numel() // size * n if n else 0
    shape = (*words.shape[:-1], n)
    out = tables.output(out, torch.int32, numel, words.device).view(shape)
    if out.numel():
        run, tiles = launcher(words.device).launch, tables.grid(tables.tiles_of(n))
        flat, into = words.view(-1, size), out.view(-1, n)
        for start in range(0, len(flat), MOST_ROWS):
            part = flat[start : start + MOST_ROWS]
            args = (part, i64(size), i64(n), i32(bits), into[start : start + MOST_ROWS])
            run("packing", "unpack", (tiles, len(part)), tables.THREADS, args)
    return out


KERNELS: Kernels = {"pack": pack, "unpack": unpack}
