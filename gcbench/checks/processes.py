"""Compare the exchanges of three real processes with simulated ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from gcbench.checks import calls, inputs, oracle
from gcbench.checks.exchanges import SHAPES
from gcbench.checks.outcome import Outcome
from gcbench.core import memory, registry
from gcbench.core.clock import Clock
from gcbench.core.compressor import Compressor
from gcbench.core.errors import GcbenchError, Interrupted
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.world import Link, SimulatedWorld, World
from gcbench.training import launch
from gcbench.training.rank import Rank

PROCESSES = 3


def carried_by(method: Compressor, name: str) -> memory.Memory:
    """Return the memory of this name to check beside a method; for "" the method's memory."""
    return memory.of(method) if name in ("", method.memory) else memory.make(name, {})


def digests(method: Compressor, world: World | None = None, carried: str = "") -> dict[str, str]:
    """Return `digest` by collective, or what the method raised, under "error".

    `carried`: the name of the memory; empty: the method's own.
    """
    try:
        beside, segments = carried_by(method, carried), calls.segments_of(method, SHAPES)
        lanes = [
            Lane(method, collective, 0, segments, beside, rule=method.rule)
            for collective in method.legal_collectives()
        ]
        return {lane.collective: digest(lane, world) for lane in lanes}
    except Exception as error:  # reported as a row
        return {"error": f"{type(error).__name__}: {error}"}


def digest(lane: Lane, world: World | None) -> str:
    """Return the SHA-256 of means, memories and traffic of three workers in three steps.

    `world`: that of this worker's process group, whose traffic is reset; without it all workers are
    simulated.
    """
    here = world or SimulatedWorld(PROCESSES, torch.device("cpu"), Link(10, 50), 1, 1)
    running = Exchange(here, [lane], 7, Clock(here.device))
    result = hashlib.sha256()
    for step in range(3):
        first = 100 * step + 5000  # no earlier check uses these
        xs = [inputs.normal(lane.segments.numel, first + rank) for rank in here.ranks]
        result.update(oracle.raw(running.mean(xs, step, lr=1.0 / (1 + step))))
    for buffer in sorted(running.workers[0][0]):
        for tensor in here.collect([worker[0][buffer] for worker in running.workers]):
            result.update(oracle.raw(tensor))
    result.update(repr(here.collect_traffic()).encode())
    for traffic in here.traffic:  # the next collective counts from zero
        traffic.payload_up = traffic.payload_down = traffic.wire = 0.0
    return result.hexdigest()


def _worker(
    member: Rank, methods: Sequence[tuple[str, Mapping[str, Any]]], carried: str
) -> list[dict[str, str]]:
    """Run one of three processes."""
    from gcbench.training import engines

    world = engines.join(member, "cpu", 1, at_most=timedelta(minutes=2))
    try:
        return [
            digests(registry.compressor(name, **options), world, carried)
            for name, options in methods
        ]
    finally:
        world.close()


def in_processes(
    methods: Sequence[tuple[str, Mapping[str, Any]]], carried: str = ""
) -> list[dict[str, str]]:
    """Return `digests` of the methods (name, options), from three real processes.

    If the processes do not agree, the dict of the method has an "error".

    Raises:
        GcbenchError: a process died.
        Interrupted: the user asked to stop.
    """
    try:
        replicas = launch.in_processes(PROCESSES, 1, _worker, (list(methods), carried))
    except Interrupted:
        raise
    except GcbenchError as failure:
        raise GcbenchError(f"{failure}; --no-processes leaves the processes out") from failure
    apart = {"error": "the replicas of three processes differ"}
    return [first if first == a == b else apart for first, a, b in zip(*replicas, strict=True)]


def compared(here: Mapping[str, str], there: Mapping[str, str]) -> Outcome:
    """Return the row of the table that compares simulation and processes."""
    name, bound = "simulation = 3 processes", "the same bits"
    for result in (here, there):
        if "error" in result:
            return Outcome(name, "-", bound, "fails", result["error"])
    wrong = [collective for collective in here if here[collective] != there[collective]]
    if wrong:
        return Outcome(name, f"{', '.join(wrong)} differ", bound, "fails")
    return Outcome(name, f"{len(here)} collectives equal", bound, "holds")
