"""Which worker of which job this process is.

A job is started by gcbench (`gcbench.training.launch`) or by torchrun. torchrun puts RANK,
WORLD_SIZE and others into the environment. They are read only if TORCHELASTIC_RUN_ID is set, too:
RANK alone may be left over from another program, and a process that wrongly took itself for worker
1 would write to a run without its lock.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gcbench.core.errors import UsageError


@dataclass(frozen=True)
class Membership:
    """A worker's place in its job."""

    rank: int
    size: int
    local_rank: int
    """The worker's number among those on this machine."""
    local_size: int
    folder: Path | None = None
    """The private folder with the file store of local workers; None under torchrun, which has a
    store of its own."""


def by_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def from_torchrun() -> Membership | None:
    """Return this process's place in torchrun's job; None if torchrun did not start it.

    Raises:
        UsageError: some of torchrun's variables are missing, or are no ranks and sizes of a job.
    """
    if not by_torchrun():
        return None
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    local_rank, local_size = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")
    _text("MASTER_ADDR"), _number("MASTER_PORT")
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise UsageError(
            f"RANK={rank} of WORLD_SIZE={size}, LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE="
            f"{local_size} in the environment: no worker of a job has these. {_REMEDY}"
        )
    return Membership(rank, size, local_rank, local_size)


def leads() -> bool:
    """Return whether this process writes and prints: it is worker 0, or not under torchrun.

    Raises:
        UsageError: see `from_torchrun`.
    """
    member = from_torchrun()
    return member is None or member.rank == 0


_REMEDY = "Start the command by torchrun, or unset TORCHELASTIC_RUN_ID"


def _text(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise UsageError(
            f"TORCHELASTIC_RUN_ID is in the environment, as under torchrun, but not {name}. "
            f"{_REMEDY}"
        )
    return value


def _number(name: str) -> int:
    text = _text(name)
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{name}={text!r} in the environment: a number expected. {_REMEDY}")
    return int(text)
