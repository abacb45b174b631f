"""Evidence of the accuracy that a method loses: rows of runs made by results/PROTOCOL.md.

Runs count if they were made for a suite, held examples out for validation, and evaluated the test
split only after their last step. A row counts if at least `LEAST_SEEDS` of its seeds are also in
the uncompressed row of equal budget, or diverged; and not while trials that choose its learning
rate, or that of the uncompressed row, are still to be made. What it lost is the accuracy of `none`
minus its own (or its test loss minus that of `none`), mean over paired seeds, with the 95 %
interval of Student's t.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gcbench.core import registry
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.report import compare, suite_match
from gcbench.results import reader
from gcbench.results.reader import Run
from gcbench.results.settings import TUNED_KEYS
from gcbench.results.suites import per_suite
from gcbench.training import suites

LEAST_SEEDS = 3
FITS, UNCLEAR, LOSES = "fits", "unclear", "loses too much"
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
    """Return a large number in few letters: 1068298 is "1.07M"."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{number:,.0f}"


@dataclass(frozen=True)
class Evidence:
    """One row that counts as evidence."""

    row: compare.Row
    suite: str
    """The suite for which its runs were made, as name/version."""
    rate: str | None
    """How the learning rate was chosen: see `compare.Row.rate`."""

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
        """How many seeds were compared, those that diverged included."""
        return self.row.pairs + len(self.row.failed)

    def judge(self, tolerance: Tolerance) -> str:
        """Return whether the interval lies within the tolerance, beyond it, or on both sides."""
        allowed = tolerance.accuracy if self.row.metric == "accuracy" else tolerance.loss
        if self.row.failed or self.lost is None:
            return LOSES
        _, low, high = self.lost
        return FITS if high <= allowed else LOSES if low > allowed else UNCLEAR

    def words(self, tolerance: Tolerance) -> str:
        """Return the result in words: the loss with its interval, or the loss that is excluded."""
        if self.row.failed or self.lost is None:
            return f"diverged in {len(self.row.failed)} of {self.seeds} seeds there"
        points = self.row.metric == "accuracy"
        scale, unit = (100.0, " points") if points else (1.0, "")

        def text(value: float) -> str:
            value += 0.0  # no -0
            return f"{scale * value:.2g}" if abs(scale * value) < 10 else f"{scale * value:.3g}"

        middle, low, high = self.lost
        where = unit if points else " of loss"
        if low > 0:
            return f"loses {text(middle)} [{text(low)}, {text(high)}]{where} there"
        if high < 0:
            return f"gains {text(-middle)} [{text(-high)}, {text(-low)}]{where} there"
        if self.judge(tolerance) == FITS:
            return f"no loss seen there within {text(high)}{where}"
        if middle < 0:
            return f"not clear: gains {text(-middle)} [{text(-high)}, {text(-low)}]{where} there"
        return f"not clear: loses {text(middle)} [{text(low)}, {text(high)}]{where} there"

    @property
    def place(self) -> str:
        """Where it was measured: network, task, size, budget, seeds."""
        first, config = self.row.first, self.row.runs[0].config
        network = (config.get("task_options") or {}).get("network")
        size = "" if first.params is None else f"{count_text(first.params)} parameters, "
        return (
            f"{f'{network} on ' if network else ''}{first.task}, {size}{first.steps:,} steps of "
            f"{first.batch}, {first.workers} workers, {self.seeds} seeds"
        )

    @property
    def inputs(self) -> str:
        """What its task's model reads (`Task.inputs`); "" for a task that is not known here."""
        try:
            return registry.task_class(self.row.first.task).inputs
        except GcbenchError:
            return ""

    def budget_distance(self, examples: int | None) -> str:
        """Return in words how its steps compare with steps of so many examples, all workers."""
        if examples is None:
            return "the batch of your steps was not given"
        factor = examples / self.row.first.batch
        if 0.95 < factor < 1.05:
            return f"a step of yours has as many examples, {examples:,}"
        times = f"{float(f'{factor:.2g}'):,.0f}" if factor >= 10 else f"{factor:.2g}"
        return f"a step of yours has {examples:,} examples, {times} times as many"

    def distance(self, numel: int) -> str:
        """Return in words how its network's size compares with one of `numel` parameters."""
        there, mine = self.row.first.params, count_text(numel)
        if not there:
            return f"your model has {mine} parameters, its size is not on record"
        factor = numel / there
        if 0.95 < factor < 1.05:
            return f"your model has as many, {mine}"
        if factor > 1:
            times = f"{float(f'{factor:.2g}'):,.0f}" if factor >= 10 else f"{factor:.2g}"
            return f"your model has {mine}, {times} times as many"
        return f"your model has {mine}, {100 * factor:.2g} % as many"


class Split(NamedTuple):
    """Rows of a method, by whether they are of the task that is nearest to a model."""

    near: Sequence[Evidence]
    """Those by which the model is judged."""
    far: Sequence[Evidence]
    """Those of tasks that read something else: a warning at most."""


def nearest(known: Sequence[Evidence], inputs: str) -> Split:
    """Return the rows whose task reads the same as a model, and the others.

    `inputs`: what the model reads, as `Task.inputs`. Without a row of the same kind those count
    whose kind is not known, without these, or for a model of no known kind, all.
    """

    def farness(one: Evidence) -> int:
        there = one.inputs
        return 1 if not (inputs and there) else 0 if there == inputs else 2

    least = min(map(farness, known), default=0)
    return Split(
        [one for one in known if farness(one) == least],
        [one for one in known if farness(one) != least],
    )


@dataclass(frozen=True)
class Gathered:
    """The evidence in given folders and files."""

    found: Sequence[Evidence]
    read: int
    """Runs that were read."""
    left: Mapping[str, int]
    """Reason -> how many runs do not count for it."""

    def told(self, paths: Sequence[str]) -> str:
        """Return a sentence on what was read, and what does not count, with reasons."""
        said = f"Read: {self.read:,} runs of {', '.join(paths)}."
        if self.left:
            reasons = "; ".join(f"{count:,} {reason}" for reason, count in self.left.items())
            said += f" Not evidence: {reasons}."
        return said


def gather(paths: Sequence[Path]) -> Gathered:
    """Return the evidence in `paths`: folders and files that `reader.load` reads.

    Raises:
        UsageError, GcbenchError: see `reader.load`.
    """
    if not paths:
        return Gathered([], 0, {})
    runs = reader.load(paths)
    left: Counter[str] = Counter()
    groups: dict[str, list[Run]] = {}
    current = [run for group in per_suite(runs, {}).values() for run in group]
    if older := len(runs) - len(current):
        left["of another version of their suite"] = older
    for run in current:
        groups.setdefault(run.suite, []).append(run)
    if others := groups.pop("", []):
        left["made for no suite"] = len(others)
    found = [each for name in groups for each in _of_suite(name, groups, left)]
    return Gathered(found, len(runs), left)


def _of_suite(
    name: str, groups: Mapping[str, Sequence[Run]], left: Counter[str]
) -> Iterator[Evidence]:
    """Yield the evidence in the runs that were made for a suite, given the runs of all suites.

    Runs that were made for another suite and belong to this one, too, as `none` may, serve as its
    baselines and trials; whether they are evidence themselves is decided once, in their own suite.
    `left` counts the runs that are no evidence, by reason.
    """
    runs, kept = groups[name], []
    for run in runs:
        if run.is_trial:
            left["trials of learning rates"] += 1
        elif not run.config.get("holdout"):
            left["without a holdout"] += 1
        else:
            kept.append(run)
    plain = name.partition("/")[0]
    suite = suites.load(plain) if plain in suites.names() else None
    tuned = suite is not None and suite.tune is not None
    rates: Mapping[str, str | None] = {}
    if suite is not None:
        shared = [run for other, group in groups.items() if other != name for run in group]
        rates, own = _rates(suite, [*runs, *shared])
        kept += [run for run in own if run.suite != name and run.config.get("holdout")]
    rows = compare.rows(kept, own=TUNED_KEYS if tuned else frozenset())
    still_open = {row.method for row in rows if rates.get(row.runs[0].method) == "open"}
    plain_open = any(row.method in still_open for row in rows if row.is_baseline)
    for row in rows:
        if row.is_baseline or row.runs[0].suite != name:
            continue
        if plain_open or row.method in still_open:
            left["whose learning rates are not chosen yet"] += len(row.runs)
        elif not row.baseline_n:
            left["without an uncompressed row of equal budget"] += len(row.runs)
        elif row.pairs + len(row.failed) < LEAST_SEEDS:
            left[f"of fewer than {LEAST_SEEDS} seeds that `none` has, too"] += len(row.runs)
        else:
            yield Evidence(row, name, rates.get(row.runs[0].method))


def _rates(suite: suites.Suite, runs: Sequence[Run]) -> tuple[dict[str, str | None], Sequence[Run]]:
    """Return how each method's learning rate was chosen, by `Run.method`, and the suite's runs.

    Runs that belong to no entry of the suite are left out.
    """
    try:
        beside = suite_match.beside(suite, runs)
    except UsageError:
        return {}, []
    own = TUNED_KEYS if suite.tune is not None else frozenset()
    rows = beside.rows(compare.rows(beside.runs, own=own), every=True)
    return {row.runs[0].method: row.rate for row in rows}, beside.runs
