"""Limits on threads, workers and grid size of a command, checked before anything starts.

They are far above practical values, and low enough that a typo does not overload the machine.
`GCBENCH_NO_LIMITS=1` in the environment lifts them, except the limit on threads, above which
libraries crash.
"""

from __future__ import annotations

import os

from gcbench.core.errors import UsageError

INSIST = "GCBENCH_NO_LIMITS"
THREADS = 1024
"""Maximum threads per worker."""
SIMULATED = 4096
"""Maximum workers in one process, each with a gradient and the buffers of its memory."""
PROCESSES_A_CORE = 8
"""Maximum local processes per core; each uses a quarter of a gigabyte of memory."""
CONFIGURATIONS = 2000
"""Maximum runs of a grid."""


def _refuse(asked: str, limit: str, *, insist: bool = True) -> UsageError:
    how = f"; set {INSIST}=1 in the environment to lift the limit" if insist else ""
    return UsageError(f"{asked}: at most {limit}{how}")


def insisted() -> bool:
    """Return whether the user lifted the limits."""
    return os.environ.get(INSIST) == "1"


def check_threads(threads: int) -> None:
    """Raise UsageError for more threads than libraries support."""
    if threads > THREADS:
        raise _refuse(f"--threads {threads}", f"{THREADS} threads", insist=False)


def check_workers(workers: int, *, processes: bool, cores: int) -> None:
    """Raise UsageError for more workers than this machine should run.

    `processes`: whether each worker is a process on this machine; otherwise they are simulated.
    """
    limit = PROCESSES_A_CORE * cores if processes else SIMULATED
    if workers > limit and not insisted():
        what = (
            f"{limit} processes on {cores} core(s)" if processes else f"{limit} simulated workers"
        )
        raise _refuse(f"--workers {workers}", what)


def check_grid(count: int) -> None:
    """Raise UsageError for a grid of more than CONFIGURATIONS runs."""
    if count > CONFIGURATIONS and not insisted():
        raise _refuse(f"a grid of {count} configurations", f"{CONFIGURATIONS} of them")
