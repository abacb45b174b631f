"""The script behind local worker processes: `python -P launched.py FOLDER PARENT CHANNEL`.

It imports torch, gcbench and the module of the job once, and forks the workers, so that their start
takes the time of one import, not of one each, and they share the memory of what was imported. Then
it waits for them, as the processes that forked them must: it tells the launcher, by the socket
CHANNEL, how each has ended, and sends the workers the signals that the launcher asks for. (The
launcher cannot fork them itself: it has threads, and may have used a GPU.)

It imports only after `die_with_parent`: imports take seconds, and a launcher that is killed
meanwhile must leave no process behind.
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
"""What the launcher is told when the workers run."""


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


def name_of_worker(rank: int) -> str:
    """Return the name under which `ps -o comm` and top show a worker."""
    return f"gcbench-{rank}"


class _Workers:
    """The workers of a job, as the process that forks them sees them."""

    def __init__(self, folder: str, job: dict[str, Any], channel: socket.socket) -> None:
        self.folder, self.job, self.channel = folder, job, channel
        self.pids: dict[int, int] = {}
        """Rank -> process, of the workers that have not ended."""
        self.wake, self.woken = os.pipe()

    def fork(self) -> None:
        """Start all workers, and be told of every one that ends.

        SIGTERM often goes to a whole group of processes; the launcher decides what becomes of it.
        """
        os.set_blocking(self.woken, False)
        signal.set_wakeup_fd(self.woken)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
        parent = os.getpid()
        for rank in range(self.job["workers"]):
            with warnings.catch_warnings(action="ignore"):  # of threads: those of BLAS allow it
                pid = os.fork()
            if pid == 0:
                self._work(rank, parent)
            self.pids[rank] = pid
        self._tell(STARTED)

    def _work(self, rank: int, parent: int) -> None:
        """Be a worker, in a process that was just forked; this does not return."""
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
        """Tell how each worker ends and pass signals on, until the launcher closes the channel."""
        asked, watched = b"", [self.wake, self.channel.fileno()]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if self.wake in ready:
                os.read(self.wake, 4096)
                self._reap()
            if watched[1] in ready:
                if not (data := self.channel.recv(4096)):  # as when the launcher is gone
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
        """Send a signal to a worker that was not waited for yet: its number is no one else's."""
        if rank in self.pids:
            os.kill(self.pids[rank], number)

    def _tell(self, line: str) -> None:
        with suppress(OSError):  # the launcher is gone, which `serve` finds out
            self.channel.sendall(f"{line}\n".encode())


def main() -> None:
    """Run the workers that the launcher has described in the folder's job.json."""
    folder, parent, channel = sys.argv[1:]
    die_with_parent(int(parent))
    with open(os.path.join(folder, "job.json")) as file:
        job = json.load(file)
    sys.path[:] = job["path"]
    gc.disable()  # nothing that is imported is garbage
    from gcbench.training import launch

    with suppress(Exception):  # the workers raise it again, and report it
        launch.named(job["call"])
    gc.freeze()  # or the workers' collections would write to, and so copy, what they share
    gc.enable()
    workers = _Workers(folder, job, socket.socket(fileno=int(channel)))
    workers.fork()
    workers.serve()


if __name__ == "__main__":
    main()
