"""The fork server of local worker processes: `python -P fork_server.py FOLDER PARENT CHANNEL`.

It imports torch, gcbench and the module of the job once, and forks the workers, so that they start
in the time of one import and share the memory of the imported modules. It reports to the launcher,
over the socket CHANNEL, how each worker ended, and sends the workers the signals that the launcher
requests. (The launcher cannot fork them itself: it has threads, and may have used a GPU.)

It calls `die_with_parent` before imports, which take seconds, so that no process remains if the
launcher is killed meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import warnings
from contextlib import suppress
from typing import Any

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal that this process gets when its parent dies."""
PR_SET_NAME = 15
"""Option of Linux's prctl: the name of this process in `ps -o comm` and top."""
STARTED = "started"
"""The message to the launcher when the workers run."""


def die_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGKILL when its parent, the process `parent`, ends.

    At other signals a worker would continue, or write a checkpoint without its launcher. If the
    parent ended before this call, the process ends at once. Other systems than Linux cannot send
    the signal, and only make this last check.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def name_of_worker(rank: int) -> str:
    """Return a worker's name in `ps -o comm` and top."""
    return f"gcbench-{rank}"


class _Workers:
    """The workers of a job, as the fork server manages them."""

    def __init__(self, folder: str, job: dict[str, Any], channel: socket.socket) -> None:
        self.folder, self.job, self.channel = folder, job, channel
        self.pids: dict[int, int] = {}
        """Process IDs of the running workers by rank."""
        self.wake, self.woken = os.pipe()

    def fork(self) -> None:
        """Start all workers, and wake up whenever one ends.

        SIGTERM is ignored: it often goes to a whole process group, and the launcher handles it.
        """
        os.set_blocking(self.woken, False)
        signal.set_wakeup_fd(self.woken)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
        parent = os.getpid()
        for rank in range(self.job["workers"]):
            with warnings.catch_warnings(action="ignore"):  # BLAS threads allow a fork
                pid = os.fork()
            if pid == 0:
                self._work(rank, parent)
            self.pids[rank] = pid
        self._tell(STARTED)

    def _work(self, rank: int, parent: int) -> None:
        """Run a worker in a forked process; this does not return."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(parent)
        for end in (self.wake, self.woken):
            os.close(end)
        self.channel.close()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_NAME, name_of_worker(rank).encode())
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        from gcbench.training import launch

        launch.work(self.folder, rank, self.job)

    def serve(self) -> None:
        """Report ended workers and forward signals until the launcher closes the channel."""
        asked, watched = b"", [self.wake, self.channel.fileno()]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if self.wake in ready:
                os.read(self.wake, 4096)
                self._reap()
            if watched[1] in ready:
                if not (data := self.channel.recv(4096)):  # also if the launcher is gone
                    for rank in self.pids:
                        self._signal(rank, signal.SIGKILL)
                    return
                *lines, asked = (asked + data).split(b"\n")
                for line in lines:
                    rank, number = map(int, line.split())
                    self._signal(rank, number)

    def _reap(self) -> None:
        for rank, pid in [*self.pids.items()]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.pids[rank]
                self._tell(f"{rank} {os.waitstatus_to_exitcode(status)}")
        if not self.pids:
            with suppress(OSError):
                self.channel.shutdown(socket.SHUT_WR)

    def _signal(self, rank: int, number: int) -> None:
        """Send a signal to a worker that was not reaped yet, whose process ID is still valid."""
        if rank in self.pids:
            os.kill(self.pids[rank], number)

    def _tell(self, line: str) -> None:
        with suppress(OSError):  # `serve` detects that the launcher is gone
            self.channel.sendall(f"{line}\n".encode())


def main() -> None:
    """Run the workers that the folder's job.json describes."""
    folder, parent, channel = sys.argv[1:]
    die_with_parent(int(parent))
    with open(os.path.join(folder, "job.json")) as file:
        job = json.load(file)
    sys.path[:] = job["path"]
    gc.disable()  # imports create no garbage
    from gcbench.training import launch

    with suppress(Exception):  # the workers raise and report it
        launch.named(job["call"])
    gc.freeze()  # otherwise collections in the workers would copy the shared memory
    gc.enable()
    workers = _Workers(folder, job, socket.socket(fileno=int(channel)))
    workers.fork()
    workers.serve()


if __name__ == "__main__":
    main()
