"""One process that has imported torch and gcbench, and forks what tests start as processes.

An import takes seconds, and a guide has ten commands. `Programs` puts `gcbench`, `python` and
`torchrun` in front of PATH: each is a client of a few lines that sends its arguments, folder,
environment and open files to the server, which forks, runs the command and returns its exit code.
`Process` is a fork server of `gcbench.training.launch`, which otherwise starts one as a program;
tests of the launcher itself use the program. The first user starts the server, for all processes of
a test run.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import runpy
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
PLACE = "GCBENCH_PRELOADED"
"""The environment variable with the folder of the server's socket."""
USER = "GCBENCH_PRELOADED_FOR"
"""The environment variable with the PID of the test run, with which the server ends."""
IMPORTS = (
    "torch torch.distributed.run pandas pyarrow.parquet matplotlib.pyplot scipy.stats "
    "seaborn jinja2 rich.table typer.completion pydantic numpy "
    "torch._dynamo torch.distributed.checkpoint torch.distributed.fsdp "
    "torch.distributed.tensor.parallel gcbench.integrations.ddp gcbench.integrations.fsdp "
    "gcbench.cli gcbench.checks.verify "
    "gcbench.training.train gcbench.training.runner gcbench.training.engines "
    "gcbench.report.compare gcbench.report.listings gcbench.report.run_plots "
    "gcbench.report.page gcbench.predict.advice"
)
CLIENT = """#!{python} -SEs
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([{program!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
os._exit((server.recv(1) or b"\\x01")[0])
"""
PROGRAMS = {"gcbench": "gcbench", "python": "", "torchrun": "torch.distributed.run"}
"""The module that each program runs; python runs what its arguments name."""
FORK_SERVER = "fork server"
"""The request for a fork server, in the place of a program's name."""


@contextmanager
def home() -> Iterator[None]:
    """Give the server a folder, named in the environment, and end it afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {PLACE: folder, USER: str(os.getpid())}
        try:
            yield
        finally:
            pid = Path(folder) / "pid"
            if pid.is_file():
                os.killpg(int(pid.read_text()), signal.SIGKILL)
            del os.environ[PLACE], os.environ[USER]


def address() -> Path:
    """Return the server's socket; the first call of all processes starts the server."""
    folder = Path(os.environ[PLACE])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "pid").exists():
            subprocess.run(
                [sys.executable, "-W", "ignore", __file__, str(folder)],
                env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                check=True,
            )
    return folder / "socket"


class Programs:
    """A folder of programs, for PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for program in PROGRAMS:
            path = self.folder / program
            text = CLIENT.format(python=sys.executable, address=str(address()), program=program)
            path.write_text(text)
            path.chmod(0o755)

    def shell(
        self, script: str, folder: Path, seconds: float, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script by bash, which stops at the first command that fails."""
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        # torchrun starts each worker by this program, not by its own interpreter.
        environment = {"PYTHON_EXEC": str(self.folder / "python"), **environment}
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env={**os.environ, "COLUMNS": "80", **environment, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )


class Process:
    """A fork server, with the methods of `subprocess.Popen` that the launcher calls."""

    def __init__(
        self, words: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **_: Any
    ) -> None:
        """Fork one with the arguments of `subprocess.Popen`."""
        self._status, status = socket.socketpair()
        blocked = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))]
        request = [FORK_SERVER, words[-3], os.getcwd(), dict(env), blocked]
        data = json.dumps(request).encode()
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(str(address()))
            files = [1, 2, *pass_fds, status.fileno()]
            socket.send_fds(server, [len(data).to_bytes(4, "big")], files)
            server.sendall(data)
        status.close()
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


@contextmanager
def forking() -> Iterator[None]:
    """Let the launcher start its fork servers without their imports."""
    from gcbench.training import launch

    module = SimpleNamespace(Popen=Process, DEVNULL=subprocess.DEVNULL)
    with mock.patch.object(launch, "subprocess", module):
        yield


# ---- in the server -------------------------------------------------------------------------------


def _run(program: str, words: list[str]) -> None:
    """Run the program in this process, as its own interpreter would."""
    module = PROGRAMS[program]
    while not module and words and words[0] == "-u":  # torchrun asks for unbuffered output
        del words[0]
    if not module and words[:1] == ["-m"]:
        module, words = words[1], words[2:]
    if module:
        sys.path[0] = os.getcwd() if program == "python" else str(ROOT)
        sys.argv = [program, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif words and not words[0].startswith("-"):
        sys.path[0] = str(Path(words[0]).resolve().parent)
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    else:
        raise SystemExit(f"python {shlex.join(words)}: a file or -m MODULE is expected here")


def _keep(request: list[Any], files: Sequence[int]) -> None:
    """Fork a fork server, and report its process ID and exit code; this does not return."""
    from gcbench.training import fork_server

    _, folder, cwd, environment, blocked = request
    out, err, channel, status = files
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


def _serve(listener: socket.socket, user: int) -> None:
    """Fork for each request until the process `user` ends; a fork reports how its child ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener.settimeout(1)
    while True:
        try:
            client, _ = listener.accept()
        except TimeoutError:
            if Path(f"/proc/{user}").exists():
                continue
            return  # a test run that was killed leaves no server
        client.setblocking(True)
        if os.fork():
            client.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        length, files, _, _ = socket.recv_fds(client, 4, 4)
        data = b""
        while len(data) < int.from_bytes(length, "big"):
            data += client.recv(1 << 16)
        request = json.loads(data)
        if request[0] == FORK_SERVER:
            client.close()
            _keep(request, files)
        program, words, folder, environment = request
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            client.sendall(bytes([os.waitstatus_to_exitcode(status) & 0xFF]))
            os._exit(0)
        client.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        _run(program, words)
        return


def _main(folder: Path) -> None:
    """Import, listen, and go on in the background, as a leader of the processes forked here."""
    import commands

    user = os.environ[USER]
    for name in IMPORTS.split():
        __import__(name)
    # As `commands.invoke` does: a verification searches few inputs.
    sys.modules["gcbench.checks.verify"].effort_for = commands.brief  # type: ignore[attr-defined]
    gc.freeze()  # a fork's collector would copy every page
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    if child := os.fork():
        (folder / "pid").write_text(str(child))
        os._exit(0)
    os.setsid()
    _serve(listener, int(user))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
