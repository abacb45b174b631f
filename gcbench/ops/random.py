"""Counter-based random numbers: a draw is a function of its key and the element's index.

Layout of the draws. Element e of a bucket belongs to lane l = e % 32, row j = (e % 1024) // 32 of
tile e // 1024. Each lane of a tile has two Philox blocks of 16 bytes, each for 16 rows: row j uses
the 24 bits that start at byte j % 16 (cyclic) of block j // 16. Every draw is exactly uniform on 24
bits. Adjacent rows of a lane share two bytes, so their draws have a correlation of at most 0.004.

Correlated draws (Suresh et al., ICML 2022, arXiv:2203.04925) of N workers, `Key.workers`, lie in
different strata of [0, 2^24): with g the independent draw and s in 0 ... N - 1 shared by all,

    u = ((s + rank) mod N) W + floor(g W / 2^24),   W = floor(2^24 / N).

Each u is uniform, up to the last 2^24 mod N values, and of N workers with equal probabilities p
either floor(N p) or one more have u < 2^24 p. Codecs round magnitudes, and take 2^24 - 1 - u for
negative elements (`draws_for`). s = floor(N y / 2^24), where y of row r in a lane of a tile is
a + r b mod 2^24. The words a and b are numbers t % 8 and (t + 1) % 8 of those that the lane has in
tile t // 8 of the stream `SHARED`, so any two elements of a worker are independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core import purposes
from gcbench.core.compressor import TILE, Key
from gcbench.ops.dispatch import operation, output, vector
from gcbench.ops.packing import LANES

WORD = 0xFFFFFFFF
BITS = 24
MASK = (1 << BITS) - 1
SHARING = 8
"""Tiles that share the words of one tile of the stream `SHARED`."""
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
def _draws24(key: Key, x: Tensor | None, n: int, out: Tensor) -> None:
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
    if key.workers > 1:
        draws = _correlated(draws.view(tiles, 32, LANES), key, first)
    skip = key.offset - first * TILE
    out.copy_(draws.reshape(-1)[skip : skip + n])
    if x is not None and key.workers > 1:
        out.bitwise_xor_(torch.signbit(x).int().mul_(MASK))


def _correlated(draws: Tensor, key: Key, first: int) -> Tensor:
    """Return correlated draws, (tiles, 32 rows, 32 lanes), given the independent ones."""
    tiles, device = len(draws), draws.device
    start, stop = first // SHARING, (first + tiles - 1) // SHARING + 1
    lanes = torch.arange(start * LANES, stop * LANES, device=device).view(-1, 1, LANES)
    half = torch.arange(2, device=device).view(1, 2, 1)
    shape = (stop - start, 2, LANES)
    shared = Key(key.seed, key.step, key.stream, stream=purposes.SHARED)
    seed, step, who = shared.words()
    counter = ((lanes & WORD).expand(shape), ((lanes >> 32 << 8) | half).expand(shape))
    rest = (torch.full(shape, step, device=device), torch.full(shape, who, device=device))
    words = torch.stack(philox((*counter, *rest), seed), 2).view(-1, SHARING, LANES)
    begin, increment = words.view(-1, LANES), words.roll(-1, 1).view(-1, LANES)
    skip = first - start * SHARING
    begin, increment = begin[skip : skip + tiles], increment[skip : skip + tiles]
    rows = torch.arange(32, device=device).view(32, 1)
    place = (begin.unsqueeze(1) + rows * increment.unsqueeze(1)) & MASK
    stratum = ((place * key.workers >> BITS) + key.rank) % key.workers
    width = (1 << BITS) // key.workers
    return (stratum * width + (draws.long() * width >> BITS)).int()


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
        _draws24(key, x=None, n=n, out=out)
    return out


def draws_for(x: Tensor, key: Key) -> Tensor:
    """Return the draws by which codecs round the magnitudes of x, float32, shape (n,): int32, (n,).

    They are those of `draws24`; correlated ones are mirrored where x is negative, so that errors
    cancel whatever the signs are.
    """
    key.words()
    out = output(None, torch.int32, x.numel(), x.device)
    if x.numel():
        x = vector(x, torch.float32, x.numel())
        _draws24(key, x, x.numel(), out)
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
