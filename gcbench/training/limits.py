"""Limits of what one command may take, checked before anything starts.

They are far above what anybody needs and below what stops a machine. `GCBENCH_NO_LIMITS=1` in the
environment lifts them, except that of threads, above which libraries crash.
"""

from __future__ import annotations

import os

from gcbench.core.errors import UsageError

INSIST = "GCBENCH_NO_LIMITS"
THREADS = 1024
"""Threads inside an operation of a worker."""
SIMULATED = 4096
"""Workers in one process: each has a gradient and its memory."""
PROCESSES_A_CORE = 8
"""Local processes for each core; each takes a quarter of a gigabyte."""
CONFIGURATIONS = 2000
"""Runs of a grid."""


def _refuse(asked: str, limit: str, *, insist: bool = True) -> UsageError:
    how = f"; set {INSIST}=1 in the environment to do it all the same" if insist else ""
    return UsageError(f"{asked}: at most {limit}{how}")


def insisted() -> bool:
    """Return whether the user lifted the limits."""
    return os.environ.get(INSIST) == "1"


def check_threads(threads: int) -> None:
    """Raise UsageError for more threads than libraries bear."""
    if threads > THREADS:
        raise _refuse(f"--threads {threads}", f"{THREADS} threads", insist=False)


def check_workers(workers: int, *, processes: bool, cores: int) -> None:
    """Raise UsageError for more workers than this machine should hold.

    `processes`: each is a process that is started here.
    """
    limit = PROCESSES_A_CORE * cores if processes else SIMULATED
    if workers > limit and not insisted():
        what = (
            f"{limit} processes on {cores} core(s)" if processes else f"{limit} simulated workers"
        )
        raise _refuse(f"--workers {workers}", what)


def check_grid(count: int) -> None:
    """Raise UsageError for a grid of more runs than a command should begin."""
    if count > CONFIGURATIONS and not insisted():
        raise _refuse(f"a grid of {count} configurations", f"{CONFIGURATIONS} of them")
