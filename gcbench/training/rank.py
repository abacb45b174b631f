"""The rank of this process in its job.

A job is started by gcbench (`gcbench.training.launch`) or by torchrun, which sets RANK, WORLD_SIZE
and other environment variables. They are read only if TORCHELASTIC_RUN_ID is also set, because
another program may have left RANK behind.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gcbench.core.errors import UsageError


@dataclass(frozen=True)
class Rank:
    """A worker's rank, and the size of its job."""

    rank: int
    size: int
    local_rank: int
    """The worker's rank on this machine."""
    local_size: int
    folder: Path | None = None
    """The private folder with the file store of local workers; None under torchrun, which provides
    a store."""


def by_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def from_torchrun() -> Rank | None:
    """Return this process's rank in torchrun's job; None if torchrun did not start it.

    Raises:
        UsageError: some of torchrun's variables are missing or invalid.
    """
    if not by_torchrun():
        return None
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    local_rank, local_size = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")
    _text("MASTER_ADDR"), _number("MASTER_PORT")
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise UsageError(
            f"RANK={rank} of WORLD_SIZE={size}, LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE="
            f"{local_size} in the environment: ranks must be below sizes. {_REMEDY}"
        )
    return Rank(rank, size, local_rank, local_size)


def leads() -> bool:
    """Return whether this process writes and prints: as worker 0, or without torchrun.

    Raises:
        UsageError: see `from_torchrun`.
    """
    member = from_torchrun()
    return member is None or member.rank == 0


_REMEDY = "Start the command with torchrun, or unset TORCHELASTIC_RUN_ID"


def _text(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise UsageError(
            f"TORCHELASTIC_RUN_ID is set in the environment, but {name} is not. {_REMEDY}"
        )
    return value


def _number(name: str) -> int:
    text = _text(name)
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{name}={text!r} in the environment: expected a number. {_REMEDY}")
    return int(text)
