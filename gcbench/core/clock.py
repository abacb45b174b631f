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
    """Records the seconds of each phase of every step.

    A phase that several simulated workers run counts with their mean, the time of one worker. A GPU
    is synchronized at the beginning and the end of each phase.
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
        """Time a with block that this process runs once for all its workers."""
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

        `results`: the results of functions wrapped by `timed`.
        """
        self._now[name] += statistics.fmean(seconds for _, seconds in results)
        return [value for value, _ in results]

    def add(self, name: str, seconds: float) -> None:
        """Add one worker's seconds, measured by the caller, to phase `name`."""
        self._now[name] += seconds

    def start_step(self) -> None:
        """Begin a step."""
        self._now = dict.fromkeys(PHASES, 0.0)
        self._began = self.read()

    def end_step(self) -> None:
        """Record the step's phases, then its wall-clock seconds."""
        self.steps.append([*self._now.values(), self.read() - self._began])

    def medians(self, together: int = 1) -> dict[str, float]:
        """Return the median seconds of each phase and of the whole step (key "step").

        `together`: average this many consecutive steps before taking the median, for runs in which
        not every step has every phase (local steps). A shorter last group is ignored unless it is
        the only one.
        """
        names = (*PHASES, "step")
        if not self.steps:
            return dict.fromkeys(names, 0.0)
        rounds = [self.steps[i : i + together] for i in range(0, len(self.steps), together)]
        whole = [group for group in rounds if len(group) == together] or rounds
        means = [[statistics.fmean(column) for column in zip(*rows, strict=True)] for rows in whole]
        columns = zip(*means, strict=True)
        return dict(zip(names, map(statistics.median, columns), strict=True))


class Totals(Clock):
    """Sums phases over all steps without synchronizing the device, for a user's training job."""

    def read(self) -> float:
        """Return seconds on a monotonic clock."""
        return time.perf_counter()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the first step."""
        return dict(self._now)
