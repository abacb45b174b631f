"""Ranks agree before each exchange: on errors, and on what must be the same on all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gcbench.core.errors import DivergedError, GcbenchError, UsageError
from gcbench.core.exchange import Exchange

BYTES = 16
"""What a rank sends in one agreement: two integers."""
COLUMNS = 1021
"""Words per row of the matrix that `digest` sums: odd, in fact prime."""


@dataclass(frozen=True)
class Common:
    """JSON values that must be the same on all ranks at an exchange, by a readable name."""

    values: Mapping[str, Any]

    @cached_property
    def digest(self) -> int:
        """A 63-bit digest of the values."""
        hashed = hashlib.sha256(json.dumps(self.values).encode()).digest()
        return int.from_bytes(hashed[:8], "big") >> 1


def digest(x: Tensor) -> int:
    """Return a 63-bit digest of a 1-D tensor's bits and of their order.

    It hashes the sums of the rows and of the columns of a matrix of 64-bit words. One sum would be
    blind to permutations, and each is blind to an even number of changed signs; with an odd number
    of columns, regular patterns of signs change some row by an odd number.
    """
    per_word = 8 // x.element_size()
    if x.storage_offset() % per_word:
        x = x.clone()
    even = x.numel() // per_word * per_word
    tail = torch.nn.functional.pad(x[even:], (0, per_word - (x.numel() - even)))
    words = x[:even].view(torch.int64)
    matrix = words[: len(words) // COLUMNS * COLUMNS].view(-1, COLUMNS)
    rest = words[matrix.numel() :]
    sums = torch.cat([matrix.sum(1), matrix.sum(0), rest, tail.view(torch.int64)])
    hashed = hashlib.sha256(sums.cpu().numpy().data).digest()
    return int.from_bytes(hashed[:8], "big") >> 1


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the bits of tensors of any dtype."""
    parts = [digest(x.detach().reshape(-1).contiguous().view(torch.uint8)) for x in tensors]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def agree(exchange: Exchange, mine: GcbenchError | None, common: Common) -> GcbenchError | None:
    """Return the first rank's error, or a UsageError if the ranks differ; None if all agree.

    All ranks of the exchange's world call it at the same place and get the same error. Each rank
    sends `BYTES`; only after an error do they also exchange texts.
    """
    rows = exchange.agree([mine is not None, common.digest])
    if rows == [[0, common.digest]] * len(rows):
        return None
    report = {
        "usage": isinstance(mine, UsageError),
        "diverged at": mine.step if isinstance(mine, DivergedError) else None,
        "text": None if mine is None else str(mine),
        "values": dict(common.values),
        "rank": dist.get_rank(),
    }
    reports: list[dict[str, Any]] = exchange.world.collect([report])
    for each in reports:
        if each["text"] is not None:
            if each["diverged at"] is not None:
                return DivergedError(each["text"], each["diverged at"])
            return (UsageError if each["usage"] else GcbenchError)(each["text"])
    different = differences({each["rank"]: each["values"] for each in reports})
    remedy = "Set the same rates, make as many steps, and load states of one step, on every rank"
    if "position" in different:
        remedy = (
            "Run the same passes and optimizer steps on every rank, also after an error. On one "
            "rank alone evaluate model.module, not the DDP model"
        )
    elif "mean" in different:
        remedy = "Load states of the same job on every rank; or check the method: gcbench verify"
    texts = list(different.values())
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return UsageError(f"the ranks differ at an exchange. {'; '.join(texts[:3])}{more}. {remedy}")


def differences(values: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of values that differ between ranks, with a text that lists them.

    `values`: per rank, values by name.
    """
    first = next(iter(values.values()))
    names = dict.fromkeys(name for each in values.values() for name in each)
    return {
        name: f"{name}: "
        + ", ".join(f"rank {rank} {each.get(name)!r}" for rank, each in values.items())
        for name in names
        if any(each.get(name) != first.get(name) for each in values.values())
    }
