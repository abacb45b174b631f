"""Counter-based random numbers: a draw is a function of its key and the element's index.

Layout of the draws. Element e of a bucket belongs to lane l = e % 32, row j = (e % 1024) // 32 of
tile e // 1024. Each lane of a tile has two Philox blocks of 16 bytes, each for 16 rows: row j uses
the 24 bits that start at byte j % 16 (cyclic) of block j // 16. Every draw is exactly uniform on 24
bits. Adjacent rows of a lane share two bytes, so their draws have a correlation of at most 0.004.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import TILE, Key
from gcbench.ops.dispatch import operation, output
from gcbench.ops.packing import LANES

WORD = 0xFFFFFFFF
# Philox4x32: multipliers and Weyl increments (Salmon et al. 2011, table 2 and Random123's header).
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def philox(counter: Sequence[Tensor], key: tuple[int, int], rounds: int = 10) -> list[Tensor]:
    """Return Philox4x32 blocks (Salmon et al., SC 2011).

    `counter`: four int64 tensors of one shape holding 32-bit words; `key`: two 32-bit words.
    Returns four int64 tensors of that shape holding 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # int64 products wrap modulo 2^64, so the mask recovers the unsigned high word.
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = (p1 >> 32).bitwise_and_(WORD).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (p0 >> 32).bitwise_and_(WORD).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = p1.bitwise_and_(WORD), p0.bitwise_and_(WORD)
        k0, k1 = (k0 + _W0) & WORD, (k1 + _W1) & WORD
    return [c0, c1, c2, c3]


@operation()
def _draws24(key: Key, n: int, out: Tensor) -> None:
    device = out.device
    seed, key_step, who = key.words()
    first, last = key.offset // TILE, (key.offset + n - 1) // TILE
    tiles = last - first + 1
    # Blocks in the order tile, half, lane, which is the order of the elements that use them.
    lane = torch.arange(first * LANES, (last + 1) * LANES, device=device).view(tiles, 1, LANES)
    half = torch.arange(2, device=device).view(1, 2, 1)
    shape = (tiles, 2, LANES)
    low = (lane & WORD).expand(shape)
    high = ((lane >> 32 << 8) | half).expand(shape)
    steps = torch.full(shape, key_step, device=device)
    words = philox((low, high, steps, torch.full(shape, who, device=device)), seed)
    draws = torch.empty((tiles, 2, 16, LANES), dtype=torch.int32, device=device)
    for row in range(16):
        word, after = words[row >> 2], words[((row >> 2) + 1) & 3]
        shift = 8 * (row & 3)
        if shift <= 8:
            window = (word >> (8 - shift)) & 0xFFFFFF
        else:
            window = ((word << (shift - 8)) & 0xFFFFFF) | (after >> (40 - shift))
        draws[:, :, row] = window
    skip = key.offset - first * TILE
    out.copy_(draws.view(-1)[skip : skip + n])


def draws24(
    key: Key, n: int, device: torch.device | str = "cpu", *, out: Tensor | None = None
) -> Tensor:
    """Return integers uniform on [0, 2^24), int32, shape (n,), for elements key.offset + [0, n).

    `out`: the output tensor, instead of a new one on `device`.

    Raises:
        ValueError: step, rank or stream of the key out of range.
    """
    key.words()
    # A tensor's device has an index: "cuda" becomes "cuda:0".
    where = torch.empty(0, device=device).device if out is None else out.device
    out = output(out, torch.int32, n, where)
    if n:
        _draws24(where, key=key, n=n, out=out)
    return out


def uniform(key: Key, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return draws uniform on [0, 1), multiples of 2^-24, float32, shape (n,)."""
    return draws24(key, n, device).float().mul_(2.0**-24)


def normal(key: Key, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return standard normal draws, float32, shape (n,), by the Box-Muller transform in float64.

    Draw i uses the uniform draws of elements key.offset + 2i and key.offset + 2i + 1.
    """
    pair = draws24(key, 2 * n, device).double().add_(0.5).mul_(2.0**-24).view(n, 2)
    return ((-2 * pair[:, 0].log()).sqrt() * (2 * math.pi * pair[:, 1]).cos()).float()
