"""How a suite chooses the learning rate of each method: one rule and one budget for all.

Rates of a ladder are tried in runs of their own, trials, and the rate with the best result on the
validation examples is taken; the test split is never evaluated. First all rates of `start` are
tried; then, while the best rate is the lowest or the highest tried, the next one of the ladder on
that side, at most `extend` times. Of equal results the lower rate wins; a diverged run is the
worst. A trial has as many steps as the runs whose rate is chosen, unless the rule has `steps`: a
rate that is best in short runs may be too high for long ones.
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
        *("schedule", "schedule_power", "schedule_steps", "schedule_gamma", "warmup"),
    }
)
"""Settings of which a method may need other values than its baseline (signs need a small learning
rate): where no baseline has a row's values, the best of the other baselines is taken, and the table
marks it."""


class Trial(NamedTuple):
    """What distinguishes one trial of a configuration from another."""

    lr: float
    steps: int


class Choice(NamedTuple):
    """What follows from the trials so far: the rate to take, or the trial to make next."""

    lr: float | None
    """The chosen rate; None while another trial is to be made."""
    trial: Trial | None
    """The next trial; None once a rate is chosen."""
    at_edge: bool = False
    """Whether the chosen rate is the lowest or highest tried: a better one may lie beyond."""


class Tune(BaseModel):
    """The rule of a suite, as in its file: `seed` is that of all trials."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: Annotated[int, Field(ge=1)] | None = None
    """Steps of a trial; None: as many as those of the run whose rate is chosen."""
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

    def trial(self, config: Config, trial: Trial) -> Config:
        """Return the run of a trial for `config`: with the rule's seed, without a test.

        Raises:
            UsageError: the config holds no examples out, on which the trial could be evaluated.
        """
        if not config.holdout:
            raise UsageError("tune: the suite's config needs holdout: the test split never chooses")
        changes: dict[str, Any] = {
            "lr": trial.lr,
            "steps": trial.steps,
            "seed": self.seed,
            "test": False,
            "eval_every": 0,
        }
        return Config.make({**config.model_dump(exclude={"task_version"}), **changes})

    def tries(self, summary: Mapping[str, Any]) -> bool:
        """Return whether a run without a test may be a trial of this rule, by its summary."""
        return summary["seed"] == self.seed and self.steps in (None, summary["steps"])

    def choose(self, tried: Mapping[Trial, float], steps: int) -> Choice:
        """Return the rate to take, or the trial to make next.

        `tried` maps a trial to its result on the validation examples: higher is better, -inf where
        the run diverged. `steps`: of the runs whose rate is chosen.
        """
        long = self.steps or steps
        for lr in self.start:
            if Trial(lr, long) not in tried:
                return Choice(None, Trial(lr, long))
        rungs = [lr for lr in self.ladder if Trial(lr, long) in tried]
        best = min(rungs, key=lambda lr: (-tried[Trial(lr, long)], lr))
        if (beyond := self._beyond(best, rungs)) is not None:
            return Choice(None, Trial(beyond, long))
        return Choice(best, None, best in (rungs[0], rungs[-1]))

    def _beyond(self, best: float, rungs: Sequence[float]) -> float | None:
        """Return the rate to try next because the best of all rates tried is at their edge.

        `rungs`: these rates in order. None if it is not, or if the ladder or `extend` ends there.
        """
        if best not in (rungs[0], rungs[-1]) or len(rungs) >= len(self.start) + self.extend:
            return None
        place = self.ladder.index(best) + (-1 if best == rungs[0] else 1)
        return self.ladder[place] if 0 <= place < len(self.ladder) else None


def quality(summary: Mapping[str, Any]) -> float:
    """Return a trial's validation accuracy, minus its validation loss if the task has none.

    -inf if it diverged.
    """
    if summary.get("failed") or summary.get("validation_loss") is None:
        return -math.inf
    accuracy = summary.get("validation_accuracy")
    return float(-summary["validation_loss"] if accuracy is None else accuracy)
