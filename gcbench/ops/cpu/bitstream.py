"""Native Elias omega streams, the two forms of QSGD."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from gcbench.core.errors import PayloadError
from gcbench.ops.bitstream import OMEGA_MAX, check_codes, check_stream
from gcbench.ops.cpu.library import c, new_int32

HEADER = 43
"""Bits of the longest omega code, with which the sparse form may begin."""
SPARE = 3
"""Words that each thread may write beyond the bits of its codes, as in cuda/omega_write.cpp."""


@lru_cache
def _omega_bits(k: int) -> int:
    """Return the length of the omega code of k."""
    length = 1
    while k > 1:
        length += k.bit_length()
        k = k.bit_length() - 1
    return length


def _write(write: Callable[..., int], codes: Tensor, levels: int, longest: int) -> Tensor:
    """Return the words that `write` makes of a header and at most `longest` bits for each code."""
    n, threads = codes.numel(), torch.get_num_threads()
    if n >= OMEGA_MAX:
        raise ValueError(f"{n} codes: fewer than {OMEGA_MAX} allowed")
    codes = codes.int().contiguous()
    room = new_int32((HEADER + longest * n + 31) // 32 + SPARE * threads)
    place = c.gc_tensor_address(codes, torch.int32, n)
    used = write(place, n, levels, longest, room.data_ptr(), threads)
    if used < 0:
        check_codes(codes, levels)
    return room.narrow_copy(0, 0, used)  # in half the time of slicing and cloning


def omega_dense_write(codes: Tensor, levels: int) -> Tensor:
    """Serve `ops.omega_dense_write`."""
    return _write(c.gc_omega_dense_write, codes, levels, _omega_bits(levels + 1) + 1)


def omega_sparse_write(codes: Tensor, levels: int) -> Tensor:
    """Serve `ops.omega_sparse_write`."""
    # A distance takes at most as many bits as it is wide, and one bit where it is 1.
    return _write(c.gc_omega_sparse_write, codes, levels, 2 + _omega_bits(levels))


def _read(
    read: Callable[..., int], words: Tensor, n: int, levels: int, codes: Tensor, records: int
) -> Tensor:
    """Return `codes` as `read` fills them.

    Raises:
        PayloadError: the stream is none, as `read` says.
    """
    check_stream(words)
    count, words = words.numel(), words.contiguous()
    info = array("q", [0, records])
    fault = read(
        words.data_ptr(),
        count,
        n,
        levels,
        codes.data_ptr(),
        info.buffer_info()[0],
        torch.get_num_threads(),
    )
    if fault:
        where, bits = info[0], 32 * count
        raise PayloadError(
            (
                f"bit stream of {bits} bits ends {where} of {info[1]} codes early",
                f"bit stream: a code stands for more than {where}, or for nothing",
                f"bit stream of {bits} bits: its codes end at bit {where}",
                f"bit stream: bits after its end at {where} of {bits} are not zero",
                f"bit stream: index {where} of {n} codes",
            )[fault - 1]
        )
    return codes


def omega_dense_read(words: Tensor, n: int, levels: int) -> Tensor:
    """Serve `ops.omega_dense_read`."""
    codes = new_int32(n)
    return _read(c.gc_omega_dense_read, words, n, levels, codes, n)


def omega_sparse_read(words: Tensor, n: int, levels: int) -> Tensor:
    """Serve `ops.omega_sparse_read`."""
    codes = torch.zeros(n, dtype=torch.int32)
    return _read(c.gc_omega_sparse_read, words, n, levels, codes, n)


KERNELS = {
    "omega_dense_write": omega_dense_write,
    "omega_sparse_write": omega_sparse_write,
    "omega_dense_read": omega_dense_read,
    "omega_sparse_read": omega_sparse_read,
}
