"""Jobs of several real processes: run once for each number of processes, shared by many tests."""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import io
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from torch import Tensor

from gcbench.core.errors import GcbenchError
from gcbench.training import engines, fork_server, launch

LIMIT = 300
"""Seconds until a method or job counts as hung, on a machine that other tests use."""
PROMPT = 25.0
"""Seconds within which a job must end on a busy machine; if it hangs, its hook waits for 60."""
PRELOAD = "GCBENCH_TESTS_PRELOAD"
"""Environment variable with modules that the fork server imports, once instead of once per rank."""


Job = Callable[[int, int], dict[str, Any]]


def collection() -> tuple[dict[str, Job], Callable[[Job], Job]]:
    """Return an empty dict of jobs by name, and a decorator that adds a function to it."""
    by_name: dict[str, Job] = {}

    def job(function: Job) -> Job:
        by_name[function.__name__] = function
        return function

    return by_name, job


def work(member: Any, module: str, methods: list[str], jobs: list[str]) -> dict[str, Any]:
    """Run jobs of a module in this process, one of a gloo group; return their results by name.

    The module has `method(rank, size, name)`, which is run for each of `methods`, and `JOBS`,
    functions of rank and size by their names.
    """
    engines.join(member, "cpu", 1)
    warnings.simplefilter("error")
    jobs_module, rank, size = importlib.import_module(module), member.rank, member.size
    result: dict[str, Any] = {}
    for name in methods:
        faulthandler.dump_traceback_later(LIMIT, exit=True)  # a hang ends, and shows where
        result[name] = jobs_module.method(rank, size, name)
    for name in jobs:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        began = time.perf_counter()
        result[name] = jobs_module.JOBS[name](rank, size)
        result[name]["seconds"] = time.perf_counter() - began
    return result


def _in_processes(
    size: int, call: Callable[..., Any], words: Sequence[Any], modules: Sequence[str] = ()
) -> list[Any]:
    """Return the result of `call` in each process, after one import of `modules`.

    gloo may fail to connect the sockets of a new group (seen once, torch 2.13, and not again in 15
    tries): then all is tried again, once.
    """
    os.environ[PRELOAD] = " ".join(modules)
    try:
        return launch.in_processes(size, 1, call, words)
    except GcbenchError as error:
        if "connectFullMesh failed" not in str(error):
            raise
        return launch.in_processes(size, 1, call, words)
    finally:
        del os.environ[PRELOAD]


def digest(end: Tensor) -> str:
    """Return a text that ranks share if they ended in the same bits."""
    return hashlib.sha256(end.numpy().tobytes()).hexdigest()


def program(member: Any, text: str, folder: str, words: list[str], port: int) -> str:
    """Run a program in this process as torchrun would; return what it prints."""
    os.environ.update(
        RANK=str(member.rank),
        WORLD_SIZE=str(member.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.chdir(folder)
    sys.argv = ["train.py", *words]
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def run_program(text: str, folder: Path, *words: str, size: int = 2) -> list[str]:
    """Run a program in `size` processes; return what each prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return _in_processes(size, program, [text, str(folder), [*words], port])


class Jobs:
    """The jobs of a module; `names`: number of processes -> the jobs that they run.

    The methods are run by the largest number of them, in which shards are the least even.
    `packages`: modules that the jobs import.
    """

    def __init__(
        self,
        module: str,
        methods: Sequence[str],
        names: Mapping[int, list[str]],
        packages: Sequence[str] = (),
    ) -> None:
        self.module, self.methods, self.names = module, [*methods], names
        self.modules = [*packages, module]
        self._done: dict[int, Any] = {}

    @property
    def most(self) -> int:
        """The largest number of processes."""
        return max(self.names)

    def ranks(self, size: int) -> list[dict[str, Any]]:
        """Return each rank's results of all jobs of this many processes, by name.

        Raises:
            GcbenchError: a job failed, in this call or in the first one.
        """
        if size not in self._done:
            methods = self.methods if size == self.most else []
            words = [self.module, methods, self.names[size]]
            try:
                self._done[size] = _in_processes(size, work, words, self.modules)
            except GcbenchError as error:
                self._done[size] = error
        if isinstance(self._done[size], GcbenchError):
            raise self._done[size].with_traceback(None)  # or it grows with each test
        result: list[dict[str, Any]] = self._done[size]
        return result

    def of(self, job: str, size: int = 2) -> list[Any]:
        """Return each rank's result of one job."""
        return [each[job] for each in self.ranks(size)]

    def method(self, name: str) -> list[Any]:
        """Return each rank's result of one method."""
        return self.of(name, self.most)


if Path(sys.argv[0]).name == Path(fork_server.__file__).name:
    for module_name in os.environ.get(PRELOAD, "").split():
        importlib.import_module(module_name)
