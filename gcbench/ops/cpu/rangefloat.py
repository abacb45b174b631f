"""Native range floats."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from gcbench.core.errors import PayloadError
from gcbench.ops.cpu.library import c, c_array, new_int32, output
from gcbench.ops.rangefloat import Groups, grouped_grids, grouped_values, range_check
from gcbench.ops.reference import packed_words


def _table(groups: Groups) -> bytes:
    """Return groups as the kernels take them: two integers a run."""
    return c_array(chain.from_iterable(groups))


def range_pack(
    values: Tensor,
    groups: Groups,
    bits: int,
    mantissa: int,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Serve `ops.range_pack`."""
    range_check(bits, mantissa)
    n, values = grouped_values(groups), values.contiguous()
    grids = new_int32(grouped_grids(groups))
    size = packed_words(n, bits)
    words = output(out, torch.int32, size)
    c.gc_range_pack(
        c.gc_tensor_address(values, torch.float32, n),
        n,
        _table(groups),
        len(grids),
        bits,
        mantissa,
        grids.data_ptr(),
        c.gc_tensor_address(words, torch.int32, size),
        torch.get_num_threads(),
    )
    return words, grids


def range_unpack(
    words: Tensor,
    grids: Tensor,
    groups: Groups,
    bits: int,
    mantissa: int,
    name: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Serve `ops.range_unpack`."""
    range_check(bits, mantissa)
    n, m = grouped_values(groups), grouped_grids(groups)
    words, grids, out = words.contiguous(), grids.contiguous(), output(out, torch.float32, n)
    bad = c.gc_range_unpack(
        c.gc_tensor_address(words, torch.int32, packed_words(n, bits)),
        c.gc_tensor_address(grids, torch.int32, m),
        m,
        n,
        _table(groups),
        bits,
        mantissa,
        c.gc_tensor_address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    if bad:
        reason = {
            1: "a range that no values have",
            2: f"a bit is set after the last of {n} codes",
            3: "a payload's values are not finite",
        }[bad]
        raise PayloadError(f"{name}: {reason}")
    return out


KERNELS = {"range_pack": range_pack, "range_unpack": range_unpack}
