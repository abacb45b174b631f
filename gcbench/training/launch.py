"""The launcher of local worker processes: it starts, watches and ends them.

Exposure while they run: a folder that only this user can access (mode 0700), with the file in which
the workers rendezvous (torch's FileStore), the description of the job, and the workers' results as
JSON. Gloo connects the workers over loopback: each listens on a port of 127.0.0.1, unreachable from
other machines. There is no TCP store, and nothing is unpickled.

One risk remains because gloo has no passwords: another user of this machine who connects to such a
port just before a worker does, with the number that gloo expects, could impersonate the worker and
falsify gradients and records, but not execute code. If you do not trust the other users of a
machine, use `--engine simulate`.

One process that has imported torch and gcbench forks the workers (`fork_server`); they end when
this process does. When one fails, the others are ended, and the error that is raised is that of
the worker that failed first.
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
from gcbench.training import fork_server
from gcbench.training.rank import Rank

TIMEOUT = "GCBENCH_COLLECTIVE_TIMEOUT"
"""Environment variable with the seconds that a worker waits for the others in a collective."""
USUAL_TIMEOUT = 600.0
LONGEST_TIMEOUT = 86400.0
GRACE_SECONDS = 5.0
"""Time for workers to end after another one failed, before they are killed."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_FROM_TERMINAL = {signal.SIGINT, signal.SIGHUP}
"""Signals that a terminal sends to all processes: workers block them; the launcher sends SIGTERM to
the workers instead."""


def collective_timeout() -> timedelta:
    """Return how long a worker waits for the others in a collective.

    Raises:
        UsageError: the value in the environment is invalid.
    """
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text) if text else USUAL_TIMEOUT
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= LONGEST_TIMEOUT:
        raise UsageError(
            f"{TIMEOUT}={text!r} in the environment: expected seconds from 1 to "
            f"{LONGEST_TIMEOUT:.0f}; unset it for {USUAL_TIMEOUT:.0f}"
        )
    return timedelta(seconds=seconds)


# ---- functions by name ---------------------------------------------------------------------------


def name_of(function: Callable[..., Any]) -> str:
    """Return "module:name" of a function that another process can import.

    Raises:
        UsageError: it cannot be imported: a closure, a method, a function of the main script.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    importable = vars(sys.modules[function.__module__]).get(function.__qualname__) is function
    if not importable or function.__module__ == "__main__":
        raise UsageError(
            f"{name} cannot be used in other processes: define it at the top level of an "
            "importable module, or use engine simulate"
        )
    return name


def named(name: str) -> Callable[..., Any]:
    """Return the function with this "module:name", importing its module."""
    module, _, function = name.partition(":")
    target: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return target


# ---- a worker ------------------------------------------------------------------------------------


def _report(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"report-{rank}.json"


def work(folder: str, rank: int, job: dict[str, Any]) -> None:
    """Run one local worker: do the job, write a report for the launcher, and end the process.

    The process skips the interpreter's teardown, which running threads of torch's process group
    occasionally abort.
    """
    member = Rank(rank, job["workers"], rank, job["workers"], Path(folder))
    try:
        report = {"result": named(job["call"])(member, *job["arguments"])}
    except (Exception, SystemExit) as error:  # a plug-in may call sys.exit
        expected = isinstance(error, GcbenchError)
        report = {
            "error": str(error) if expected else f"worker {rank}: {error!r}",
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
    """The workers of one job, as the launcher manages them."""

    def __init__(self, folder: str, workers: int) -> None:
        self.folder, self.workers = folder, workers
        self.codes: dict[int, int] = {}
        """Exit code of each ended worker by rank; -n: it was ended by signal n."""
        self.events: SimpleQueue[int | None] = SimpleQueue()
        """The rank of each worker when it ends; None for a request to stop."""
        self.failed: list[int] = []
        """Ranks of the workers that failed before a request to end, in order of time."""
        self.stopping = False
        self._started = False

    def start(self, threads: int) -> None:
        """Start the fork server, with the signals in `_FROM_TERMINAL` blocked.

        Otherwise it would print a traceback at Ctrl-C while it imports. The fork server and the
        workers inherit the signal mask of this thread, which blocks the signals only meanwhile.
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
            arguments = [self.folder, str(os.getpid()), str(theirs.fileno())]
            self._process = subprocess.Popen(
                # -P: do not import from the script's folder, this package.
                [sys.executable, "-P", fork_server.__file__, *arguments],
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
        """Put an event for each worker that ends; return when all workers and the server ended."""
        # Reset: the fork server was killed before it read all requests.
        with suppress(ConnectionResetError), self._channel.makefile() as lines:
            for line in lines:
                if line.strip() == fork_server.STARTED:
                    self._started = True
                    continue
                rank, code = map(int, line.split())
                self.codes[rank] = code
                self.events.put(rank)
        self._channel.close()
        code = self._process.wait()
        for rank in set(range(self.workers)) - self.codes.keys():  # ended with the fork server
            self.codes[rank] = code
            self.events.put(rank)

    def report(self, rank: int) -> dict[str, Any]:
        """Return a worker's report; empty if the worker ended without writing one."""
        try:
            report: dict[str, Any] = json.loads(_report(self.folder, rank).read_text())
        except (OSError, ValueError):
            return {}
        return report

    def wait(self) -> None:
        """Wait until all workers have ended.

        If one fails, or the user interrupts, the others are asked to end; after GRACE_SECONDS, or
        at the second interrupt, they are killed.
        """
        left = set(range(self.workers))
        deadline, asked = math.inf, False
        while left:
            try:
                # At most a second: Python handles a signal of another thread only when this thread
                # is not waiting.
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
                self.failed.append(event)  # without workers that ended on request
            if report.get("exit_code") == Interrupted.exit_code:
                continue  # the others stop at the same step, and may still write a checkpoint
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            # A worker that lost a peer is not the cause: the peer's report may follow, and the
            # others lose the same peer anyway.
            if not asked and not report.get("peer_lost"):
                asked = True
                self._ask(left)

    def _ask(self, ranks: set[int]) -> None:
        """Send SIGTERM to workers: those that train write a checkpoint, the others end at once."""
        self._signal(ranks, signal.SIGTERM)
        self._process.terminate()  # effective only while it imports

    def kill(self) -> None:
        """Kill all workers, or the fork server if it has not forked them yet."""
        self._signal(set(range(self.workers)), signal.SIGKILL)
        if not self._started:
            self._process.kill()

    def end(self) -> None:
        """Kill all remaining processes and wait until they have ended."""
        self.kill()
        self._listener.join()

    def _signal(self, ranks: set[int], number: signal.Signals) -> None:
        with suppress(OSError):  # all have ended
            for rank in ranks:
                self._channel.sendall(f"{rank} {number:d}\n".encode())

    def error(self) -> GcbenchError | None:
        """Return the first failure as an error of this process; None if there was none.

        The loss of a peer counts only without another error.
        """
        reports = {rank: self.report(rank) for rank in self.failed}
        stopped = [r for r in reports.values() if r.get("exit_code") == Interrupted.exit_code]
        causes = {
            rank: report
            for rank, report in reports.items()
            if report not in stopped and not report.get("peer_lost")
        }
        if self.stopping or stopped:
            # Workers without a report ended on request.
            causes = {rank: report for rank, report in causes.items() if report}
            if not causes:
                return Interrupted(stopped[0]["error"] if stopped else "stopped by the user")
        if not causes:
            return self._to_error(next(iter(reports.values()))) if reports else None
        rank, report = next(iter(causes.items()))
        return self._to_error(report) if report else GcbenchError(self._died(rank))

    def _to_error(self, report: dict[str, Any]) -> GcbenchError:
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
            return f"worker {rank} ended with exit code {code} and without a report"
        try:
            name = signal.Signals(-code).name
        except ValueError:  # a real-time signal
            name = f"signal {-code}"
        why = ": often out of memory" if -code == signal.SIGKILL else ""
        return f"worker {rank} was ended by {name}{why}"


@contextmanager
def _stop_requests(events: SimpleQueue[int | None]) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into events; an ignored signal (nohup) stays ignored.

    Outside the main thread, where Python allows no handlers, this does nothing.
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
    """Run `call(member, *arguments)` in each of `workers` processes; return the results by rank.

    `call` is a function at the top level of a module, `member` the process's `Rank`; `arguments`
    and results are JSON values. Each process has RANK and related variables in its environment, and
    `threads` threads for OpenMP.

    The first Ctrl-C, SIGTERM or SIGHUP asks the workers to stop, the second one kills them.

    Raises:
        GcbenchError: the first failure of any worker.
        Interrupted: the user interrupted the job.
        UsageError: `call` cannot be imported by its name.
    """
    collective_timeout()  # raises before processes start if the value is invalid
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
