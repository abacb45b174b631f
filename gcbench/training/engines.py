"""The engines of a run: its workers in this process, in local processes, or under torchrun.

Local processes communicate only over loopback, see `gcbench.training.launch`. The ports that
torchrun opens are torch's, and the user has to protect them. Its agent has a TCP store without a
password, which listens on every interface of the machine unless `--standalone` or `--rdzv-endpoint
localhost:...` is given. With the c10d rendezvous the agents exchange pickled state through it, so
anyone who can reach the port can execute code as the user. Each worker opens a port for the
connections of gloo (or NCCL), on the interface of the host's name or of GLOO_SOCKET_IFNAME
(NCCL_SOCKET_IFNAME), with neither password nor encryption. Run such jobs only on a trusted network.
gcbench itself sends only JSON and tensors over these connections, and never unpickles.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from gcbench.core.errors import (
    DivergedError,
    GcbenchError,
    Interrupted,
    PeerLostError,
    UsageError,
)
from gcbench.core.world import (
    ROLL_CALL_SECONDS,
    DistributedWorld,
    Link,
    SimulatedWorld,
    World,
)
from gcbench.training import captures, configuration, launch, preflight, rank
from gcbench.training.configuration import Config
from gcbench.training.ddp_trainer import DdpTrainer
from gcbench.training.rank import Rank
from gcbench.training.store import Run
from gcbench.training.train import Options, Trainer

DIVERGED = "gcbench/diverged"
"""Key of torchrun's store with the error of a worker whose gradient is not finite."""


@contextmanager
def _stop_on_signals(*, managed: bool) -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a flag, which the yielded function returns.

    A second signal has its usual effect, except in a `managed` worker: torchrun repeats the
    terminal's signal, and the launcher decides when to kill workers. An ignored signal (nohup, or
    a script's background job) stays ignored, except SIGTERM in a `managed` worker, by which the
    launcher asks it to stop.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked: list[int] = []  # an Event's lock would block a signal that interrupts its handler
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if before[signal.SIGINT] == signal.SIG_IGN:
        del before[signal.SIGINT]
    if before[signal.SIGTERM] == signal.SIG_IGN and not managed:
        del before[signal.SIGTERM]
    try:

        def handle(number: int, frame: object) -> None:
            asked.append(number)
            if not managed:
                signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, handle)
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Use torch.optim without importing torch.compile's front end, torch._dynamo.

    Methods of `torch.optim.Optimizer` import it at their first call to disable compilation, which
    takes as long as importing torch. Nothing is compiled here, so they are marked as disabled in
    advance (torch/_compile.py, tested with torch 2.13). In a torch version without this internal
    attribute, only the time is lost.
    """
    mark = "__dynamo_disable"
    plain = [
        getattr(method, "__wrapped__", None) for method in vars(torch.optim.Optimizer).values()
    ]
    unmarked = [method for method in plain if method is not None and not hasattr(method, mark)]
    for method in unmarked:
        setattr(method, mark, method)
    try:
        yield
    finally:
        for method in unmarked:
            delattr(method, mark)


def _fit(config: Config, world: World, run: Run, options: Options, *, managed: bool) -> None:
    """Train the workers of this process; worker 0's process finishes the run.

    Raises:
        Interrupted: the user interrupted the run; after the last step it is finished nevertheless.
        GcbenchError: a step failed.
    """
    try:
        with _stop_on_signals(managed=managed) as stop, without_compiler():
            kind = DdpTrainer if config.engine == "ddp" else Trainer
            trainer = kind(config, world, run, options)
            summary = trainer.fit(stop)
    except GcbenchError as error:
        raise _cause(world, error) from error.__cause__
    finally:
        world.close()
    if not trainer.leads:
        return
    finished = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    summary["provenance"] = {**run.read_provenance(), "finished": finished}
    run.finish(summary)
    if not managed and stop():
        raise Interrupted("stopped after the last step; the run is finished")


def _cause(world: World, error: GcbenchError) -> GcbenchError:
    """Return the error that ended a run: that of another worker, if it diverged there.

    Worker 0 records a run as diverged. Under torchrun it reads the error in the store; otherwise
    the launcher compares the workers' reports.
    """
    if not isinstance(world, DistributedWorld) or world.watched:
        return error
    with suppress(RuntimeError):  # no worker diverged, or the store is gone
        if isinstance(error, DivergedError):
            world.store.set(DIVERGED, json.dumps([str(error), error.step]))
        elif isinstance(error, PeerLostError):
            world.store.wait([DIVERGED], timedelta(seconds=ROLL_CALL_SECONDS))
            return DivergedError(*json.loads(world.store.get(DIVERGED)))
    return error


def simulate(config: Config, run: Run, options: Options) -> None:
    """Run all workers in this process."""
    device = torch.device(config.device)
    threads = options.threads or configuration.threads_per_worker(config)
    parallel = 1 if device.type == "cuda" else max(1, configuration.cores() // threads)
    link = Link(config.link_gbit, config.link_latency_us)
    world = SimulatedWorld(config.workers, device, link, threads, min(parallel, config.workers))
    _fit(config, world, run, options, managed=False)


def join(
    member: Rank, kind: str, threads: int, at_most: timedelta | None = None
) -> DistributedWorld:
    """Join the process group of a job as one worker, on a device of type `kind`, "cpu" or "cuda".

    `at_most`: an upper limit of the timeout of collectives.

    Raises:
        UsageError: the timeout in the environment is invalid.
        PeerLostError: not all workers joined within the timeout, or torchrun's agent has ended.
    """
    timeout = launch.collective_timeout()
    timeout = timeout if at_most is None else min(timeout, at_most)
    device = torch.device(kind)
    if device.type == "cuda":
        device = torch.device("cuda", member.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(threads)
    backend = "nccl" if device.type == "cuda" else "gloo"
    place: dict[str, Any] = {"rank": member.rank, "world_size": member.size, "timeout": timeout}
    try:
        store = _store(member, timeout)
        dist.init_process_group(backend, store=store, **place)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise PeerLostError(
            f"worker {member.rank}: the {member.size} workers of this job did not connect within "
            f"{timeout.total_seconds():.0f} s ({launch.TIMEOUT}): {reason:.200}"
        ) from error
    return DistributedWorld(device, store, timeout, watched=member.folder is not None)


def _store(member: Rank, timeout: timedelta) -> Store:
    """Return the key-value store in which the workers of this job rendezvous."""
    if member.folder is not None:
        store: Store = FileStore(str(member.folder / "store"), member.size)
        store.set_timeout(timeout)
        return store
    _require_agent(member)
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return fresh(store, member, timeout)


def _require_agent(member: Rank) -> None:
    """Raise PeerLostError now if torchrun's agent has ended; torch would wait for the timeout."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(address, timeout=30).close()
    except OSError as error:
        raise PeerLostError(
            f"worker {member.rank}: torchrun's agent at {address[0]}:{address[1]} has ended: "
            f"{error.strerror or error}"
        ) from error


def fresh(store: Store, member: Rank, timeout: timedelta) -> Store:
    """Return a part of torchrun's store that no earlier attempt of the job has written to.

    After a restart (`--max-restarts`) the store still has the keys of the ended workers, and a
    process group would wait for those workers. torch's restart count cannot identify an attempt,
    because it differs between the agents of several machines. So worker 0 draws a random name,
    waits until every other worker has replied to it, and confirms each reply: every worker then
    knows that the name belongs to a running worker 0.

    Raises:
        PeerLostError: worker 0 did not reply in time.
        torch.distributed.DistStoreError: on worker 0, another worker did not reply in time.
    """
    token = secrets.token_hex(8)
    if member.rank == 0:
        store.set("gcbench/attempt", token)
        for rank in range(1, member.size):
            reply = store.get(f"gcbench/{token}/{rank}").decode()  # waits for it
            store.set(f"gcbench/{token}/{rank}/{reply}", "")
        return PrefixStore(token, store)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        attempt = store.get("gcbench/attempt").decode()
        store.set(f"gcbench/{attempt}/{member.rank}", token)
        if store.check([f"gcbench/{attempt}/{member.rank}/{token}"]):
            return PrefixStore(attempt, store)
        time.sleep(0.01)
    raise PeerLostError(
        f"worker {member.rank}: worker 0 did not connect within {timeout.total_seconds():.0f} s "
        f"({launch.TIMEOUT})"
    )


def check_size(member: Rank, workers: int) -> None:
    """Raise UsageError if torchrun did not start `workers` processes."""
    if member.size != workers:
        raise UsageError(
            f"--workers {workers} under torchrun with {member.size} processes, which are the "
            f"workers: use --workers {member.size}"
        )


def torchrun(config: Config, run: Run, options: Options) -> None:
    """Run one worker of a job that torchrun started.

    Raises:
        UsageError: the number of workers differs between job and config, or torchrun did not start
            this process.
    """
    member = rank.from_torchrun()
    if member is None:
        raise UsageError("engine torchrun: torchrun did not start this process")
    check_size(member, config.workers)
    _be_worker(member, config, run, options)


def refuse(config: Config, error: GcbenchError) -> None:
    """Tell the other workers of torchrun's job why worker 0 does not start a run; else do nothing.

    They wait for worker 0, and would take its next run for this one.
    """
    member = rank.from_torchrun()
    if member is not None and member.size == config.workers:
        with suppress(PeerLostError):
            world = join(member, config.device, 1)
            try:
                world.collect([str(error)])
            finally:
                world.close()


def _be_worker(member: Rank, config: Config, run: Run, options: Options) -> None:
    threads = options.threads or configuration.threads_per_worker(config)
    world = join(member, config.device, threads)
    # Use worker 0's number of threads: it reads that of a resumed run, and the default depends on
    # the machine's cores.
    try:
        first = world.collect([threads])[0]
        if isinstance(first, str):
            raise GcbenchError(first)  # noqa: TRY301 - the group is closed below
        torch.set_num_threads(first)
        preflight.check(world, preflight.facts(config))
    except GcbenchError:
        world.close()
        raise
    _fit(config, world, run, options, managed=True)


def _options_to_json(options: Options) -> dict[str, Any]:
    look, data = options.on_bucket, options.data_dir
    name = None if look is None else launch.name_of(look)
    # `asdict` would copy the object of a bound method.
    return asdict(replace(options, on_bucket=None)) | {
        "data_dir": None if data is None else str(data),
        "on_bucket": name,
    }


def _options_from_json(options: dict[str, Any]) -> Options:
    look, plan, data = options["on_bucket"], options["capture"], options["data_dir"]
    converted = {
        "data_dir": None if data is None else Path(data),
        "on_bucket": None if look is None else launch.named(look),
        "capture": None if plan is None else captures.Plan(tuple(plan["steps"]), plan["layers"]),
        "sinks": tuple(options["sinks"]),
    }
    return Options(**options | converted)


def _train(member: Rank, config_json: str, folder: str, options: dict[str, Any]) -> None:
    config, run = Config.model_validate_json(config_json), Run(Path(folder))
    _check_plugins(config, run)
    _be_worker(member, config, run, _options_from_json(options))


def _check_plugins(config: Config, run: Run) -> None:
    """Refuse to train with a plug-in that was edited since the command loaded and recorded it."""
    loaded = configuration.plugins(config)
    recorded = run.read_provenance().get("plugins") if loaded else None
    for kind, origin in loaded.items():
        if recorded is not None and recorded.get(kind) != origin:
            raise UsageError(
                f"the {kind} ({origin['distribution']}) was edited after this command started: its "
                "worker processes would train with other code than the run records. Run the "
                "command again"
            )


def spawn(config: Config, run: Run, options: Options) -> None:
    """Run every worker in a separate process on this machine.

    Raises:
        GcbenchError: the first error of any worker.
        Interrupted: the user interrupted the run.
    """
    threads = options.threads or configuration.threads_per_worker(config)
    arguments = config.model_dump_json(), str(run.folder), _options_to_json(options)
    launch.in_processes(config.workers, threads, _train, arguments)


def ddp(config: Config, run: Run, options: Options) -> None:
    """Run one DDP worker of torchrun's job, or every worker on this machine without torchrun.

    Raises:
        GcbenchError: see `torchrun` and `spawn`.
    """
    start = torchrun if rank.by_torchrun() else spawn
    start(config, run, options)


ENGINES = {"simulate": simulate, "spawn": spawn, "torchrun": torchrun, "ddp": ddp}
