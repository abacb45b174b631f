"""Timing of the phases of a step: seconds by phase, of one worker."""

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
    """Adds up the seconds of each phase within a step, and keeps those of every step.

    Where several simulated workers run a phase, their mean counts: the time of one worker. On a GPU
    the device is synchronized at the beginning and the end of every phase.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[list[float]] = []
        self._now = dict.fromkeys(PHASES, 0.0)
        self._began = time.perf_counter()

    def read(self) -> float:
        """Return seconds on a monotonic clock, after all work queued on the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a with statement that this process runs once for all of its workers."""
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
        """Add the mean of the local workers' seconds to phase `name`, and return their values.

        `results`: what the functions wrapped by `timed` returned.
        """
        self._now[name] += statistics.fmean(seconds for _, seconds in results)
        return [value for value, _ in results]

    def add(self, name: str, seconds: float) -> None:
        """Add seconds of one worker, measured elsewhere, to phase `name`."""
        self._now[name] += seconds

    def start_step(self) -> None:
        """Begin a step."""
        self._now = dict.fromkeys(PHASES, 0.0)
        self._began = self.read()

    def end_step(self) -> None:
        """Keep the step's phases and its wall-clock seconds, in that order."""
        self.steps.append([*self._now.values(), self.read() - self._began])

    def medians(self, together: int = 1) -> dict[str, float]:
        """Return the median seconds of each phase and of the whole step (key "step").

        `together`: the number of consecutive steps that are averaged before the median is taken,
        for runs in which not every step has every phase (local steps). A shorter group at the end
        is left out unless it is the only one.
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
    """Adds up phases over all steps, and never waits for the device: used in a user's own job."""

    def read(self) -> float:
        """Return seconds on a monotonic clock."""
        return time.perf_counter()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the first step."""
        return dict(self._now)
