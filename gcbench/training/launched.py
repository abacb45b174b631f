"""The script of a local worker process: `python -P launched.py FOLDER RANK PARENT`.

It imports torch and gcbench only after `die_with_parent`: imports take seconds, and a launcher that
is killed meanwhile must leave no worker behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal that this process gets when its parent dies."""


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process by SIGKILL when its parent, the process `parent`, ends.

    By SIGKILL, because at other signals a worker would continue, or write a checkpoint without its
    launcher. If the parent has ended before this call, no signal will come, and the process ends at
    once. Only Linux can send the signal; elsewhere only this last check is made.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Run the worker that the launcher has described in the folder's job.json."""
    folder, rank, parent = sys.argv[1:]
    die_with_parent(int(parent))
    with open(os.path.join(folder, "job.json")) as file:
        job = json.load(file)
    sys.path[:] = job["path"]
    from gcbench.training import launch

    launch.work(folder, int(rank), job)


if __name__ == "__main__":
    main()
