"""Shared fixtures."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path

import preloaded
import pytest


def pytest_configure(config):
    """Have waiting threads leave their core to others: two cores are few. Not where time is taken.

    libgomp reads this when torch loads it, so nothing here imports torch before. And the terminal
    in which tests run does not cut what commands print. A shell that starts them in the background
    has them ignore Ctrl-C, and so would the processes that are interrupted here.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("COLUMNS", None)
    if not any("benchmarks" in word for word in config.args):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if not hasattr(config, "workerinput"):  # one server for all processes of this run
        stack = ExitStack()
        stack.enter_context(preloaded.home())
        config.add_cleanup(stack.close)


TESTS = Path(__file__).parent
LONGEST = (
    *("core/test_contract.py", "project/test_pages.py", "integrations/test_fsdp.py"),
    *("ops/test_kernels.py", "training/test_launch.py", "checks/test_bounds_mutants.py"),
    *("training/test_engines.py", "integrations/test_ddp.py", "report/test_report.py"),
    *("watch/test_watch.py", "netlab/test_netlab.py", "cli/test_cli.py"),
    *("profile/test_bandwidth.py", "checks/test_bounds.py", "ops/test_cuda.py"),
    *("training/test_nodes.py", "project/test_packaging.py", "training/test_interrupts.py"),
)
"""Files that take longest. They start first, so that at the end every process has short ones."""


def pytest_collection_modifyitems(items):
    assert [name for name in LONGEST if not (TESTS / name).is_file()] == []
    place = {TESTS / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden bytes of all compressors"
    )


@pytest.fixture(autouse=True)
def _threads():
    """One thread a test, so that tests do not crowd each other out; undo what a world changes."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def simulated():
    """Return a function that makes a simulated world, closed after the test."""
    import torch

    from gcbench.core.world import Link, SimulatedWorld

    worlds = []

    def make(workers: int) -> SimulatedWorld:
        world = SimulatedWorld(workers, torch.device("cpu"), Link(10.0, 50.0), 1, 2)
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def clock():
    import torch

    from gcbench.core.clock import Clock

    return Clock(torch.device("cpu"))


@pytest.fixture(autouse=True)
def own_files():
    """Forget the files of compressors and memories that a test's commands registered."""
    from gcbench.core import registry

    variables = registry.VARIABLES.values()
    before = {name: os.environ.get(name) for name in variables}
    yield
    if before != {name: os.environ.get(name) for name in variables}:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        registry.compressors.cache_clear()
        registry.memories.cache_clear()


@pytest.fixture
def forget():
    """Return a function that forgets the files of compressors, as a new process does."""
    from gcbench.core import registry

    def now() -> None:
        for variable in registry.VARIABLES.values():
            os.environ[variable] = ""
        for name in [name for name in sys.modules if name.startswith("gcbench_file_")]:
            del sys.modules[name]
        registry.compressors.cache_clear()
        registry.memories.cache_clear()

    before = {name: os.environ.get(name, "") for name in registry.VARIABLES.values()}
    now()
    yield now
    now()
    os.environ.update(before)


@pytest.fixture
def real_data() -> Path:
    """The folder with the real data sets; the test is skipped where there is none."""
    folder = os.environ.get("GCBENCH_DATA")
    if not folder:
        pytest.skip("GCBENCH_DATA is not set: no real data here")
    return Path(folder)


@pytest.fixture
def third_party(monkeypatch):
    """Return a function that puts a folder with the module `somebodys` on the path, for a test."""
    from gcbench.core import registry
    from gcbench.training import sinks

    def forget():
        for cached in (
            registry.compressors,
            registry.memories,
            registry.tasks,
            sinks.registered,
        ):
            cached.cache_clear()

    def put(folder: str) -> None:
        monkeypatch.syspath_prepend(folder)
        forget()
        with warnings.catch_warnings(action="ignore"):  # names that are taken are a test's own
            registry.compressors(), registry.tasks()

    yield put
    sys.modules.pop("somebodys", None)
    forget()


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Return `gcbench`, `python` and `torchrun` without their imports: see preloaded.Programs."""
    return preloaded.Programs(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def gcbench(programs):
    """Return a function that runs `gcbench *words` in a process of its own."""
    from commands import PATIENCE, ROOT, Result

    def run(*words):
        done = programs.shell(shlex.join(["gcbench", *map(str, words)]), ROOT, PATIENCE)
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="module")
def forked():
    """Start local workers without the imports of a new fork server."""
    with preloaded.forking():
        yield
