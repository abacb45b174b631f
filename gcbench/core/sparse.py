"""What each worker computes in a sparse all-reduce; `gcbench.core.exchange` sends the messages.

Entries are positions and values of elements. Every owner adds the entries of one region; of all
sums, the k of largest magnitude remain, of equal ones those at the lowest positions. k is found by
counting magnitudes, eight bits at a time: float32 numbers are ordered like the integers of their
31 bits without the sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gcbench.core.errors import PayloadError

WORDS = 2
"""Words of 32 bits per entry: position and value."""
DIGIT = 8
"""Bits of a magnitude that one histogram resolves."""
SHIFTS = (24, 16, 8, 0)


class Entries(NamedTuple):
    """Elements of a flat tensor."""

    positions: Tensor
    """int64, shape (k,), increasing."""
    values: Tensor
    """float32, shape (k,)."""

    def pack(self) -> Tensor:
        """Return one message, int32, shape (2 k,): position and bits of the value, in turn."""
        bits = self.values.view(torch.int32)
        return torch.stack((self.positions.int(), bits), dim=1).view(-1)

    @classmethod
    def unpack(cls, message: Tensor) -> Entries:
        """Return the entries of messages of `pack`, int32, concatenated."""
        positions, bits = message.view(-1, WORDS).unbind(1)
        return cls(positions.long(), bits.contiguous().view(torch.float32))

    def counts(self, cuts: Sequence[int]) -> Tensor:
        """Return the number of entries in each region between these cuts, int64, (regions,)."""
        where = torch.tensor(cuts, dtype=torch.int64, device=self.positions.device)
        ends = torch.searchsorted(self.positions, where)
        first, last = ends.new_zeros(1), ends.new_full((1,), self.positions.numel())
        return torch.diff(ends, prepend=first, append=last)

    def compared(self, limit: int) -> Tensor:
        """Return how many entries are of magnitude above `limit`, and equal to it, int64, (2,)."""
        size = magnitudes(self.values)
        return torch.stack(((size > limit).sum(), (size == limit).sum()))

    def largest(self, limit: int, ties: int) -> Entries:
        """Return the entries of magnitude above `limit`, and the first `ties` equal to it."""
        size = magnitudes(self.values)
        tied = size == limit
        chosen = ((size > limit) | (tied & (tied.cumsum(0) <= ties))).nonzero().squeeze(1)
        return Entries(self.positions[chosen], self.values[chosen])


def magnitudes(values: Tensor) -> Tensor:
    """Return integers ordered like |values|, int32, of their shape; NaN is above infinity."""
    return values.view(torch.int32) & 0x7FFFFFFF


def quantiles(positions: Tensor, regions: int) -> Tensor:
    """Return where to cut so that regions have equally many positions, int64, (regions - 1,)."""
    k = positions.numel()
    where = [k * region // regions for region in range(1, regions)]
    return positions[torch.tensor(where, dtype=torch.int64, device=positions.device)]


def add(messages: Sequence[Tensor], start: int, sums: Tensor, seen: Tensor) -> Entries:
    """Return the sums of the workers' entries, added in order.

    `messages`: of `Entries.pack`, of one region. `start`: its first position. `sums`, float32, and
    `seen`, bool: buffers of the region's length.

    Raises:
        PayloadError: a position is not in the region.
    """
    sums.zero_()
    seen.zero_()
    for message in messages:
        positions, values = Entries.unpack(message)
        places = positions - start
        if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < sums.numel():
            raise PayloadError(f"a position is not in [{start}, {start + sums.numel()})")
        sums.index_add_(0, places, values)
        seen[places] = True
    places = seen.nonzero().squeeze(1)
    return Entries(places + start, sums[places])


def histogram(values: Tensor, prefix: int, shift: int) -> Tensor:
    """Count the magnitudes by 8 bits from bit `shift`, if their higher bits are `prefix`.

    int32, shape (256,).
    """
    digits = magnitudes(values) >> shift
    digits = digits[digits >> DIGIT == prefix] & (2**DIGIT - 1)
    return torch.bincount(digits, minlength=2**DIGIT).int()


def descend(counts: Sequence[int], prefix: int, needed: int) -> tuple[int, int]:
    """Return the bits of the smallest magnitude needed, and how many of these bits are needed.

    `counts`: the histogram below `prefix`, over all owners. `needed`: how many of its numbers are
    among the largest k.
    """
    for digit in reversed(range(len(counts))):
        if counts[digit] >= needed:
            return prefix << DIGIT | digit, needed
        needed -= counts[digit]
    raise ValueError(f"{needed} entries are missing")


def quotas(tied: Sequence[int], needed: int) -> list[int]:
    """Return how many of its tied entries each owner keeps, the lowest positions first."""
    before = [0, *accumulate(tied)]
    return [max(0, min(ties, needed - b)) for ties, b in zip(tied, before, strict=False)]


def moves(held: Sequence[int]) -> list[list[int]]:
    """Return how many entries each owner (row) sends to each worker, so that all have equally many.

    `held`: the number of entries of each owner. Entries stay in the order of the owners.
    """
    first, total = [0, *accumulate(held)], sum(held)
    shares = [total * rank // len(held) for rank in range(len(held) + 1)]
    return [
        [max(0, min(b, high) - max(a, low)) for low, high in pairwise(shares)]
        for a, b in pairwise(first)
    ]
