"""How a suite chooses the learning rate of each method: one rule and one budget for all.

Rates of a ladder are tried in short runs, trials, and the rate with the best result on the
validation examples is taken; the test split is never evaluated. First all rates of `start` are
tried; then, while the best rate is the lowest or the highest tried, the next one of the ladder on
that side, at most `extend` times. Of equal results the lower rate wins; a diverged run is the
worst.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gcbench.core.errors import UsageError
from gcbench.training.configuration import Config

FREE_OF_TRIALS = ("lr", "test")
"""Settings, besides suites.FREE, in which a trial differs from the run whose rate it chooses."""
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


TUNED_KEYS = frozenset(
    {
        *("optimizer", "lr", "momentum", "nesterov", "betas", "eps", "weight_decay", "decay"),
        *("schedule", "schedule_power", "schedule_steps", "schedule_gamma"),
    }
)
"""Settings of which a method may need other values than its baseline (signs need a small learning
rate): where no baseline has a row's values, the best of the other baselines is taken, and the table
marks it."""


class Choice(NamedTuple):
    """What follows from the trials so far: the rate to take, or the one to try next."""

    lr: float | None
    """The chosen rate; None while another one is to be tried."""
    trial: float | None
    """The rate to try next; None once a rate is chosen."""
    at_edge: bool = False
    """Whether the chosen rate is the lowest or highest tried: a better one may lie beyond."""


class Tune(BaseModel):
    """The rule of a suite, as in its file: `steps` and `seed` are those of the trials."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0)]
    ladder: list[Rate] = Field(min_length=2)
    start: list[Rate] = Field(min_length=1)
    extend: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _start_is_on_the_ladder(self) -> Tune:
        if any(a >= b for a, b in pairwise(self.ladder)):
            raise ValueError(f"ladder {self.ladder}: rates in increasing order expected")
        self.check(self.start)
        return self

    def check(self, start: Sequence[float]) -> None:
        """Raise ValueError unless `start` has neighbouring rates of the ladder, in order."""
        first = self.ladder.index(start[0]) if start and start[0] in self.ladder else -1
        if first < 0 or self.ladder[first : first + len(start)] != list(start):
            raise ValueError(
                f"start {list(start)}: neighbours on the ladder {self.ladder} expected"
            )

    def trial(self, config: Config, lr: float) -> Config:
        """Return the trial of a rate for `config`: with the rule's steps and seed, without a test.

        Raises:
            UsageError: the config holds no examples out, on which the trial could be evaluated.
        """
        if not config.holdout:
            raise UsageError("tune: the suite's config needs holdout: the test split never chooses")
        changes: dict[str, Any] = {
            "lr": lr,
            "steps": self.steps,
            "seed": self.seed,
            "test": False,
            "eval_every": 0,
        }
        return Config.make({**config.model_dump(exclude={"task_version"}), **changes})

    def tries(self, summary: Mapping[str, Any]) -> bool:
        """Return whether a run is a trial of this rule, by its summary."""
        return (summary["steps"], summary["seed"]) == (self.steps, self.seed)

    def choose(self, tried: Mapping[float, float], start: Sequence[float] | None = None) -> Choice:
        """Return the rate to take, or to try next.

        `tried` maps a rate to its result on the validation examples: higher is better, -inf where
        the run diverged. `start` replaces the rule's own.
        """
        start = self.start if start is None else start
        for lr in start:
            if lr not in tried:
                return Choice(None, lr)
        rungs = [lr for lr in self.ladder if lr in tried]
        best = min(rungs, key=lambda lr: (-tried[lr], lr))
        place = self.ladder.index(best)
        at_edge = best in (rungs[0], rungs[-1])
        if at_edge and len(rungs) < len(start) + self.extend:
            beyond = place - 1 if best == rungs[0] else place + 1
            if 0 <= beyond < len(self.ladder):
                return Choice(None, self.ladder[beyond])
        return Choice(best, None, at_edge)


def quality(summary: Mapping[str, Any]) -> float:
    """Return a trial's validation accuracy, minus its validation loss if the task has none.

    -inf if it diverged.
    """
    if summary.get("failed") or summary.get("validation_loss") is None:
        return -math.inf
    accuracy = summary.get("validation_accuracy")
    return float(-summary["validation_loss"] if accuracy is None else accuracy)
