"""Commands of a shell, run by forks of one process that has already imported torch and gcbench.

An import takes seconds, and a guide has ten commands. `Programs` puts `gcbench`, `python` and
`torchrun` in front of PATH: each is a client of a few lines that sends its arguments, folder,
environment and open files to the server, which forks, runs the command and returns its exit code.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTS = (
    "torch torch.distributed.run pandas pyarrow.parquet matplotlib.pyplot scipy.stats "
    "seaborn jinja2 rich.table typer.completion pydantic numpy "
    "torch._dynamo gcbench.integrations.ddp gcbench.cli gcbench.checks.verify "
    "gcbench.training.train gcbench.training.runner "
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


class Programs:
    """A folder of programs, for PATH, and the server behind them; `with` ends the server."""

    def __enter__(self) -> Programs:
        self._scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self._scratch.name)
        address = str(self.folder / "socket")
        for program in PROGRAMS:
            path = self.folder / program
            text = CLIENT.format(python=sys.executable, address=address, program=program)
            path.write_text(text)
            path.chmod(0o755)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, address],
            env=environment,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"
        return self

    def __exit__(self, *error: object) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()
        self._scratch.cleanup()

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


def _serve(address: str) -> None:
    """Fork for each request; the fork forks again, and reports how its child ended."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    parent = os.getppid()
    listener.settimeout(1)
    while os.getppid() == parent:  # a test run that was killed leaves no server
        try:
            client, _ = listener.accept()
        except TimeoutError:
            continue
        client.setblocking(True)
        if os.fork():
            client.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        length, files, _, _ = socket.recv_fds(client, 4, 3)
        request = b""
        while len(request) < int.from_bytes(length, "big"):
            request += client.recv(1 << 16)
        program, words, folder, environment = json.loads(request)
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


if __name__ == "__main__":
    import commands

    for name in IMPORTS.split():
        __import__(name)
    # As `commands.invoke` does: a verification searches few inputs.
    sys.modules["gcbench.checks.verify"].effort_for = commands.brief  # type: ignore[attr-defined]
    gc.freeze()  # a fork's collector would copy every page
    _serve(sys.argv[1])
