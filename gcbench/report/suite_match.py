"""Finished runs beside a suite: the entry of each run, and the entries without runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from typing import Any

from gcbench.core import registry
from gcbench.core.errors import UsageError
from gcbench.core.values import text
from gcbench.report.compare import Row, ranked
from gcbench.results.reader import Run, fields
from gcbench.training import grid
from gcbench.training.suites import Point, Suite, decide
from gcbench.training.suites.tuning import Trial, quality


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

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of these runs with the published numbers."""
        made = []
        for row in rows:
            point = self.points[row.runs[0].method]
            bits = row.bits_up
            made.append(
                replace(
                    row,
                    published=point.published,
                    tier=None if bits is None else self.suite.tier(bits),
                    rate=self._rate(row, point),
                )
            )
        return ranked(made)

    def _rate(self, row: Row, point: Point) -> str | None:
        """Return whether the row has the rate that the suite's rule chooses; see `Row.rate`."""
        if point.tune is None:
            return None
        choice = point.tune.choose(self.tried[point.identity], row.runs[0].summary.steps)
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
        first = f"{len(self.missing)} of {every} runs of suite {self.suite.name} not made yet"
        return [first, *_described(self.missing), f"make them with: {self._command()}"]

    def _command(self) -> str:
        """Return the command that makes what is missing, with the seeds and steps of the others.

        Runs that were made for another suite may have seeds and steps of its own.
        """
        words = ["gcbench", "run", "--suite", self.suite.asked]
        points = self.suite.points()
        for key in dict.fromkeys(key for point in self.missing for key in point.settings):
            if key in grid.NESTED or key not in points[0].resolved:
                continue
            wanted, known = (
                list(dict.fromkeys(text(point.resolved[key]) for point in some))
                for some in (self.missing, points)
            )
            if len(wanted) < len(known):
                in_order = filter(wanted.__contains__, known)
                words += [f"--{key.replace('_', '-')}", ",".join(in_order)]
        runs = [run for run in self.runs if run.suite.partition("/")[0] in ("", self.suite.name)]
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
        own = [point for point in points if point.entry == entry]
        words = [own[0].config.compressor]
        for key in own[0].settings:
            if key in grid.NESTED:
                words += [f"{name}={text(v)}" for name, v in own[0].settings[key].items()]
            elif key in own[0].resolved and key != "compressor":
                values = dict.fromkeys(text(point.resolved[key]) for point in own)
                words.append(f"{key}={','.join(values)}")
        yield " ".join(words)


def beside(suite: Suite, runs: Sequence[Run]) -> Beside:
    """Return the runs that are entries of the suite, whatever their budget.

    Raises:
        UsageError: none of them is.
    """
    points = {point.identity: point for point in suite.points()}
    found: dict[str, Point] = {}
    tried: dict[str, dict[Trial, float]] = {identity: {} for identity in points}
    tasks = {point.config.task for point in points.values()}
    for method, run in {run.method: run for run in runs if run.summary.task in tasks}.items():
        told = _recorded(run)
        for point in points.values():
            if not _same(suite, point.resolved, told):
                continue
            if not run.is_trial:
                found[method] = point
            elif point.tune is not None and point.tune.tries(run.summary.model_dump()):
                summary = run.summary.model_dump()
                tried[point.identity][point.tune.trial_of(summary)] = quality(summary)
    if not found:
        raise UsageError(
            f"no run here is one of suite {suite.name} ({len(runs)} read); make them with "
            f"`gcbench run --suite {suite.asked}`"
        )
    made = {point.identity for point in found.values()}
    wanted = _wanted(points.values(), tried)
    missing = [p for name, p in points.items() if name in wanted and name not in made]
    return Beside(suite, [run for run in runs if run.method in found], found, missing, tried)


def _wanted(points: Iterable[Point], tried: Mapping[str, Mapping[Trial, float]]) -> set[str]:
    """Return the identities of the points that are to be run, as far as trials have decided.

    Of a group that is not decided yet these are all.
    """
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    wanted = set()
    for group in groups.values():
        best = None
        if group[0].tune is not None:
            best = decide(group, [tried[point.identity] for point in group]).best
        wanted |= {
            point.identity
            for number, point in enumerate(group)
            if best is None or number == best or point.as_published
        }
    return wanted


def _recorded(run: Run) -> dict[str, Any]:
    """Return what a run says of its settings, the defaults of its task and memory filled in.

    Rows of third parties may leave settings out.
    """
    given = {"compressor": run.summary.compressor_name, "memory": run.config["memory"]}
    config = {**run.recorded, **given}
    usual = {
        "task_options": _defaults(registry.task_class(run.summary.task)),
        "memory_options": _defaults(registry.memory_class(config["memory"])),
    }
    own = {key: defaults | (config.get(key) or {}) for key, defaults in usual.items()}
    return {**config, **own, "options": fields(run.summary)}


def _defaults(cls: type[Any]) -> dict[str, Any]:
    known = registry.fields(cls).items()
    return {name: field.default for name, field in known if field.default is not MISSING}


def _same(suite: Suite, wanted: Mapping[str, Any], told: Mapping[str, Any]) -> bool:
    """Return whether a run has the settings of an entry.

    A setting that the run does not record must be one that the suite does not set.
    """
    for key, value in wanted.items():
        if key in grid.NESTED:
            own = told[key]
            if not own.keys() <= value.keys():
                return False
            if any(own[k] != value[k] if k in own else suite.sets(key, k) for k in value):
                return False
        elif told[key] != value if key in told else suite.sets(key):
            return False
    return True
