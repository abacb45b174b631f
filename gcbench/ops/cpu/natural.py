"""Native natural compression."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import Key
from gcbench.core.errors import PayloadError
from gcbench.ops.cpu.library import c, output, stream, summands
from gcbench.ops.natural import BAD_CODE, NATURAL_BITS, natural_size
from gcbench.ops.reference import packed_words


def natural_encode(x: Tensor, key: Key, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.natural_encode`."""
    n, x = x.numel(), x.contiguous()
    words = packed_words(n, NATURAL_BITS)
    out = output(out, torch.int32, words)
    c.gc_natural_encode(
        c.gc_tensor_address(x, torch.float32, n),
        n,
        *stream(key),
        c.gc_tensor_address(out, torch.int32, words),
        torch.get_num_threads(),
    )
    return out


def natural_decode(words: Tensor, n: int, name: str, *, out: Tensor | None = None) -> Tensor:
    """Serve `ops.natural_decode`."""
    return natural_mean([(words, 1)], n, name, out=out)


def natural_mean(
    payloads: Sequence[tuple[Tensor, int]], n: int, name: str, *, out: Tensor | None = None
) -> Tensor:
    """Serve `ops.natural_mean`."""
    arguments, _kept = summands(
        payloads, ((torch.int32, packed_words(n, NATURAL_BITS)),), lambda: natural_size(payloads, n)
    )
    out = output(out, torch.float32, n)
    bad = c.gc_natural_mean(
        *arguments,
        n,
        c.gc_tensor_address(out, torch.float32, n),
        torch.get_num_threads(),
    )
    if bad:
        raise PayloadError(f"{name}: {BAD_CODE}")
    return out


KERNELS = {
    "natural_decode": natural_decode,
    "natural_encode": natural_encode,
    "natural_mean": natural_mean,
}
