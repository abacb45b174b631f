"""Host code of packing.cu."""

from __future__ import annotations

from torch import Tensor

from gcbench.ops.cuda import tables
from gcbench.ops.cuda.launch import i32, i64, launcher
from gcbench.ops.dispatch import Kernel

_KERNEL = {1: "pack_8", 4: "pack_32", 8: "pack_64"}
MOST_ROWS = 65535


def pack(codes: Tensor, size: int, n: int, bits: int, out: Tensor) -> None:
    """Run `packing.pack`."""
    if size not in _KERNEL:
        codes = codes.int()
    if n:
        kernel, grid = _KERNEL[codes.element_size()], tables.grid(tables.tiles_of(n))
        args = (codes, i64(n), i32(bits), out)
        launcher(codes.device).launch("packing", kernel, grid, tables.THREADS, args)


def unpack(words: Tensor, rows: int, n: int, bits: int, out: Tensor) -> None:
    """Run `packing.unpack`: `words`, (rows, size), and `out`, (rows, n)."""
    run, tiles = launcher(words.device).launch, tables.grid(tables.tiles_of(n))
    for start in range(0, rows, MOST_ROWS):
        part = words[start : start + MOST_ROWS]
        args = (part, i64(words.shape[1]), i64(n), i32(bits), out[start : start + MOST_ROWS])
        run("packing", "unpack", (tiles, len(part)), tables.THREADS, args)


KERNELS: dict[str, Kernel] = {"packing.pack": pack, "packing.unpack": unpack}
