"""How a suite tunes the settings of each method: one rule and one budget for all methods.

Trials are separate runs with rates of a ladder; the rate with the best result on the validation
examples is chosen, and the test split is never evaluated. First all rates of `start` are tried.
Then, while the best rate is the lowest or highest of the tried rates, the next rate on that side is
tried, at most `extend` times; a single tried rate is both, and the lower side comes first. Of equal
results the lower rate wins; a diverged run is the worst. A trial has as many steps as the tuned
runs, unless the rule has `steps`, because the best rate of short runs may be too high for long
ones.

A method may have alternatives, the combinations of the values of its `factors` (momentum, the
granularity of top-k, ...). The same rule tunes the rate of each alternative, and the alternative
with the best trial is chosen. If the second best is closer than `noise`, the typical difference
between two seeds of one configuration, the best trials of both are repeated with `second_seed`, and
the mean of the two seeds decides. Of equal alternatives the first wins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gcbench.core.errors import UsageError, unknown
from gcbench.training.configuration import Config

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Trial(NamedTuple):
    """The distinguishing settings of a trial of a configuration."""

    lr: float
    steps: int
    repeat: bool = False
    """Whether it has the second seed."""


class Choice(NamedTuple):
    """The result of the trials so far: the chosen rate, or the next trial."""

    lr: float | None
    """The chosen rate; None if another trial is needed."""
    trial: Trial | None
    """The next trial; None once a rate is chosen."""
    at_edge: bool = False
    """Whether the chosen rate is the lowest or highest tried, so that a better one may exist."""


class Decision(NamedTuple):
    """The result of the trials of all alternatives of a method."""

    best: int | None
    """The index of the chosen alternative; None if another trial is needed."""
    rates: Sequence[float]
    """The chosen rate of each alternative, once all are chosen."""
    trial: tuple[int, Trial] | None
    """The index of an alternative and its next trial; None once one is chosen."""


class Tune(BaseModel):
    """The rule of a suite, as in its file; `seed` is for all trials except repeated ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: Annotated[int, Field(ge=1)] | None = None
    """Steps of a trial; None: those of the tuned run."""
    seed: Annotated[int, Field(ge=0)]
    ladder: list[Rate] = Field(min_length=2)
    start: list[Rate] = Field(min_length=1)
    extend: Annotated[int, Field(ge=0)] = 0
    second_seed: Annotated[int, Field(ge=0)] | None = None
    """Seed of repeated trials; None: trials are not repeated."""
    noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Alternatives whose best trials differ by less, in accuracy or nats, are repeated."""
    holdout: Annotated[int, Field(ge=1)] | None = None
    """Validation examples of a trial; None: as many as the run holds out."""
    factors: dict[str, list[dict[str, Any]]] = {}
    """The settings of each value, by name of the factor; `start` replaces the rule's."""

    @model_validator(mode="after")
    def _factors_have_values(self) -> Tune:
        for name, values in self.factors.items():
            if len(values) < 2:
                raise ValueError(f"factor {name!r} has {values}: expected at least two values")
            for value in values:
                if (start := value.get("start")) is not None:
                    self.check(start)
        if self.noise and self.second_seed is None:
            raise ValueError(f"noise {self.noise:g}: add second_seed for repeated trials")
        if self.second_seed == self.seed:
            raise ValueError(f"second_seed {self.second_seed}: expected a seed other than `seed`")
        return self

    def alternatives(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the combinations of the values of these factors, in order.

        Raises:
            ValueError: a factor is unknown, or two factors set the same setting.
        """
        for name in names:
            if name not in self.factors:
                raise ValueError(str(unknown("factor", name, self.factors)))
        combinations = []
        for values in itertools.product(*(self.factors[name] for name in names)):
            pairs = itertools.combinations(values, 2)
            both = {key for one, other in pairs for key in one.keys() & other.keys()}
            if both - {"options", "memory_options", "start"}:
                raise ValueError(f"factors {', '.join(names)}: both set {', '.join(sorted(both))}")
            merged: dict[str, Any] = {}
            for key, value in (item for one in values for item in one.items()):
                merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
            combinations.append(merged)
        return combinations

    @model_validator(mode="after")
    def _start_is_on_the_ladder(self) -> Tune:
        if any(a >= b for a, b in pairwise(self.ladder)):
            raise ValueError(f"ladder {self.ladder}: expected rates in increasing order")
        self.check(self.start)
        return self

    def check(self, start: Sequence[float]) -> None:
        """Raise ValueError unless `start` has consecutive rates of the ladder."""
        first = self.ladder.index(start[0]) if start and start[0] in self.ladder else -1
        if first < 0 or self.ladder[first : first + len(start)] != list(start):
            raise ValueError(f"start {list(start)}: expected consecutive rates of {self.ladder}")

    def trial(self, config: Config, trial: Trial) -> Config:
        """Return the run of a trial for `config`, with the rule's seed and without a test.

        Raises:
            UsageError: the config has no held-out examples to evaluate the trial on.
        """
        if not (self.holdout or config.holdout):
            raise UsageError("tune needs validation examples: add holdout to the suite's config")
        changes: dict[str, Any] = {
            "lr": trial.lr,
            "steps": trial.steps,
            "seed": self.second_seed if trial.repeat else self.seed,
            "holdout": self.holdout or config.holdout,
            "test": False,
            "eval_every": 0,
        }
        return Config.make({**config.model_dump(exclude={"task_version"}), **changes})

    @property
    def free(self) -> frozenset[str]:
        """Settings, in addition to suites.FREE, that differ between a trial and its run."""
        return frozenset({"lr", "test"} | ({"holdout"} if self.holdout else set()))

    def tries(self, summary: Mapping[str, Any]) -> bool:
        """Return whether the summary of a run without a test may be a trial of this rule."""
        seeds = (self.seed,) if self.second_seed is None else (self.seed, self.second_seed)
        holdout = (summary.get("config") or {}).get("holdout")
        return (
            summary["seed"] in seeds
            and self.steps in (None, summary["steps"])
            and self.holdout in (None, holdout)
        )

    def trial_of(self, summary: Mapping[str, Any]) -> Trial:
        """Return the trial of a run for which `tries` is true."""
        repeat = summary["seed"] == self.second_seed
        return Trial(float(summary["config"]["lr"]), summary["steps"], repeat)

    def choose(self, tried: Mapping[Trial, float], steps: int) -> Choice:
        """Return the chosen rate, or the next trial.

        `tried`: the results of trials on the validation examples; higher is better, -inf if the run
        diverged. `steps`: steps of the tuned runs.
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
        """Return the next rate if the best of the tried rates, in order, is at their edge."""
        if len(rungs) >= len(self.start) + self.extend:
            return None
        for edge, step in ((rungs[0], -1), (rungs[-1], 1)):  # a single rate is both
            place = self.ladder.index(best) + step
            if best == edge and 0 <= place < len(self.ladder):
                return self.ladder[place]
        return None


def quality(summary: Mapping[str, Any]) -> float:
    """Return a trial's validation accuracy, minus its validation loss if the task has none.

    -inf if it diverged.
    """
    if summary.get("failed") or summary.get("validation_loss") is None:
        return -math.inf
    accuracy = summary.get("validation_accuracy")
    return float(-summary["validation_loss"] if accuracy is None else accuracy)


def decide_among(
    rules: Sequence[Tune], tried: Sequence[Mapping[Trial, float]], steps: int
) -> Decision:
    """Return the chosen alternative, or the next trial.

    `rules`: the rules of the alternatives, which differ only in `start`. `tried`: the results of
    the trials of each, as for `Tune.choose`.
    """
    rates = []
    for number, (rule, results) in enumerate(zip(rules, tried, strict=True)):
        choice = rule.choose(results, steps)
        if choice.trial is not None:
            return Decision(None, (), (number, choice.trial))
        assert choice.lr is not None, "a choice has a rate or a trial"
        rates.append(choice.lr)
    rule = rules[0]
    trials = [Trial(lr, rule.steps or steps) for lr in rates]
    best = [results[trial] for results, trial in zip(tried, trials, strict=True)]
    first, *others = sorted(range(len(best)), key=lambda number: -best[number])
    if not others or rule.second_seed is None or not best[first] - best[others[0]] < rule.noise:
        return Decision(first, rates, None)
    means = {}
    for number in sorted((first, others[0])):
        again = trials[number]._replace(repeat=True)
        if again not in tried[number]:
            return Decision(None, (), (number, again))
        means[number] = (best[number] + tried[number][again]) / 2
    return Decision(max(means, key=lambda number: means[number]), rates, None)
