"""Where the workers of a run live: in this process, in local processes, or under torchrun."""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from gcbench import experiment
from gcbench.errors import GcbenchError, UsageError
from gcbench.experiment import Config
from gcbench.store import Run
from gcbench.train import Interrupted, Options, Trainer
from gcbench.world import DistributedWorld, Link, SimulatedWorld, World

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal to get when the parent dies."""


@contextmanager
def _stop_on_signals(*, launched: bool) -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a flag; a second one acts as usual.

    Not in a launched worker: it gets the terminal's signal and then the launcher's, and it is the
    launcher that loses patience.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = threading.Event()
    with signals_restored() as before:

        def handle(number: int, frame: object) -> None:
            asked.set()
            if not launched:
                signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, handle)
        yield asked.is_set


@contextmanager
def signals_restored() -> Iterator[dict[signal.Signals, Any]]:
    """Give the handlers of Ctrl-C and SIGTERM, and put them back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield before
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _fit(config: Config, world: World, run: Run, options: Options, *, launched: bool) -> None:
    """Train this process's workers; where worker 0 lives, finish the run."""
    try:
        with _stop_on_signals(launched=launched) as stop:
            trainer = Trainer(config, world, run, options)
            summary = trainer.fit(stop)
    finally:
        world.close()
    if not trainer.leads:
        return
    finished = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    summary["provenance"] = {**run.read_provenance(), "finished": finished}
    run.finish(summary)


def simulate(config: Config, run: Run, options: Options) -> None:
    """Run all workers in this process."""
    device = torch.device(config.device)
    threads = experiment.threads_per_worker(config)
    parallel = 1 if device.type == "cuda" else max(1, experiment.cores() // threads)
    link = Link(config.link_gbit, config.link_latency_us)
    world = SimulatedWorld(config.workers, device, link, threads, min(parallel, config.workers))
    _fit(config, world, run, options, launched=False)


def join(kind: str, threads: int) -> World:
    """Join the process group that the environment describes, as one worker on a device `kind`."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(kind)
    if device.type == "cuda":
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(threads)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    return DistributedWorld(device)


def check_size(workers: int) -> None:
    """Raise UsageError under a torchrun that started another number of processes."""
    size = int(os.environ["WORLD_SIZE"])
    if size != workers:
        raise UsageError(
            f"--workers {workers} under torchrun with {size} processes: they are the "
            f"workers; give --workers {size}"
        )


def torchrun(config: Config, run: Run, options: Options) -> None:
    """Be one worker of a job that torchrun started.

    Raises:
        UsageError: the job has another number of workers than the config.
    """
    check_size(config.workers)
    world = join(config.device, experiment.threads_per_worker(config))
    _fit(config, world, run, options, launched=True)


def _die_with_parent() -> None:
    """Have the kernel end this process with its parent: no worker goes on writing unwatched."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _error_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"error-{rank}.json"


def _end_workers(number: int, frame: object) -> None:
    """Have torch's launcher end the workers by SIGTERM, which they hear while they import, too."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    raise SignalException("Ctrl-C", signal.SIGTERM)


@contextmanager
def _deaf_workers() -> Iterator[None]:
    """Have the processes that Python starts in here not hear Ctrl-C: the launcher tells them.

    The terminal tells all processes: one that still imports would print a traceback and leave its
    peers waiting for it. The mask is inherited; this process has it only while it starts one, and
    hears Ctrl-C after that. An interruption between two of them leaves those that the launcher does
    not know yet: none outlives this.
    """
    kind: Any = multiprocessing.get_context("spawn").Process
    start = kind._Popen
    started = []
    here = threading.current_thread() is threading.main_thread()

    def deaf(process: Any) -> Any:
        resource_tracker.ensure_running()  # its own start would unblock the signal
        asked = threading.Event()
        if here:  # a thread without the mask may take the signal, too
            signal.signal(signal.SIGINT, lambda number, frame: asked.set())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            started.append(start(process))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if here:  # in place of the launcher's
                signal.signal(signal.SIGINT, _end_workers)
        if asked.is_set():
            _end_workers(signal.SIGINT, None)
        return started[-1]

    kind._Popen = staticmethod(deaf)
    try:
        yield
    finally:
        kind._Popen = staticmethod(start)
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()


def _spawned(errors: str, call: Callable[..., Any], words: Sequence[Any]) -> Any:
    """Be one local worker process; leave what went wrong in a file in `errors` for the parent.

    It does not hear Ctrl-C, see `_deaf_workers`: the launcher's SIGTERM ends it.
    """
    _die_with_parent()
    rank = int(os.environ["RANK"])
    try:
        return call(*words)
    except Exception as error:
        known = isinstance(error, GcbenchError)
        message = {
            "time": time.time(),
            "message": str(error) if known else f"worker {rank}: {error!r}",
            "exit_code": getattr(error, "exit_code", 1),
            "known": known,
            "trace": traceback.format_exc(),
        }
        with suppress(OSError):
            _error_file(errors, rank).write_text(json.dumps(message))
        # A peer that waits in a collective is brought down by the launcher, not by this exit.
        sys.stdout.flush()
        os._exit(1)


def _local_launch(workers: int, name: str) -> Any:
    """Return the settings of torch's elastic launcher for local processes; it stays quiet."""
    from torch.distributed.launcher.api import LaunchConfig

    for logger in logging.root.manager.loggerDict:
        if logger.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(logger).setLevel(logging.CRITICAL)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )


def _train(config_json: str, folder: str, options: Options) -> None:
    torchrun(Config.model_validate_json(config_json), Run(Path(folder)), options)


def spawn(config: Config, run: Run, options: Options) -> None:
    """Run every worker in a process of its own on this machine.

    Raises:
        GcbenchError: the first error of any worker.
    """
    threads = experiment.threads_per_worker(config)
    words = config.model_dump_json(), str(run.folder), options
    in_processes(config.workers, threads, config.hash, _train, words)


def in_processes(
    workers: int, threads: int, name: str, call: Callable[..., Any], words: Sequence[Any]
) -> list[Any]:
    """Return what `call(*words)` returns in each local process, by rank; RANK is set in each.

    torch's elastic launcher starts them. `call` is a function of a module; `words` and what it
    returns can be pickled.

    Raises:
        GcbenchError: the first error of any worker.
        Interrupted: the user asked to stop.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with TemporaryDirectory(prefix="gcbench-") as errors, signals_restored(), _deaf_workers():
        try:
            with _environment(OMP_NUM_THREADS=str(threads)):
                launch = elastic_launch(_local_launch(workers, name), _spawned)
                found: dict[int, Any] = launch(errors, call, words)
                return [found[rank] for rank in range(workers)]
        except ChildFailedError as failure:
            died = GcbenchError(f"a worker process died without a word ({failure!s:.200})")
            raise _first_error(workers, errors, died) from failure
        except (SignalException, KeyboardInterrupt) as failure:
            raise _first_error(workers, errors, Interrupted("stopped by the user")) from failure


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _first_error(workers: int, errors: str, silent: GcbenchError) -> GcbenchError:
    """Return what went wrong first in any worker, as an error of this process.

    `silent` is the error if no worker said anything.
    """
    found = []
    for rank in range(workers):
        with suppress(OSError, ValueError):
            found.append(json.loads(_error_file(errors, rank).read_text()))
    # A worker that fails by itself says so in our words; its peers only see the connection break.
    found.sort(key=lambda error: (not error["known"], error["time"]))
    if not found or (isinstance(silent, Interrupted) and not found[0]["known"]):
        return silent
    if found[0]["exit_code"] == Interrupted.exit_code:
        return Interrupted(found[0]["message"])
    error = UsageError if found[0]["exit_code"] == UsageError.exit_code else GcbenchError
    result = error(found[0]["message"])
    result.add_note(found[0]["trace"])
    return result


ENGINES = {"simulate": simulate, "spawn": spawn, "torchrun": torchrun}
