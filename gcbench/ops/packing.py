"""Integer codes of 1 to 16 bits, packed into 32-bit words.

Packing layout. A tile is 1024 consecutive codes; code i of a tile belongs to lane i % 32, row
i // 32. The 32 rows of a lane are packed into `bits` 32-bit words, row j from bit j * bits on, and
word k of lane l is word k * 32 + l of the tile. The last tile may be shorter: with r codes it has
L = ceil(r / 32) lanes, code i belongs to lane i % L, row i // L, and unused codes are zero. So n
codes take bits * (32 * (n // 1024) + ceil((n % 1024) / 32)) words. Both a warp and a vector unit
access such a tile with consecutive addresses.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from gcbench.core.compressor import TILE
from gcbench.core.errors import PayloadError
from gcbench.ops.dispatch import operation, output

LANES = 32
MAX_BITS = 16
BLOCK = 1024 * TILE
"""Elements that a definition processes at a time, to bound the memory of intermediate results. Much
smaller blocks cost more in call overhead than they gain from caches."""


def packed_words(n: int, bits: int) -> int:
    """Return the number of 32-bit words for `n` codes of `bits` bits."""
    tiles, rest = divmod(n, TILE)
    return bits * (LANES * tiles + -(-rest // LANES))


def check_bits(bits: int) -> None:
    """Raise ValueError unless `pack` accepts this number of bits."""
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"{bits} bits per code: expected 1 to {MAX_BITS}")


def split_words(words: Tensor, bits: int, bounds: Sequence[int]) -> list[Tensor]:
    """Split packed codes at element indices `bounds`, multiples of 1024 or the end."""
    edges = [packed_words(bound, bits) for bound in bounds]
    return [words[start:stop] for start, stop in itertools.pairwise(edges)]


def _places(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the word, shape (32,), and the first bit, (32, 1), of each row's codes."""
    first = torch.arange(32, dtype=torch.int32, device=device) * bits
    return first // 32, (first % 32).unsqueeze(1)


def _next_places(word: Tensor, shift: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return where codes that cross a word boundary continue, for widths that do not divide 32.

    The next word; the shift there, 31 if they do not continue; and whether they continue, as a mask
    of all bits or none.
    """
    beyond = (shift + bits > 32).int().neg_()
    return (word + 1).clamp_(max=bits - 1), (32 - shift).clamp_(max=31), beyond


def _pack_rows(rows: Tensor, bits: int) -> Tensor:
    """Pack (tiles, 32 rows, lanes) codes into (tiles, bits, lanes) int32 words."""
    tiles, _, lanes = rows.shape
    words = torch.zeros((tiles, bits, lanes), dtype=torch.int32, device=rows.device)
    word, shift = _places(bits, rows.device)
    codes = rows.int()
    # Codes do not overlap, so addition equals `or`.
    words.index_add_(1, word, codes << shift)
    if 32 % bits:
        following, back, beyond = _next_places(word, shift, bits)
        words.index_add_(1, following, (codes >> back) & beyond)
    return words


@operation()
def _pack(codes: Tensor, size: int, n: int, bits: int, out: Tensor) -> None:
    full = n - n % TILE
    split = packed_words(full, bits)
    out[:split].view(-1, bits, LANES).copy_(_pack_rows(codes[:full].view(-1, 32, LANES), bits))
    if full < n:
        lanes = -(-(n - full) // LANES)
        tail = codes.new_zeros(32 * lanes)
        tail[: n - full] = codes[full:]
        out[split:] = _pack_rows(tail.view(1, 32, lanes), bits).view(-1)


def pack(codes: Tensor, bits: int, *, out: Tensor | None = None) -> Tensor:
    """Pack integer codes, shape (n,), each in [0, 2^bits), into int32 words, 1 to 16 bits each.

    The module docstring defines the layout; the result has `packed_words(n, bits)` words. `out`:
    the output tensor.

    Raises:
        ValueError: bits outside 1 to 16, or codes that are not integers.
    """
    check_bits(bits)
    if codes.is_floating_point() or codes.is_complex():
        raise ValueError(f"codes have dtype {codes.dtype}: expected integers")
    n, codes = codes.numel(), codes.contiguous().view(-1)
    out = output(out, torch.int32, packed_words(n, bits), codes.device)
    _pack(codes, codes.element_size(), n, bits, out)
    return out


def _unpack_rows(words: Tensor, bits: int) -> Tensor:
    """Unpack (..., bits, lanes) int32 words into (..., 32 rows, lanes) int32 codes."""
    word, shift = _places(bits, words.device)
    codes = words.index_select(-2, word) >> shift
    # A right shift extends the sign; the masks remove it.
    if 32 % bits:
        following, ahead, beyond = _next_places(word, shift, bits)
        codes &= ~beyond | ((1 << ahead) - 1)
        codes |= (words.index_select(-2, following) << ahead) & beyond
    return codes.bitwise_and_((1 << bits) - 1)


@operation()
def _unpack(words: Tensor, rows: int, n: int, bits: int, out: Tensor) -> None:
    full = n - n % TILE
    split = packed_words(full, bits)
    tiles = _unpack_rows(words[:, :split].reshape(rows, full // TILE, bits, LANES), bits)
    out[:, :full] = tiles.view(rows, full)
    if full < n:
        tail = words[:, split:]
        rest = _unpack_rows(tail.reshape(rows, bits, tail.shape[-1] // bits), bits)
        out[:, full:] = rest.view(rows, -1)[:, : n - full]


def unpack(words: Tensor, bits: int, n: int, *, out: Tensor | None = None) -> Tensor:
    """Return the codes of `bits` bits in `words`, int32, shape (..., n).

    `words`: int32, shape (..., packed_words(n, bits)). `out`: the output tensor.

    Raises:
        PayloadError: `words` has another dtype or last axis.
        ValueError: bits outside 1 to 16.
    """
    check_bits(bits)
    size = packed_words(n, bits)
    if words.dtype is not torch.int32 or words.shape[-1] != size:
        raise PayloadError(
            f"{words.shape[-1]} words of {words.dtype} for {n} codes of {bits} bits: "
            f"expected {size} of torch.int32"
        )
    lead = words.shape[:-1]
    rows = lead.numel()
    out = output(out, torch.int32, rows * n, words.device)
    if rows * n:
        words, table = words.contiguous().view(rows, size), out.view(rows, n)
        _unpack(words, rows, n, bits, table)
    return out.view(*lead, n)
