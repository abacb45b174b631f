"""Local worker processes: started, watched and ended by this process, their launcher.

What others could reach while they run: a folder that only this user can enter (mode 0700), with the
file through which the workers find each other (torch's FileStore), the description of the job, and
the workers' results, in JSON. Gloo connects the workers over loopback: each listens on a port of
127.0.0.1 that no other machine reaches. There is no TCP store, and nothing that arrives is
unpickled.

A risk remains, as gloo has no passwords: another user of this machine who connects to such a port
just before a worker does, with the number that gloo expects, could take the worker's place and
falsify gradients and records, but not have code executed. If you do not trust the other users of a
machine, use `--engine simulate` there.

The workers are forked by one process that has imported torch and gcbench (`gcbench.training.
launched`), and end with this one, whatever ends it. When one fails, the others are ended, and the
error that is raised is that of the worker that failed first.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

from gcbench.core.errors import (
    DivergedError,
    GcbenchError,
    Interrupted,
    PeerLostError,
    UsageError,
)
from gcbench.training import launched
from gcbench.training.membership import Membership

TIMEOUT = "GCBENCH_COLLECTIVE_TIMEOUT"
"""Environment variable: how many seconds a worker waits for the others in a collective."""
USUAL_TIMEOUT = 600.0
LONGEST_TIMEOUT = 86400.0
GRACE_SECONDS = 5.0
"""Time for workers to end by themselves, after another one failed, before they are killed."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_FROM_TERMINAL = {signal.SIGINT, signal.SIGHUP}
"""Signals that a terminal sends to all processes: workers block them, and the launcher, which
receives them, sends SIGTERM to the workers."""


def collective_timeout() -> timedelta:
    """Return how long a worker waits for the others in a collective.

    Raises:
        UsageError: the environment has no number of seconds that is allowed.
    """
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text) if text else USUAL_TIMEOUT
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= LONGEST_TIMEOUT:
        raise UsageError(
            f"{TIMEOUT}={text!r} in the environment: seconds from 1 to {LONGEST_TIMEOUT:.0f} "
            f"expected; without it they are {USUAL_TIMEOUT:.0f}"
        )
    return timedelta(seconds=seconds)


# ---- functions by name ---------------------------------------------------------------------------


def name_of(function: Callable[..., Any]) -> str:
    """Return "module:name" of a function that another process can import.

    Raises:
        UsageError: it cannot be imported: a closure, a method, a function of the main script.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    found = vars(sys.modules[function.__module__]).get(function.__qualname__)
    if found is not function or function.__module__ == "__main__":
        raise UsageError(
            f"{name} cannot be handed to other processes: a function at the top of a module that "
            "can be imported is expected; or use engine simulate"
        )
    return name


def named(name: str) -> Callable[..., Any]:
    """Return the function with this "module:name", importing its module."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


# ---- a worker ------------------------------------------------------------------------------------


def _report(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"report-{rank}.json"


def work(folder: str, rank: int, job: dict[str, Any]) -> None:
    """Run one local worker: do the job, write a report for the launcher, and end the process.

    The process ends without the interpreter's teardown, which threads of torch's process group
    occasionally abort if they still run.
    """
    member = Membership(rank, job["workers"], rank, job["workers"], Path(folder))
    try:
        report = {"result": named(job["call"])(member, *job["arguments"])}
    except (Exception, SystemExit) as error:  # a plug-in may call sys.exit
        known = isinstance(error, GcbenchError)
        report = {
            "error": str(error) if known else f"worker {rank}: {error!r}",
            "exit_code": getattr(error, "exit_code", 1),
            "peer_lost": isinstance(error, PeerLostError),
            "diverged_at": error.step if isinstance(error, DivergedError) else None,
            "trace": traceback.format_exc(),
        }
    with suppress(OSError):
        _report(folder, rank).write_text(json.dumps(report))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit("error" in report)


# ---- the launcher --------------------------------------------------------------------------------


class _LocalJob:
    """The workers of one job, seen by their launcher."""

    def __init__(self, folder: str, workers: int) -> None:
        self.folder, self.workers = folder, workers
        self.codes: dict[int, int] = {}
        """Rank -> exit code of each worker that has ended; -n: it was ended by signal n."""
        self.events: SimpleQueue[int | None] = SimpleQueue()
        """Receives the rank of each worker when it ends; None for a request to stop."""
        self.failed: list[int] = []
        """Ranks of the workers that failed without being asked to end, in order of time."""
        self.stopping = False
        self._started = False

    def start(self, threads: int) -> None:
        """Start the process that forks the workers, with the signals in `_FROM_TERMINAL` blocked.

        Otherwise it would print a traceback at Ctrl-C while it imports. A new process inherits the
        signal mask of the thread that starts it, and the workers inherit that; this thread blocks
        the signals only meanwhile, and receives them afterwards.
        """
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        place = {
            "WORLD_SIZE": self.workers,
            "LOCAL_WORLD_SIZE": self.workers,
            "OMP_NUM_THREADS": threads,
            "GLOO_SOCKET_IFNAME": LOOPBACK,
            "NCCL_SOCKET_IFNAME": LOOPBACK,
        }
        self._channel, theirs = socket.socketpair()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_TERMINAL)
        try:
            words = [self.folder, str(os.getpid()), str(theirs.fileno())]
            self._process = subprocess.Popen(
                # -P: the script's own folder, this package, must not be searched for imports.
                [sys.executable, "-P", launched.__file__, *words],
                stdin=subprocess.DEVNULL,
                env=inherited | {name: str(value) for name, value in place.items()},
                pass_fds=[theirs.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        """Put an event for each worker that ends, and end when all have, and their parent, too."""
        # Reset: the process that forks the workers was killed before it read all that it was sent.
        with suppress(ConnectionResetError), self._channel.makefile() as lines:
            for line in lines:
                if line.strip() == launched.STARTED:
                    self._started = True
                    continue
                rank, code = map(int, line.split())
                self.codes[rank] = code
                self.events.put(rank)
        self._channel.close()
        code = self._process.wait()
        for rank in set(range(self.workers)) - self.codes.keys():  # with their parent, or unborn
            self.codes[rank] = code
            self.events.put(rank)

    def report(self, rank: int) -> dict[str, Any]:
        """Return a worker's report; an empty one if the worker died without writing it."""
        try:
            found: dict[str, Any] = json.loads(_report(self.folder, rank).read_text())
        except (OSError, ValueError):
            return {}
        return found

    def wait(self) -> None:
        """Wait until all workers have ended.

        When one fails, or the user asks to stop, the others are asked to end; after GRACE_SECONDS,
        or when the user asks a second time, they are killed.
        """
        left = set(range(self.workers))
        deadline, asked = math.inf, False
        while left:
            try:
                # At most a second at a time: Python handles a signal that another thread received
                # only when this thread is not waiting.
                event = self.events.get(timeout=max(0.0, min(1.0, deadline - time.monotonic())))
            except Empty:
                if time.monotonic() >= deadline:
                    asked = True
                    self.kill()
                continue
            if event is None:
                if self.stopping:
                    self.kill()
                self.stopping = True
                self._ask(left)
                continue
            left.discard(event)
            report = self.report(event)
            if self.codes[event] == 0 and "result" in report:
                continue
            if report or not asked:
                self.failed.append(event)  # but no worker that was asked to end, and just did so
            if report.get("exit_code") == Interrupted.exit_code:
                continue  # the others stop at the same step, and may still write a checkpoint
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            # A worker that only lost a peer is not the cause: the peer's own report may come a
            # moment later, and the others lose the same peer anyway.
            if not asked and not report.get("peer_lost"):
                asked = True
                self._ask(left)

    def _ask(self, ranks: set[int]) -> None:
        """Send SIGTERM to workers: those that train write a checkpoint, the others end at once."""
        self._signal(ranks, signal.SIGTERM)
        self._process.terminate()  # which counts only while it imports

    def kill(self) -> None:
        """End all workers at once; while they are not forked yet, the process that would."""
        self._signal(set(range(self.workers)), signal.SIGKILL)
        if not self._started:
            self._process.kill()

    def end(self) -> None:
        """End what is left of the job, and wait until nothing is."""
        self.kill()
        self._listener.join()

    def _signal(self, ranks: set[int], number: signal.Signals) -> None:
        with suppress(OSError):  # all have ended
            for rank in ranks:
                self._channel.sendall(f"{rank} {number:d}\n".encode())

    def error(self) -> GcbenchError | None:
        """Return the first failure as an error of this process; None if there was none.

        The error of a worker that only lost its peers counts only if there is no other.
        """
        reports = {rank: self.report(rank) for rank in self.failed}
        stopped = [r for r in reports.values() if r.get("exit_code") == Interrupted.exit_code]
        causes = {
            rank: report
            for rank, report in reports.items()
            if report not in stopped and not report.get("peer_lost")
        }
        if self.stopping or stopped:
            # Workers without a report ended because they were asked to.
            causes = {rank: report for rank, report in causes.items() if report}
            if not causes:
                return Interrupted(stopped[0]["error"] if stopped else "stopped by the user")
        if not causes:
            return self._retold(next(iter(reports.values()))) if reports else None
        rank, report = next(iter(causes.items()))
        return self._retold(report) if report else GcbenchError(self._died(rank))

    def _retold(self, report: dict[str, Any]) -> GcbenchError:
        error = GcbenchError(report["error"])
        if report["exit_code"] == UsageError.exit_code:
            error = UsageError(report["error"])
        elif report["diverged_at"] is not None:
            error = DivergedError(report["error"], report["diverged_at"])
        error.add_note(report["trace"])
        return error

    def _died(self, rank: int) -> str:
        code = self.codes[rank]
        if code >= 0:
            return f"worker {rank} ended with exit code {code}, without a word"
        try:
            name = signal.Signals(-code).name
        except ValueError:  # a real-time signal
            name = f"signal {-code}"
        why = ": often memory that ran out" if -code == signal.SIGKILL else ""
        return f"worker {rank} was ended by {name}{why}"


@contextmanager
def _stop_requests(events: SimpleQueue[int | None]) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into events; a signal that is ignored (nohup) stays ignored.

    Outside of the main thread, where Python allows no handlers, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in (signal.SIGTERM, *_FROM_TERMINAL):
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, lambda number, frame: events.put(None))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def in_processes(
    workers: int, threads: int, call: Callable[..., Any], arguments: Sequence[Any]
) -> list[Any]:
    """Return what `call(member, *arguments)` returns in each of `workers` processes, by rank.

    `call` is a function at the top of a module, `member` the process's `Membership`; `arguments`
    and what it returns are values that JSON can hold. Each process has RANK and the like in its
    environment, and `threads` threads for OpenMP.

    The first Ctrl-C, SIGTERM or SIGHUP asks the workers to stop, the second one ends them at once.

    Raises:
        GcbenchError: the first failure of any worker, or how it died.
        Interrupted: the user asked to stop.
        UsageError: `call` cannot be imported by its name.
    """
    collective_timeout()  # raises for a wrong value before processes start
    job = {
        "path": sys.path,
        "call": name_of(call),
        "arguments": list(arguments),
        "workers": workers,
    }
    with TemporaryDirectory(prefix="gcbench-") as folder:
        (Path(folder) / "job.json").write_text(json.dumps(job))
        local_job = _LocalJob(folder, workers)
        with _stop_requests(local_job.events):
            local_job.start(threads)
            try:
                local_job.wait()
            finally:
                local_job.end()
        if (error := local_job.error()) is not None:
            raise error
        return [local_job.report(rank)["result"] for rank in range(workers)]
