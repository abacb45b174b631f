"""Limits on threads, workers and grids of one command, checked before anything starts.

They are far above what anybody needs, and low enough that a mistyped number does not bring the
machine to a halt. `GCBENCH_NO_LIMITS=1` in the environment lifts them, except the limit on threads,
above which libraries crash.
"""

from __future__ import annotations

import os

from gcbench.core.errors import UsageError

INSIST = "GCBENCH_NO_LIMITS"
THREADS = 1024
"""The most threads of a worker."""
SIMULATED = 4096
"""The most workers in one process: each has a gradient, and the buffers of its memory."""
PROCESSES_A_CORE = 8
"""The most local processes for each core; each takes a quarter of a gigabyte of memory."""
CONFIGURATIONS = 2000
"""The most runs in a grid."""


def _refuse(asked: str, limit: str, *, insist: bool = True) -> UsageError:
    how = f"; set {INSIST}=1 in the environment to do it all the same" if insist else ""
    return UsageError(f"{asked}: at most {limit}{how}")


def insisted() -> bool:
    """Return whether the user lifted the limits."""
    return os.environ.get(INSIST) == "1"


def check_threads(threads: int) -> None:
    """Raise UsageError for more threads than libraries can start without crashing."""
    if threads > THREADS:
        raise _refuse(f"--threads {threads}", f"{THREADS} threads", insist=False)


def check_workers(workers: int, *, processes: bool, cores: int) -> None:
    """Raise UsageError for more workers than this machine should hold.

    `processes`: whether each worker is a process on this machine, and not simulated in one.
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
