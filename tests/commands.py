"""Run the command line: in this process where that is enough, in one of its own otherwise."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from gcbench import cli
from gcbench import commands as deliveries

ROOT = Path(__file__).parents[1]
PATIENCE = 120.0
"""Seconds until a process that should have got somewhere counts as stuck."""


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


def brief(*_: object, **__: object) -> Any:
    """Return the effort of a verification that searches few inputs."""
    from gcbench.checks.cases import Effort

    return Effort(every=60, long=0, many=0, million=0, steps=1, thin=60, positions=False)


def invoke(*words: object, main: Callable[[], None] = cli.main, pictures: bool = False) -> Result:
    """Run `gcbench *words`, or another program's `main`, in this process.

    A verification searches few inputs. An analysis draws no picture, which takes longer than most
    of them, unless `pictures` is set or --plot is among the words.
    """
    from gcbench.checks import verify

    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = ["gcbench", *map(str, words)]
    drawing = pictures or "--plot" in argv
    drawn = deliveries.kinds if drawing else SimpleNamespace(draw=lambda _, path: [path])
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(verify, "effort_for", brief),
        mock.patch.object(deliveries, "kinds", drawn),
    ):
        try:
            main()
        except SystemExit as done:
            code = int(done.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def start(*words: object, module: str = "gcbench", **environment: str) -> subprocess.Popen[str]:
    """Start `python -m module *words` from the checkout, in a session of its own.

    It hears signals even where the tests do not, as under nohup and in a shell's background.
    """

    def hear() -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)

    path = os.pathsep.join(filter(None, [environment.pop("path", ""), str(ROOT)]))
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def end(process: subprocess.Popen[str]) -> Result:
    """Wait for a process."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Result(process.returncode, out, err)


def gcbench(*words: object, **environment: str) -> Result:
    """Run `gcbench *words` in a process of its own."""
    return end(start(*words, **environment))


def gcbench_each(*commands: Sequence[object], path: str) -> list[Result]:
    """Run each of the commands, one after the other in one process; it imports from `path`, too."""
    code = (
        "import json, sys; from commands import invoke; "
        "print(json.dumps([invoke(*words) for words in json.loads(sys.argv[1])]))"
    )
    done = subprocess.run(
        [sys.executable, "-Pc", code, json.dumps([[*map(str, words)] for words in commands])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([path, str(ROOT), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return [Result(*result) for result in json.loads(done.stdout.splitlines()[-1])]


def wait_for(what, process: subprocess.Popen[str] | None = None):
    """Wait until `what()` is true, while the process lives."""
    patience = time.monotonic() + PATIENCE
    while not (result := what()):
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended too early: {process.communicate()}")
        assert time.monotonic() < patience, "waited in vain"
        time.sleep(0.005)
    return result


def members(session: int) -> list[int]:
    """Return the living processes of a session: those that a command left behind, too."""
    result = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, sid = path.read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state != "Z":
                result.append(int(path.parent.name))
    return result


@contextlib.contextmanager
def files_of_at_most(nbytes: int):
    """Let the system refuse to write more than that into a file, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
