"""Finished runs beside a suite: the entry of each run, and the entries without runs."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, replace
from typing import Any

from gcbench.core import registry
from gcbench.core.errors import UsageError
from gcbench.core.values import text
from gcbench.report.compare import ComparisonRow, ranked
from gcbench.results.reader import Run, fields, once, recorded
from gcbench.training import configuration, grid
from gcbench.training.suites import Point, Suite
from gcbench.training.suites.tuning import Trial, decide_among, quality


@dataclass(frozen=True)
class Beside:
    """The runs that are of a suite, each with what is published about it."""

    suite: Suite
    runs: list[Run]
    points: Mapping[str, Point]
    """By `Run.method`."""
    missing: list[Point]
    """The entries of the suite that have no run, of whatever budget."""
    tried: Mapping[str, Mapping[Trial, float]]
    """The results of the trials of each point, by `Point.identity`."""
    choices: Mapping[tuple[str, int], Point]
    """The alternative that trials chose, by `Point.group` and steps of the runs, where decided."""
    best: frozenset[str]
    """The tuned runs that count, by `Run.method`: those of the alternative that trials chose, or of
    all alternatives of a method while its trials, or the runs of the chosen one, are missing."""

    def rows(self, rows: Sequence[ComparisonRow], *, every: bool = False) -> list[ComparisonRow]:
        """Return the best row found for each method, with what is published, and ranks among them.

        Beside it is the result of the alternative that its source has, after as many steps. Rows
        that no trial chose, because the suite sets their rate, are kept. `every`: all rows are
        kept.
        """
        points = [self.points[row.runs[0].method] for row in rows]
        sources: dict[tuple[str, int], ComparisonRow] = {}
        for row, point in zip(rows, points, strict=True):
            if point.as_published and point.tune is not None:
                key = point.group, row.first.steps
                if key not in sources or self.rate(row) in ("tuned", "edge"):
                    sources[key] = row
        result = []
        for row, point in zip(rows, points, strict=True):
            if not every and point.tune is not None and row.runs[0].method not in self.best:
                continue
            source = sources.get((point.group, row.first.steps))
            if source is not None and source is not row:
                row = replace(row, as_published=source)
            bits = row.bits_up
            result.append(
                replace(
                    row,
                    published=point.published,
                    tier=None if bits is None else self.suite.tier(bits),
                    rate=self.rate(row),
                    settings_open=self._is_open(row, point),
                    differs_from_source=point.tune is not None and not point.as_published,
                )
            )
        return ranked(result)

    def _is_open(self, row: ComparisonRow, point: Point) -> bool:
        """Return whether trials may still choose another alternative, or chose one without runs."""
        if point.tune is None:
            return False
        choice = self.choices.get((point.group, row.first.steps))
        counts = row.runs[0].method in self.best
        return choice is None or (counts and choice.identity != point.identity)

    def rate(self, row: ComparisonRow) -> str | None:
        """Return how the learning rate of a row was chosen: see `ComparisonRow.rate`.

        None for a row of no entry, or of one whose rate the suite sets.
        """
        point = self.points.get(row.runs[0].method)
        if point is None or point.tune is None:
            return None
        choice = point.tune.choose(self.tried[point.identity], row.first.steps)
        if choice.lr is None:
            return "open"
        if choice.lr != row.runs[0].config.get("lr"):
            return "untuned"
        return "edge" if choice.at_edge else "tuned"

    def unmade(self) -> list[str]:
        """Return lines on the runs that are missing and the command that makes them."""
        if not self.missing:
            return []
        every = len(self.missing) + len({p.identity for p in self.points.values()})
        first = f"{len(self.missing)} of {every} runs of suite {self.suite.name} are missing"
        return [first, *_described(self.missing), f"make them with: {self._command()}"]

    def _command(self) -> str:
        """Return the command that makes what is missing, with the seeds and steps of the others.

        Runs that were made for another suite may have seeds and steps of its own.
        """
        words = ["gcbench", "run", "--suite", self.suite.asked]
        points = self.suite.points()
        for key in dict.fromkeys(key for point in self.missing for key in point.settings):
            if key in grid.NESTED or not all(key in point.resolved for point in points):
                continue
            wanted, every_value = (
                list(dict.fromkeys(configuration.word(point.resolved[key]) for point in some))
                for some in (self.missing, points)
            )
            if len(wanted) == len(every_value):
                continue
            flag = f"--{key.replace('_', '-')}"
            if isinstance(points[0].resolved[key], bool):
                words.append(flag if wanted == ["True"] else flag.replace("--", "--no-", 1))
            else:
                words += [flag, ",".join(filter(wanted.__contains__, every_value))]
        runs = [run for run in self.runs if _label(run) in ("", self.suite.name)]
        steps = {run.summary.steps for run in runs}
        usual = all(self.points[r.method].config.steps == r.summary.steps for r in runs)
        if len(steps) == 1 and not usual:
            words += ["--steps", str(*steps)]
        seeds = sorted({run.summary.seed for run in runs})
        if seeds and seeds != sorted({point.config.seed for point in points}):
            words += ["--seed", ",".join(map(str, seeds))]
        return shlex.join(words)


def _described(points: Sequence[Point]) -> Iterator[str]:
    """Yield a line for each entry: its method, and its settings with the values of `points`."""
    for entry in dict.fromkeys(point.entry for point in points):
        members = [point for point in points if point.entry == entry]
        words = [",".join(dict.fromkeys(point.config.compressor for point in members))]
        for key in members[0].settings:
            if key in grid.NESTED:
                words += [f"{name}={text(v)}" for name, v in members[0].settings[key].items()]
            elif key in members[0].resolved and key != "compressor":
                values = dict.fromkeys(text(point.resolved[key]) for point in members)
                words.append(f"{key}={','.join(values)}")
        yield " ".join(words)


def beside(suite: Suite, runs: Sequence[Run]) -> Beside:
    """Return the runs that are entries of the suite, whatever the number of their steps.

    Runs of other suites are entries with the steps of this one, or of a suite that it shares.

    Raises:
        UsageError: none of them is.
    """
    runs = _candidates(suite, runs)
    points = {point.identity: point for point in suite.points()}
    tried: dict[str, dict[Trial, float]] = {identity: {} for identity in points}
    alike_of = _entries(suite, points.values(), runs)
    runs_of: dict[str, Run] = {}
    for run in runs:
        if alike_of[run.method] and not run.is_trial:
            runs_of[run.method] = run
        for point, summary in _tried_by(run, alike_of[run.method]):
            assert point.tune is not None, "the point is tuned"
            tried[point.identity][point.tune.trial_of(summary)] = quality(summary)
    if not runs_of:
        raise _none_of(suite, runs)
    matched = {}
    shared: dict[str, Point] = {}
    for method, run in runs_of.items():
        alike = alike_of[method]
        # An entry with a rate of its own comes before one whose trials may choose that rate, too.
        fixed = [point for point in alike if point.tune is None]
        matched[method] = fixed[0] if fixed else alike[-1]
        for point in alike if fixed else ():
            if point.tune is not None and _chooses(point, tried, run):
                shared[method] = point
    steps_of = {method: run.summary.steps for method, run in runs_of.items()}
    choices = _choices(points.values(), tried, set(steps_of.values()))
    done = {(p.identity, steps_of[method]) for method, p in (matched | shared).items()}
    identities = {p.identity for p in (*matched.values(), *shared.values())}
    chosen = {point.identity for point in choices.values()}
    decided = {group for group, _ in choices}
    missing = [
        point
        for identity, point in points.items()
        if identity not in identities
        and (point.group not in decided or identity in chosen or point.as_published)
    ]
    best = set()
    for method, point in (matched | shared).items():
        steps = steps_of[method]
        choice = choices.get((point.group, steps), point).identity
        if point.tune is not None and (choice == point.identity or (choice, steps) not in done):
            best.add(method)
    matched_runs = [run for run in runs if run.method in matched]
    return Beside(suite, matched_runs, matched, missing, tried, choices, frozenset(best))


def with_trials(suite: Suite, runs: Sequence[Run]) -> list[Run]:
    """Return the runs that are entries of the suite, and the trials of these entries.

    Raises:
        UsageError: none of them is.
    """
    runs = _candidates(suite, runs)
    alike_of = _entries(suite, suite.points(), runs)
    members = [
        run
        for run in runs
        if (alike_of[run.method] and not run.is_trial) or any(_tried_by(run, alike_of[run.method]))
    ]
    if not members:
        raise _none_of(suite, runs)
    return members


def _candidates(suite: Suite, runs: Sequence[Run]) -> list[Run]:
    """Return each run once, without those of other suites that have other steps."""
    labels = ("", suite.name, *suite.shares)
    lengths = {point.config.steps for point in suite.points()}
    lengths |= {run.summary.steps for run in runs if _label(run) == suite.name}
    return [
        run
        for run in once(runs)
        if run.is_trial or _label(run) in labels or run.summary.steps in lengths
    ]


def _label(run: Run) -> str:
    return run.suite.partition("/")[0]


def _none_of(suite: Suite, runs: Sequence[Run]) -> UsageError:
    return UsageError(
        f"no run here is one of suite {suite.name} ({len(runs)} read); make them with "
        f"`gcbench run --suite {suite.asked}`"
    )


def _entries(suite: Suite, points: Iterable[Point], runs: Sequence[Run]) -> dict[str, list[Point]]:
    """Return the entries that each configuration belongs to, by `Run.method`."""
    by_compressor: dict[tuple[str, str], list[tuple[Point, dict[str, Any]]]] = {}
    for point in points:
        key = point.config.task, point.resolved["compressor"]
        by_compressor.setdefault(key, []).append((point, point.resolved))
    alike_of: dict[str, list[Point]] = {}
    for run in runs:
        if run.method not in alike_of:
            among = by_compressor.get((run.summary.task, run.summary.compressor_name))
            settings = _recorded(run) if among else {}
            alike_of[run.method] = [
                point for point, wanted in among or () if _same(suite, wanted, settings)
            ]
    return alike_of


def _tried_by(run: Run, alike: Sequence[Point]) -> Iterator[tuple[Point, dict[str, Any]]]:
    """Yield the entries, among those of a configuration, of which a run is a trial.

    With each comes the run's summary.
    """
    if not (alike and run.is_trial):
        return
    summary = run.summary.model_dump()
    for point in alike:
        if point.tune is not None and point.tune.tries(summary):
            yield point, summary


def _chooses(point: Point, tried: Mapping[str, Mapping[Trial, float]], run: Run) -> bool:
    """Return whether the trials of a tuned point choose the rate of a run."""
    assert point.tune is not None, "the point is tuned"
    choice = point.tune.choose(tried[point.identity], run.summary.steps)
    return choice.lr is not None and choice.lr == run.config.get("lr")


def _choices(
    points: Iterable[Point], tried: Mapping[str, Mapping[Trial, float]], budgets: Iterable[int]
) -> dict[tuple[str, int], Point]:
    """Return the alternative that trials chose, by group and steps of the runs (`budgets`).

    A group without a rule is its only point. Groups that are not decided are left out.
    """
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    choices = {}
    for (name, group), steps in itertools.product(groups.items(), budgets):
        rules = [point.tune for point in group if point.tune is not None]
        best: int | None = 0
        if rules:
            best = decide_among(rules, [tried[point.identity] for point in group], steps).best
        if best is not None:
            choices[name, steps] = group[best]
    return choices


def _recorded(run: Run) -> dict[str, Any]:
    """Return what a run says of its settings, the defaults of its task and memory filled in.

    Rows of third parties may leave settings out, and have a memory that is not installed here.
    """
    names = {"compressor": run.summary.compressor_name, "memory": run.config["memory"]}
    config = {**recorded(run.summary), **names}
    usual: dict[str, dict[str, Any]] = {
        "task_options": _defaults(registry.task_class(run.summary.task)),
        "memory_options": {},
    }
    with suppress(UsageError):
        usual["memory_options"] = _defaults(registry.memory_class(config["memory"]))
    nested = {key: defaults | (config.get(key) or {}) for key, defaults in usual.items()}
    return {**config, **nested, "options": fields(run.summary)}


def _defaults(cls: type[Any]) -> dict[str, Any]:
    fields_of = registry.fields(cls).items()
    return {name: field.default for name, field in fields_of if field.default is not MISSING}


def _same(suite: Suite, wanted: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    """Return whether a run has the settings of an entry.

    A setting that the run does not record must be one that the suite does not set.
    """
    for key, value in wanted.items():
        if key in grid.NESTED:
            values = recorded[key]
            if not values.keys() <= value.keys():
                return False
            if any(values[k] != value[k] if k in values else suite.sets(key, k) for k in value):
                return False
        elif recorded[key] != value if key in recorded else suite.sets(key):
            return False
    return True
