"""What a local worker process runs first, as a script: `python -P launched.py FOLDER RANK PARENT`.

It imports nothing of torch or gcbench before the process is tied to its parent: imports take
seconds, and a launcher that is killed meanwhile must leave no worker behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal to get when the parent dies."""


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process by SIGKILL when its parent, the process `parent`, ends.

    By SIGKILL: at any other signal a worker would go on, or write a checkpoint unwatched. A parent
    that ended before this call sends no signal any more; then the process ends here. Only Linux has
    this service, elsewhere only the second half holds.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Be the worker that the launcher describes in the folder's job.json."""
    folder, rank, parent = sys.argv[1:]
    die_with_parent(int(parent))
    with open(os.path.join(folder, "job.json")) as file:
        job = json.load(file)
    sys.path[:] = job["path"]
    from gcbench.training import launch

    launch.work(folder, int(rank), job)


if __name__ == "__main__":
    main()
