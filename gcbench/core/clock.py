"""Where the time of a step goes: seconds by phase, of one worker."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from gcbench.core.schema import PHASES

T = TypeVar("T")


class Clock:
    """Adds up each phase's seconds over a step, and keeps every step's.

    A phase that several simulated workers pass counts with their mean: the time that one worker
    spends. On a GPU the device is synchronized at the edges of every phase.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[list[float]] = []
        self._now = dict.fromkeys(PHASES, 0.0)
        self._began = time.perf_counter()

    def read(self) -> float:
        """Return seconds on a monotonic clock, after the device has caught up."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block that this process runs once for all of its workers."""
        start = self.read()
        yield
        self._now[name] += self.read() - start

    def timed(self, call: Callable[[int], T]) -> Callable[[int], tuple[T, float]]:
        """Wrap a per-worker function so that it also returns its seconds."""

        def run(rank: int) -> tuple[T, float]:
            start = self.read()
            value = call(rank)
            return value, self.read() - start

        return run

    def workers(self, name: str, results: Sequence[tuple[T, float]]) -> list[T]:
        """Book a phase that each local worker passed, and return the workers' values."""
        self._now[name] += statistics.fmean(seconds for _, seconds in results)
        return [value for value, _ in results]

    def add(self, name: str, seconds: float) -> None:
        """Book seconds of one worker measured elsewhere."""
        self._now[name] += seconds

    def start_step(self) -> None:
        """Begin a step."""
        self._now = dict.fromkeys(PHASES, 0.0)
        self._began = self.read()

    def end_step(self) -> None:
        """Keep the step's phases and its wall-clock seconds, in that order."""
        self.steps.append([*self._now.values(), self.read() - self._began])

    def medians(self, together: int = 1) -> dict[str, float]:
        """Return the median seconds of each phase, and of the whole `step`.

        `together`: so many steps in a row count as one, their mean, where not every step has every
        phase; a shorter rest is left out unless there is nothing else.
        """
        names = (*PHASES, "step")
        if not self.steps:
            return dict.fromkeys(names, 0.0)
        rounds = [self.steps[i : i + together] for i in range(0, len(self.steps), together)]
        whole = [own for own in rounds if len(own) == together] or rounds
        means = [[statistics.fmean(column) for column in zip(*own, strict=True)] for own in whole]
        columns = zip(*means, strict=True)
        return dict(zip(names, map(statistics.median, columns), strict=True))


class Totals(Clock):
    """Adds up phases over all steps, without waiting for the device: for somebody else's job."""

    def read(self) -> float:
        """Return seconds on a monotonic clock."""
        return time.perf_counter()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the first step."""
        return dict(self._now)
