"""Accuracy that methods lose, from rows of runs made by `gcbench help protocol`.

A run counts if it was made for a suite, if validation examples chose its settings (it held them
out, or its suite's trials did), and if it evaluated the test split only after its last step. A row
counts if at least `LEAST_SEEDS` of its seeds are also in the uncompressed row of equal budget, or
diverged. Learning rates, and other settings that are tuned, may differ only if trials chose both.
A row does not count if the suite's trials chose other settings for the method, or while they have
not chosen those of the uncompressed row. While they have not chosen the method's (an open row), it
counts for the method and not against it. The loss is the accuracy of `none` minus that of the
method (or its test loss minus that of `none`), the mean over paired seeds with the 95 % interval of
Student's t.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gcbench.core import registry
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.report import compare, suite_match
from gcbench.report.compare import ComparisonRow
from gcbench.report.suite_match import Beside
from gcbench.results import reader
from gcbench.results.reader import Run
from gcbench.results.settings import METHOD_KEYS
from gcbench.results.suites import per_suite
from gcbench.stats.seeds import BASELINE
from gcbench.training import suites

LEAST_SEEDS = 3
FITS, UNCLEAR, LOSES = "fits", "unclear", "loses too much"
OPEN, REJECTED = "open", "rejected"
"""What trials say about settings that do not count."""
VERDICTS = (FITS, UNCLEAR, LOSES)
"""From the best to the worst."""


@dataclass(frozen=True)
class Tolerance:
    """How large a loss is acceptable."""

    accuracy: float
    """Loss of accuracy, a fraction of 1."""
    loss: float
    """Increase of the test loss, for a task without an accuracy."""


def count_text(number: float) -> str:
    """Return a large number in a few characters: 1068298 is "1.07M"."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{number:,.0f}"


def _times_text(factor: float) -> str:
    """Return a factor in two digits: "24 times", "0.3 times"."""
    return f"{float(f'{factor:.2g}'):,g} times" if factor >= 10 else f"{factor:.2g} times"


@dataclass(frozen=True)
class Evidence:
    """One row that counts as evidence."""

    row: compare.ComparisonRow
    suite: str
    """The suite for which its runs were made, as name/version."""
    rate: str | None
    """How the learning rate was chosen: see `compare.ComparisonRow.rate`."""
    open: bool = False
    """Whether trials of its settings are missing: with better ones it may lose less, not more."""

    @property
    def lost(self) -> tuple[float, float, float] | None:
        """Mean, lower and upper limit of the loss; None if too few seeds finished."""
        middle, interval = self.row.difference, self.row.interval
        if middle is None or interval is None:
            return None
        if self.row.metric == "accuracy":
            return -middle, -interval[1], -interval[0]
        return middle, *interval

    @property
    def seeds(self) -> int:
        """Number of seeds compared, including those that diverged."""
        return self.row.pairs + len(self.row.failed)

    def judge(self, tolerance: Tolerance) -> str:
        """Return whether the interval lies within the tolerance, beyond it, or on both sides.

        A row whose settings are open does not lose: that is unclear.
        """
        allowed = tolerance.accuracy if self.row.metric == "accuracy" else tolerance.loss
        worse = UNCLEAR if self.open else LOSES
        if self.row.failed or self.lost is None:
            return worse
        _, low, high = self.lost
        return FITS if high <= allowed else worse if low > allowed else UNCLEAR

    def text(self, tolerance: Tolerance) -> str:
        """Return the result as text: the loss with its interval, or the loss that is excluded."""
        if self.row.failed or self.lost is None:
            return f"diverged in {len(self.row.failed)} of {self.seeds} seeds"
        points = self.row.metric == "accuracy"
        scale = 100.0 if points else 1.0

        def number(value: float) -> str:
            value = scale * value + 0.0  # no -0
            return f"{value:.2g}" if abs(value) < 10 else f"{value:.3g}"

        middle, low, high = self.lost
        loses = f"{number(middle)} [{number(low)}, {number(high)}]"
        gains = f"{number(-middle)} [{number(-high)}, {number(-low)}]"
        loses = f"loses {loses} points" if points else f"test loss {loses} higher"
        gains = f"gains {gains} points" if points else f"test loss {gains} lower"
        if low > 0:
            return f"{loses}, settings open" if self.open else loses
        if high < 0:
            return gains
        if self.judge(tolerance) == FITS:
            most = number(high)
            return f"no loss above {most} points" if points else f"test loss at most {most} higher"
        return gains if middle < 0 else loses

    @property
    def setting(self) -> str:
        """What was trained: network, task, size, budget, optimizer, seeds."""
        first, config = self.row.first, self.row.runs[0].config
        network = (config.get("task_options") or {}).get("network")
        size = "" if first.params is None else f"{count_text(first.params)} parameters, "
        optimizer = config.get("optimizer") or ""
        if momentum := config.get("momentum"):
            optimizer += f" with momentum {momentum:g}"
        elif self.without_momentum:
            optimizer += " without momentum"
        return (
            f"{f'{network} on ' if network else ''}{first.task}, {size}{first.steps:,} steps of "
            f"{first.batch}, {first.workers} workers, {optimizer}{', ' * bool(optimizer)}"
            f"{self.seeds} seeds"
        )

    @property
    def without_momentum(self) -> bool:
        """Whether plain SGD applied the updates, without the momentum that it could have."""
        config = self.row.runs[0].config
        return config.get("optimizer") == "sgd" and config.get("momentum") == 0

    def elsewhere(self, tolerance: Tolerance) -> str:
        """Return what the row shows about a model that reads other inputs, as text."""
        first, optimizer = self.row.first, self.row.runs[0].config.get("optimizer")
        under = f" under {optimizer}" if optimizer else ""
        return f"not known: only {first.task}{under} ({self.text(tolerance)})"

    @property
    def inputs(self) -> str:
        """What its task's model reads (`Task.inputs`); "" for a task that is not installed."""
        try:
            return registry.task_class(self.row.first.task).inputs
        except GcbenchError:
            return ""

    def distance(self, numel: int, examples: int | None, workers: int) -> str:
        """Return how a job compares with what was trained, as text.

        `numel`: parameters of the model; `examples`: examples per step, all workers together.
        """
        first, parts = self.row.first, list[str]()
        if first.params:
            same = 0.95 < numel / first.params < 1.05
            parts.append(
                f"{'1 times' if same else _times_text(numel / first.params)} the parameters"
            )
        if examples is not None:
            parts.append(f"{_times_text(examples / first.batch)} the examples per step")
        parts.append(f"{_times_text(workers / first.workers)} the workers")
        return f"your job has {', '.join(parts)}; steps and optimizer may differ, too"


class Split(NamedTuple):
    """Rows of a method, split by whether their task reads the same inputs as the model."""

    near: Sequence[Evidence]
    """Rows that decide; none if all are of tasks with other inputs."""
    far: Sequence[Evidence]
    """Rows of tasks with other inputs, which only warn."""


def nearest(rows: Sequence[Evidence], inputs: str) -> Split:
    """Return the rows whose task reads the same inputs as a model, and the others.

    `inputs`: what the model reads, as `Task.inputs`. Without a row of the same kind, rows of
    unknown inputs count; for a model of unknown inputs all rows count.
    """

    def farness(one: Evidence) -> int:
        return 1 if not (inputs and one.inputs) else 0 if one.inputs == inputs else 2

    least = min(1, min(map(farness, rows), default=0))
    return Split(
        [one for one in rows if farness(one) == least],
        [one for one in rows if farness(one) != least],
    )


@dataclass(frozen=True)
class Gathered:
    """The evidence in the given folders and files."""

    rows: Sequence[Evidence]
    read: int
    """Number of runs that were read."""
    excluded: Mapping[str, int]
    """Reason -> number of runs that do not count."""

    def summary(self, paths: Sequence[str]) -> str:
        """Return a sentence on what was read, and what does not count, with reasons."""
        text = f"Read {self.read:,} runs from {', '.join(paths)}."
        if self.excluded:
            reasons = "; ".join(f"{count:,} {reason}" for reason, count in self.excluded.items())
            text += f" Not evidence: {reasons}."
        return text


def gather(paths: Sequence[Path]) -> Gathered:
    """Return the evidence in `paths`: folders and files that `reader.load` reads.

    Raises:
        UsageError, GcbenchError: see `reader.load`.
    """
    if not paths:
        return Gathered([], 0, {})
    runs = reader.load(paths)
    excluded: Counter[str] = Counter()
    groups: dict[str, list[Run]] = {}
    current = [run for group in per_suite(runs, {}).values() for run in group]
    if older := len(runs) - len(current):
        excluded["of another version of their suite"] = older
    for run in current:
        groups.setdefault(run.suite, []).append(run)
    if others := groups.pop("", []):
        excluded["made for no suite"] = len(others)
    rows = [each for name in groups for each in _of_suite(name, groups, excluded)]
    return Gathered(rows, len(runs), excluded)


def _of_suite(
    name: str, groups: Mapping[str, Sequence[Run]], excluded: Counter[str]
) -> Iterator[Evidence]:
    """Yield the evidence in the runs that were made for a suite, given the runs of all suites.

    Runs of other suites that also belong to this one, such as `none`, serve as its baselines and
    trials; whether they are evidence themselves is decided in their own suite. Copies of this
    suite's runs do not count again. `excluded` counts the runs that are not evidence, by reason.

    The rule of a suite that is not built in is unknown: an uncompressed row with another learning
    rate is a baseline only if the suite has trials of `none` and of the method.
    """
    runs, selected, tried = groups[name], [], set[str]()
    plain = name.partition("/")[0]
    suite = suites.load(plain) if plain in suites.names() else None
    chosen_by_trials = suite is not None and suite.tune is not None and suite.tune.holdout
    for run in runs:
        if run.is_trial:
            excluded["trials of learning rates"] += 1
            tried.add(run.summary.compressor_name)
        elif not (run.config.get("holdout") or chosen_by_trials):
            excluded["without a holdout"] += 1
        else:
            selected.append(run)
    beside, choices, preferred = None, frozenset[str](), frozenset[str]()
    if suite is not None:
        choices = suite.choices
        with suppress(UsageError):  # none of the runs is of an entry
            beside = suite_match.beside(suite, [run for group in groups.values() for run in group])
    if beside is not None:
        preferred = beside.best
        present = {(run.method, run.summary.seed) for run in selected}
        others = [r for r in beside.runs if (r.method, r.summary.seed) not in present]
        selected += [r for r in others if r.suite != name and r.config.get("holdout")]
    rows = compare.rows(selected, choices=choices, preferred=preferred)
    states = {id(row): _state(beside, row) for row in rows}
    unknown = [row.context for row in rows if row.is_baseline and states[id(row)] == OPEN]
    for row in rows:
        if row.is_baseline or row.runs[0].suite != name:
            continue
        if row.context in unknown:
            excluded["whose settings trials have not chosen yet"] += len(row.runs)
        elif states[id(row)] == REJECTED:
            excluded["whose settings trials rejected"] += len(row.runs)
        elif not row.baseline_n or (
            row.tuned and not {BASELINE, row.first.compressor_name} <= tried
        ):
            excluded["without an uncompressed row of equal budget"] += len(row.runs)
        elif row.pairs + len(row.failed) < LEAST_SEEDS:
            excluded[f"with fewer than {LEAST_SEEDS} seeds in common with `none`"] += len(row.runs)
        else:
            rate = None if beside is None else beside.rate(row)
            yield Evidence(row, name, rate, states[id(row)] == OPEN)


def _state(beside: Beside | None, row: ComparisonRow) -> str | None:
    """Return whether trials rejected the settings of a row, or have not decided on them yet.

    Every alternative of a method must be decided. Its row as published also counts if trials chose
    an alternative that is another method, with other fields or another memory.
    """
    point = None if beside is None else beside.points.get(row.runs[0].method)
    if beside is None or point is None or point.tune is None:
        return None
    choice = beside.choices.get((point.group, row.first.steps))
    if choice is None or beside.rate(row) == OPEN:
        return OPEN
    if choice.identity == point.identity:
        return None
    same = all(choice.resolved.get(k) == point.resolved.get(k) for k in METHOD_KEYS)
    return REJECTED if same or not point.as_published else None
