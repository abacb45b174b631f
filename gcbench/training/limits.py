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


def _check(asked: str, count: int, limit: int, what: str) -> None:
    if count > limit and os.environ.get(INSIST) != "1":
        raise UsageError(
            f"{asked}: at most {limit} {what}; set {INSIST}=1 in the environment to lift the limit"
        )


def check_threads(threads: int) -> None:
    """Raise UsageError for more threads than libraries support."""
    if threads > THREADS:
        raise UsageError(f"--threads {threads}: at most {THREADS} threads")


def check_workers(workers: int, *, processes: bool, cores: int) -> None:
    """Raise UsageError for more workers than this machine should run.

    `processes`: whether each worker is a process on this machine; otherwise they are simulated.
    """
    limit, what = SIMULATED, "simulated workers"
    if processes:
        limit, what = PROCESSES_A_CORE * cores, f"processes on {cores} core(s)"
    _check(f"--workers {workers}", workers, limit, what)


def check_grid(count: int) -> None:
    """Raise UsageError for a grid of more than CONFIGURATIONS runs."""
    _check(f"a grid of {count} configurations", count, CONFIGURATIONS, "of them")
