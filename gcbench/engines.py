"""Where the workers of a run live: in this process, in local processes, or under torchrun."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gcbench import experiment
from gcbench.errors import GcbenchError, UsageError
from gcbench.experiment import Config
from gcbench.store import Run
from gcbench.train import Interrupted, Options, Trainer
from gcbench.world import DistributedWorld, Link, SimulatedWorld, World

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@contextmanager
def _stop_on_signals(*signals: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Turn the first of these signals into a flag; a second one acts as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = threading.Event()
    before = {number: signal.getsignal(number) for number in signals}

    def handle(number: int, frame: object) -> None:
        asked.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in signals:
        signal.signal(number, handle)
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fit(config: Config, world: World, run: Run, options: Options, *stops: signal.Signals) -> None:
    """Train this process's workers; where worker 0 lives, finish the run."""
    try:
        with _stop_on_signals(*stops) as stop:
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
    _fit(config, world, run, options, signal.SIGINT)


def _join(config: Config) -> World:
    """Join the process group that the environment describes."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(experiment.threads_per_worker(config))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    return DistributedWorld(device)


def torchrun(config: Config, run: Run, options: Options) -> None:
    """Be one worker of a job that torchrun started.

    Raises:
        UsageError: the job has another number of workers than the config.
    """
    size = int(os.environ["WORLD_SIZE"])
    if size != config.workers:
        raise UsageError(f"--workers {config.workers} under torchrun with {size} processes")
    _fit(config, _join(config), run, options, signal.SIGINT, signal.SIGTERM)


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"


def _spawned(config_json: str, folder: str, options: Options) -> None:
    """Be one local worker process; leave what went wrong in a file for the parent."""
    rank = int(os.environ["RANK"])
    run = Run(Path(folder))
    try:
        torchrun(Config.model_validate_json(config_json), run, options)
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
            _error_file(run.folder, rank).write_text(json.dumps(message))
        # A peer that waits in a collective is brought down by the launcher, not by this exit.
        sys.stdout.flush()
        os._exit(1)


def spawn(config: Config, run: Run, options: Options) -> None:
    """Run every worker in a process of its own on this machine, by torch's elastic launcher.

    Raises:
        GcbenchError: the first error of any worker.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    for rank in range(config.workers):
        _error_file(run.folder, rank).unlink(missing_ok=True)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.workers,
        run_id=config.hash,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    try:
        with _environment(OMP_NUM_THREADS=str(experiment.threads_per_worker(config))):
            elastic_launch(launch, _spawned)(config.model_dump_json(), str(run.folder), options)
    except (ChildFailedError, SignalException, KeyboardInterrupt) as failure:
        raise _first_error(config, run, failure) from failure


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


def _first_error(config: Config, run: Run, failure: BaseException) -> GcbenchError:
    """Return what went wrong first in any worker, as an error of this process."""
    found = []
    for rank in range(config.workers):
        path = _error_file(run.folder, rank)
        with suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
            path.unlink()
    # A worker that fails by itself says so in our words; its peers only see the connection break.
    found.sort(key=lambda error: (not error["known"], error["time"]))
    if found and found[0]["exit_code"] == Interrupted.exit_code:
        return Interrupted(found[0]["message"])
    if not found and not isinstance(failure, Exception | SystemExit):
        return Interrupted("stopped by the user")
    if not found:
        return GcbenchError(f"a worker process died without a word ({failure!s:.200})")
    error = UsageError if found[0]["exit_code"] == UsageError.exit_code else GcbenchError
    result = error(found[0]["message"])
    result.add_note(found[0]["trace"])
    return result


ENGINES = {"simulate": simulate, "spawn": spawn, "torchrun": torchrun}
