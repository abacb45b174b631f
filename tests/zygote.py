"""Fork servers for tests, forked from one process that has already imported torch and gcbench.

`gcbench.training.launch` starts its fork server as a program, whose imports take seconds. With
`Zygote.patched` the same code runs in a fork of a process that imported them once. Tests of the
launcher itself use the program.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from gcbench.training import fork_server, launch

ROOT = Path(__file__).parents[1]
IMPORTS = (
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch.distributed.tensor.parallel", "gcbench.integrations.ddp", "gcbench.integrations.fsdp"),
    "gcbench.training.engines",
)


class Process:
    """A fork server, with the methods of `subprocess.Popen` that the launcher calls."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self.pid = self._read()

    def _read(self) -> int:
        (number,) = struct.unpack("i", self._status.recv(4, socket.MSG_WAITALL))
        return number

    def wait(self) -> int:
        """Return the exit code."""
        code = self._read()
        self._status.close()
        return code

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Zygote:
    """The process that forks fork servers; `close` ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path},
        )
        theirs.close()

    def close(self) -> None:
        """End the process, if a fork server was started."""
        if self._process is not None:
            self._socket.close()
            self._process.wait()

    def start(
        self, words: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **_: Any
    ) -> Process:
        """Fork a fork server with the arguments of `subprocess.Popen`."""
        if self._process is None:
            self._begin()
        ours, status = socket.socketpair()
        (channel,) = pass_fds
        blocked = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))]
        request = json.dumps([words[-3], dict(env), os.getcwd(), blocked]).encode()
        fds = [1, 2, channel, status.fileno()]
        socket.send_fds(self._socket, [struct.pack("i", len(request))], fds)
        self._socket.sendall(request)
        status.close()
        return Process(ours)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Let the launcher fork its fork servers from this process."""
        module = SimpleNamespace(Popen=self.start, DEVNULL=subprocess.DEVNULL)
        with mock.patch.object(launch, "subprocess", module):
            yield


# ---- in the zygote -------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> None:
    """Fork a keeper per request, until the tests close the socket."""
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        data, fds, _, _ = socket.recv_fds(requests, 4, 4)
        if len(data) < 4:
            return
        (size,) = struct.unpack("i", data)
        request = json.loads(requests.recv(size, socket.MSG_WAITALL))
        if os.fork() == 0:
            requests.close()
            _keep(request, fds)
        for fd in fds:
            os.close(fd)


def _reap(number: int, frame: object) -> None:
    """Reap the keepers that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _keep(request: list[Any], fds: Sequence[int]) -> None:
    """Fork a fork server, and report its process ID and exit code; this does not return."""
    folder, environment, cwd, blocked = request
    out, err, channel, status = fds
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(status)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        sys.argv = [fork_server.__file__, folder, str(keeper), str(channel)]
        try:
            fork_server.main()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(channel)
    with socket.socket(fileno=status) as report:
        report.sendall(struct.pack("i", pid))
        _, code = os.waitpid(pid, 0)
        with suppress(OSError):
            report.sendall(struct.pack("i", os.waitstatus_to_exitcode(code)))
    os._exit(0)


if __name__ == "__main__":
    for name in IMPORTS:
        importlib.import_module(name)
    _serve(socket.socket(fileno=int(sys.argv[1])))
