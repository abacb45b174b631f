"""Finished runs to tables: mean and spread over seeds, distance to `none`, bytes and times.

`finished.load` reads runs, `rows` makes one row of each configuration (its seeds together), and
`gcbench.reporting.tables.render` prints them. results/README.md explains every column.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gcbench.core.errors import UsageError, unknown
from gcbench.core.schema import PHASES
from gcbench.reporting.reader import Modelled, Run, Summary, fields
from gcbench.training.configuration import canonical, text
from gcbench.training.suites.tuning import TUNED_KEYS

if TYPE_CHECKING:
    from gcbench.training.suites import Published

BASELINE = "none"

METHOD_KEYS = frozenset(
    {
        *("seed", "compressor", "options", "collective", "dense_last", "dense_below", "engine"),
        *("gradients", "threads", "device", "backend", "eval_every", "log_every"),
        *("on_nonfinite", "link_gbit", "link_latency_us"),
        *("memory", "memory_options", "start_step", "delay", "rebroadcast_every"),
        *("local_steps", "outer_lr", "outer_momentum", "outer_nesterov", "hook", "bucket_mb"),
    }
)
"""Config keys in which a row and its baseline may differ; all the others are the budget."""
_TAG_KEYS = ("engine", "gradients", "device", "backend")
_TAG_PAIRS = (
    *("start_step", "delay", "rebroadcast_every", "threads", "eval_every", "log_every"),
    *("local_steps", "outer_lr", "outer_momentum", "outer_nesterov", "hook", "bucket_mb"),
    *("on_nonfinite", "link_gbit", "link_latency_us"),
)


class Reached(NamedTuple):
    """What one run had spent at the first evaluation that met a target; None: not recorded."""

    step: int
    payload_bytes: float | None
    """Per worker, up and down together."""
    wire_bytes: float | None
    seconds: float | None
    """Wall clock of the run: in the engine simulate of all workers in one process."""
    link_seconds: float | None
    """Communication alone, as modelled from the run's link."""


@dataclass(frozen=True)
class Row:
    """One configuration: all of its seeds. Bytes are per worker and step, times in seconds."""

    method: str
    """Short label: the compressor's name, and what tells it from the other rows."""
    context: Mapping[str, Any]
    """Keys of the budget that differ among the rows of the table (task, workers, ...)."""
    own: Mapping[str, Any]
    """Keys that are the method's own choice and differ among the rows (lr, momentum, ...)."""
    runs: tuple[Run, ...]
    metric: str
    """"accuracy" (a fraction, higher is better) or "test_loss" (lower is better)."""
    values: Mapping[int, float]
    """The metric of each seed whose run has a finite one."""
    failed: tuple[int, ...]
    """Seeds whose run diverged: no finite metric, or a test loss that is not finite."""
    baseline: Mapping[int, float]
    """The metric of each seed of the `none` row of equal budget; empty without one."""
    phases: Mapping[str, float | None]
    tuned: tuple[str, ...] = ()
    """The keys of TUNED_KEYS in which that row differs, where none has equal ones."""
    on_front: bool = False
    """Whether no row of equal budget has both a better mean and fewer payload bytes."""
    target: float | None = None
    """The metric that was asked for, if one was."""
    reached: Mapping[int, Reached | None] = field(default_factory=dict)
    """For each seed with evaluations, what it took to meet the target; None where it never did."""
    published: Published | None = None
    """What a paper says of this run, where the rows are those of a suite."""
    tier: str | None = None
    """The tier of equal bits to which a suite counts the row, by its measured bits."""
    rank: str | None = None
    """Its place in the tier, "1" or, tied, "1="; "-" with fewer than 5 common seeds."""
    rate: str | None = None
    """How a suite's rule chose the learning rate: "tuned", "edge" of what was tried, "untuned"."""

    @property
    def first(self) -> Summary:
        """The summary of the first seed, for what is equal in all of them."""
        return self.runs[0].summary

    @property
    def mean(self) -> float | None:
        """Mean over the seeds that did not fail; None where all did."""
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def sd(self) -> float | None:
        """Sample standard deviation (n - 1); None below two seeds."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def is_baseline(self) -> bool:
        """Whether this is an uncompressed row."""
        return self.first.compressor_name == BASELINE

    @property
    def pairs(self) -> int:
        """Number of seeds that both this row and its baseline finished."""
        return 0 if self.is_baseline else len(self.values.keys() & self.baseline.keys())

    @property
    def difference(self) -> float | None:
        """Row minus baseline: mean over the common seeds, or of the two means without any."""
        if self.is_baseline or not self.baseline or self.mean is None:
            return None
        if self.pairs:
            return statistics.fmean(self._differences())
        return self.mean - statistics.fmean(self.baseline.values())

    @property
    def difference_sd(self) -> float | None:
        """Sample standard deviation of the paired differences; None below two pairs."""
        return statistics.stdev(self._differences()) if self.pairs > 1 else None

    def _differences(self) -> list[float]:
        common = sorted(self.values.keys() & self.baseline.keys())
        return [self.values[seed] - self.baseline[seed] for seed in common]

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean paired difference; None below two pairs.

        Student's t with pairs - 1 degrees of freedom: normal differences assumed.
        """
        spread, middle = self.difference_sd, self.difference
        if spread is None or middle is None:
            return None
        from scipy import stats

        half = float(stats.t.ppf(0.975, self.pairs - 1)) * spread / math.sqrt(self.pairs)
        return middle - half, middle + half

    def to_target(self, field: str) -> float | None:
        """Return the median over seeds of a field of `Reached`; inf for a seed that missed it.

        None where a seed has no curve, or did not record the field.
        """
        if not self.reached or len(self.reached) < len(self.runs):
            return None
        spent = [getattr(r, field) if r else math.inf for r in self.reached.values()]
        return None if None in spent else float(statistics.median(spent))

    @property
    def bits_up(self) -> float | None:
        """Measured bits an element that a worker hands over, mean over seeds."""
        ratio = self.average("payload_ratio_up")
        return 32 / ratio if ratio else None

    @property
    def above_baseline(self) -> bool:
        """Whether the interval of the difference to fp32 lies on the better side of zero."""
        if self.interval is None:
            return False
        return self.interval[0] > 0 if self.metric == "accuracy" else self.interval[1] < 0

    @property
    def band(self) -> tuple[float, float] | None:
        """Lowest and highest value of the baseline's seeds; None below two of them."""
        if len(self.baseline) < 2:
            return None
        return min(self.baseline.values()), max(self.baseline.values())

    @property
    def in_band(self) -> str:
        """Whether the mean lies in the band; "no" says on which side, "n/a" why not known."""
        if self.is_baseline:
            return "baseline"
        if self.failed or self.mean is None:
            return "no: failed"
        if self.band is None:
            return "n/a (1 seed)" if self.baseline else "no baseline"
        low, high = self.band
        if low <= self.mean <= high:
            return "yes"
        return "no: better" if (self.mean > high) == (self.metric == "accuracy") else "no: worse"

    def average(self, field: str) -> float | None:
        """Return the mean over seeds of a number in the summary; None where no seed has it."""
        found = [getattr(run.summary, field) for run in self.runs]
        present = [value for value in found if value is not None]
        return statistics.fmean(present) if present else None

    @property
    def beyond_published(self) -> float | None:
        """Mean accuracy minus the published one; None where either is not known."""
        known = self.published.accuracy if self.published and self.metric == "accuracy" else None
        return None if known is None or self.mean is None else self.mean - known

    @property
    def other_budget(self) -> bool:
        """Whether the published number took another number of steps."""
        return self.published is not None and self.published.steps != self.first.steps

    @property
    def payload_bytes_step(self) -> float:
        """Encoded bytes per worker and step, up and down together, mean over seeds."""
        parts = (run.summary.payload_bytes_up + run.summary.payload_bytes_down for run in self.runs)
        return statistics.fmean(parts) / self.first.steps

    @property
    def wire_bytes_step(self) -> float:
        """Bytes that cross the network per worker and step, mean over seeds."""
        per_worker = (run.summary.wire_bytes.per_worker for run in self.runs)
        return statistics.fmean(per_worker) / self.first.steps

    @property
    def modelled(self) -> Modelled | None:
        """The modelled communication (median seconds); None where it was measured or unknown."""
        links = [run.summary.communicate_modelled for run in self.runs]
        present = [link for link in links if link is not None]
        if not present or self.phases.get("communicate") is not None:
            return None
        return present[0].model_copy(
            update={"seconds": statistics.median(link.seconds for link in present)}
        )

    @property
    def step_seconds(self) -> float | None:
        """Wall-clock seconds of a step, median over seeds."""
        return _median(run.summary.step_seconds for run in self.runs)

    @property
    def disowned(self) -> str:
        """Why whoever made these runs says that their times are not to be quoted; "" if not."""
        return next(filter(None, (run.summary.provenance.get("times") for run in self.runs)), "")

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped for a non-finite gradient, all seeds together."""
        return sum(run.summary.skipped_steps for run in self.runs)

    def record(self) -> dict[str, Any]:
        """Return the row as raw numbers: fractions, bytes, seconds. None where not known."""
        first = self.first
        named = ("task", "workers", "collective", "engine", "gradients", "steps", "batch", "params")
        return {
            "method": self.method,
            "compressor": first.compressor,
            "compressor_name": first.compressor_name,
            **{key: getattr(first, key) for key in named},
            **{key: value for key, value in self.context.items() if key not in named},
            **dict(self.own),
            **({} if self.tier is None else {"tier": self.tier, "rank": self.rank}),
            **({} if self.rate is None else {"rate": self.rate}),
            "bits_up": self.bits_up,
            "metric": self.metric,
            "mean": self.mean,
            "sd": self.sd,
            "n": len(self.values),
            "failed": len(self.failed),
            "seeds": sorted(self.values),
            "values": [self.values[seed] for seed in sorted(self.values)],
            "failed_seeds": list(self.failed),
            "difference": self.difference,
            "difference_sd": self.difference_sd,
            "difference_low": self.interval[0] if self.interval else None,
            "difference_high": self.interval[1] if self.interval else None,
            "pairs": self.pairs,
            "on_front": self.on_front,
            "target": self.target,
            "target_reached": sum(reached is not None for reached in self.reached.values()),
            "target_runs": len(self.reached),
            **{f"target_{name}": finite(self.to_target(name)) for name in Reached._fields},
            "baseline_n": len(self.baseline),
            "band_low": self.band[0] if self.band else None,
            "band_high": self.band[1] if self.band else None,
            "in_band": self.in_band,
            "nominal_ratio": self.average("nominal_ratio"),
            "payload_ratio_up": self.average("payload_ratio_up"),
            "payload_ratio_down": self.average("payload_ratio_down"),
            "payload_bytes_step": self.payload_bytes_step,
            "wire_bytes_step": self.wire_bytes_step,
            **{f"{phase}_seconds": seconds for phase, seconds in self.phases.items()},
            "communicate_modelled_seconds": self.modelled.seconds if self.modelled else None,
            "step_seconds": self.step_seconds,
            "times_disowned": self.disowned or None,
            "skipped_steps": self.skipped_steps,
            **self._published(),
        }

    def _published(self) -> dict[str, Any]:
        """Return what a suite adds to the record."""
        if self.published is None:
            return {}
        return {
            "suite": self.published.suite,
            "published": self.published.accuracy,
            "published_difference": self.beyond_published,
            "test_top5": self.average("test_top5"),
            "published_top5": self.published.top5,
            "published_steps": self.published.steps,
            "published_source": self.published.source,
        }


def half_interval(row: Row) -> float:
    """Return half the 95 % confidence interval of a row's mean (Student's t); 0 for one seed."""
    if row.sd is None:
        return 0.0
    from scipy import stats

    n = len(row.values)
    return float(stats.t.ppf(0.975, n - 1)) * row.sd / math.sqrt(n)


def finite(value: float | None) -> float | None:
    """Return the value, None for one that strict JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None


def _median(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def _metric(run: Run, metric: str) -> float | None:
    """Return the finite metric of a run; None where the run diverged."""
    summary = run.summary
    split = "validation" if run.is_trial else "test"
    loss = getattr(summary, f"{split}_loss")
    value = getattr(summary, f"{split}_accuracy") if metric == "accuracy" else loss
    if summary.failed or value is None or not math.isfinite(value):
        return None
    # Parameters of NaN still have an accuracy, by chance: their loss tells, null where it is there.
    told = f"{split}_loss" in summary.model_fields_set
    diverged = told if loss is None else not math.isfinite(loss)
    return None if diverged else value


def _varying(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({canonical(config.get(key)) for config in configs}) > 1]


def _labels(runs: Sequence[Run], own: frozenset[str]) -> list[str]:
    """Return a short label for each, one run a row, equal labels only for equal methods."""
    varying = _varying([run.config for run in runs])
    labels = []
    for run in runs:
        summary, config = run.summary, run.config
        same = [
            one.summary for one in runs if one.summary.compressor_name == summary.compressor_name
        ]
        every = fields(summary)
        shown = dict.fromkeys([*(config.get("options") or {}), *_varying([*map(fields, same)])])
        words = [summary.compressor_name]
        words += [f"{name}={text(every[name])}" for name in shown if name in every]
        if len({one.collective for one in same}) > 1:
            words.append(summary.collective)
        if len({one.config.get("memory") for one in runs if one.summary in same}) > 1:
            words.append(f"memory={config.get('memory')}")
        carried = [one.config.get("memory_options") for one in runs if one.summary in same]
        if len({canonical(options or {}) for options in carried}) > 1:
            kept = config.get("memory_options") or {}
            words += [f"{name}={text(value)}" for name, value in kept.items()]
        if config.get("dense_last"):
            words.append("dense-last")
        if config.get("dense_below"):
            words.append(f"dense<{config['dense_below']}")
        tags = [text(config[key]) for key in _TAG_KEYS if key in varying and config.get(key)]
        tags += [f"{key}={text(config.get(key))}" for key in _TAG_PAIRS if key in varying]
        labels.append(" ".join(words + [f"[{tag}]" for tag in tags]))
    places = [
        canonical([_budget(run), label, {key: run.config.get(key) for key in own}])
        for run, label in zip(runs, labels, strict=True)
    ]
    return [  # what the short label does not tell apart gets the long one
        label if places.count(place) == 1 else run.summary.compressor
        for run, label, place in zip(runs, labels, places, strict=True)
    ]


def _budget(run: Run, own: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the settings that a row shares with its baseline; `own` are the method's choice."""
    return {key: value for key, value in run.config.items() if key not in METHOD_KEYS | own}


def _baseline(
    run: Run, seeds: set[int], rows: Sequence[Row], own: frozenset[str]
) -> tuple[Mapping[int, float], tuple[str, ...]]:
    """Return the values of the `none` row of equal budget, and the tuned keys that differ.

    Of several (other engines, collectives, ...) the one with most common seeds, then most seeds,
    then most equal keys. Without one of equal budget: the best that differs in tuned keys only.
    """

    def closeness(row: Row) -> tuple[int, int, int]:
        other = row.runs[0].config
        equal = sum(other.get(key) == run.config.get(key) for key in METHOD_KEYS)
        return len(seeds & row.values.keys()), len(row.values), equal

    def differing(row: Row) -> tuple[str, ...]:
        other = _budget(row.runs[0], own)
        every = _budget(run, own) | other
        return tuple(key for key in every if other.get(key) != run.config.get(key))

    def quality(row: Row) -> float:
        best = row.mean if row.metric == "accuracy" else -(row.mean or math.inf)
        return -math.inf if best is None else best

    baselines = [row for row in rows if row.is_baseline]
    equals = [row for row in baselines if not differing(row)]
    if equals:
        return max(equals, key=closeness).values, ()
    near = [row for row in baselines if TUNED_KEYS.issuperset(differing(row))]
    if not near:
        return {}, ()
    best = max(near, key=quality)
    return best.values, differing(best)


def _order(value: Any) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return 0, float(value), ""
    return 1, 0.0, canonical(value)


def _reached(run: Run, metric: str, target: float) -> Reached | None:
    """Return what it took to the first evaluation that met the target; None if none did.

    A run whose parameters are NaN still has an accuracy, by chance: it never meets a target.
    """
    split = run.judged_by
    column = f"{split}_accuracy" if metric == "accuracy" else f"{split}_loss"
    for record in run.evaluations():
        value = record.get(column)
        if value is None or record.get(f"{split}_loss", 0.0) is None:
            continue
        if value >= target if metric == "accuracy" else value <= target:
            up, down = record.get("payload_bytes_up"), record.get("payload_bytes_down")
            payload = None if up is None or down is None else up + down
            wire, link = record.get("wire_bytes"), run.summary.communicate_modelled
            modelled = None if link is None else link.seconds * record["step"]
            return Reached(record["step"], payload, wire, record.get("seconds"), modelled)
    return None


def _front(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether no other row of equal budget is as good in both and better in one."""
    sign = 1 if row.metric == "accuracy" else -1

    def beats(other: Row) -> bool:
        if other.mean is None or row.mean is None or other.failed:
            return False
        better = sign * (other.mean - row.mean)
        fewer = row.payload_bytes_step - other.payload_bytes_step
        return better >= 0 and fewer >= 0 and (better > 0 or fewer > 0)

    alike = [other for other in rows if other.context == row.context]
    return row.mean is not None and not row.failed and not any(map(beats, alike))


def fp32_target(runs: Sequence[Run]) -> float:
    """Return the target that the uncompressed runs set: the median of their last evaluation.

    Raises:
        UsageError: there is no uncompressed run with evaluations, or of more than one task.
    """
    last = []
    baselines = [run for run in runs if run.summary.compressor_name == BASELINE]
    for run in baselines:
        if curve := run.evaluations():
            accuracy = curve[-1].get(f"{run.judged_by}_accuracy")
            last.append(curve[-1].get(f"{run.judged_by}_loss") if accuracy is None else accuracy)
    known = [value for value in last if value is not None]
    if not known or len({run.summary.task for run in runs}) > 1:
        raise UsageError(
            "--target fp32: uncompressed runs (`none`) of one task expected, with their "
            "evaluations; give a number, e.g. --target 0.7, or choose a task by --where"
        )
    return float(statistics.median(known))


def level(target: str | None, runs: Sequence[Run]) -> float | None:
    """Return the target as a number: `fp32` is what the uncompressed runs set.

    Raises:
        UsageError: another word, or see `fp32_target`.
    """
    if target is None:
        return None
    if target == "fp32":
        return fp32_target(runs)
    try:
        return float(target)
    except ValueError:
        raise UsageError(
            f"--target {target}: an accuracy from 0 to 1, a loss, or fp32 expected"
        ) from None


def rows(
    runs: Sequence[Run], target: float | None = None, own: frozenset[str] = frozenset()
) -> list[Row]:
    """Return one row of each configuration without its seed, the baseline first in each budget.

    `target`: an accuracy (a fraction) or, for tasks without one, a loss, to say what it took. It is
    met on validation examples where the runs held some out, else on the test split.
    `own`: keys of the config that each method chooses for itself; the others make equal budgets.

    Raises:
        UsageError: a target that no accuracy can meet.
        GcbenchError: with a target, metrics that cannot be read.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    grouped = [sorted(group, key=lambda run: run.summary.seed) for group in groups.values()]
    firsts = [group[0] for group in grouped]
    context = sorted(_varying([_budget(run, own) for run in firsts]), key=_context_order)
    chosen = [key for key in _varying([run.config for run in firsts]) if key in own]
    with_accuracy = {
        run.summary.task
        for run in runs
        if (run.summary.test_accuracy, run.summary.validation_accuracy) != (None, None)
    }
    bare = []
    for group, label in zip(grouped, _labels(firsts, own), strict=True):
        metric = "accuracy" if group[0].summary.task in with_accuracy else "test_loss"
        values = {run.summary.seed: _metric(run, metric) for run in group}
        phases = [run.summary.phase_seconds for run in group]
        reached = {}
        if target is not None:
            if metric == "accuracy" and not 0 < target <= 1:
                raise UsageError(f"--target {target:g}: an accuracy in (0, 1] expected, e.g. 0.9")
            found = {run.summary.seed: run for run in group if run.evaluations()}
            reached = {seed: _reached(run, metric, target) for seed, run in found.items()}
        bare.append(
            Row(
                method=label,
                context={key: group[0].config.get(key) for key in context},
                own={key: group[0].config.get(key) for key in chosen},
                runs=tuple(group),
                metric=metric,
                values={seed: value for seed, value in values.items() if value is not None},
                failed=tuple(seed for seed, value in values.items() if value is None),
                baseline={},
                phases={
                    phase: _median(one.get(phase) for one in phases)
                    for phase in dict.fromkeys([*PHASES, *(name for one in phases for name in one)])
                },
                target=target,
                reached=reached,
            )
        )
    made = []
    for row in bare:
        best, tuned = _baseline(row.runs[0], set(row.values), bare, own)
        front = _front(row, bare)
        made.append(replace(row, baseline=best, tuned=tuned, on_front=front))
    return sorted(
        made,
        key=lambda row: (
            [_order(value) for value in row.context.values()],
            not row.is_baseline,
            row.method,
        ),
    )


def _context_order(key: str) -> tuple[int, str]:
    first = ("task", "task_options", "workers", "steps", "batch", "optimizer", "lr")
    return (first.index(key) if key in first else len(first)), key


# ---- tiers and ranks ----------------------------------------------------------------------------

LEAST_SEEDS = 5
"""Common seeds below which no ranking is shown."""


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their place in their tier: 1 + how many rows of it are better.

    A row is better if the confidence interval of its paired difference over the common seeds
    (Student's t) excludes zero, at 95 % for all pairs of the tier together (Bonferroni). Rows of
    equal place are marked as tied. "-" where a pair has fewer than `LEAST_SEEDS` common seeds.
    """
    places: dict[int, int | None] = {}
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if row.tier is not None:
            groups.setdefault(canonical([row.tier, row.context]), []).append(i)
    for members in groups.values():
        pairs = len(members) * (len(members) - 1) // 2
        for i in members:
            others = [rows[j] for j in members if j != i]
            better = [_beats(other, rows[i], 0.05 / pairs) for other in others]
            places[i] = None if None in better or not others else 1 + sum(map(bool, better))
    made = []
    for i, row in enumerate(rows):
        if row.tier is None:
            made.append(row)
            continue
        group = groups[canonical([row.tier, row.context])]
        tied = sum(places[j] == places[i] for j in group) > 1
        made.append(replace(row, rank="-" if places[i] is None else f"{places[i]}" + "=" * tied))
    return made


def _beats(one: Row, other: Row, level: float) -> bool | None:
    """Return whether a row is better than another by their common seeds; None if too few."""
    from scipy import stats

    common = sorted(one.values.keys() & other.values.keys())
    if len(common) < LEAST_SEEDS:
        return None
    sign = 1 if one.metric == "accuracy" else -1
    differences = [sign * (one.values[seed] - other.values[seed]) for seed in common]
    middle, spread = statistics.fmean(differences), statistics.stdev(differences)
    half = float(stats.t.ppf(1 - level / 2, len(common) - 1)) * spread / math.sqrt(len(common))
    return middle > half


# ---- what a command asks for --------------------------------------------------------------------


class Asked(NamedTuple):
    """What a comparison is to show, as the command line has it."""

    conditions: Mapping[str, Sequence[str]]
    """Setting -> the values allowed."""
    target: str | None
    by: str | None
    format: str
    sort: str = ""
    columns: Sequence[str] = ()
    width: str = ""


def chosen(runs: Sequence[Run], asked: Asked, own: frozenset[str] = frozenset()) -> list[Row]:
    """Return the rows that were asked for; `own` as for `rows`.

    Raises:
        UsageError: no row has all that was asked for, or see `where`, `level` and `rows`.
    """
    runs, meets = where(runs, asked.conditions)
    found = list(filter(meets, rows(runs, level(asked.target, runs), own)))
    if not found:
        words = (f"{key}={','.join(values)}" for key, values in asked.conditions.items())
        raise UsageError(f"no row has all of {' and '.join(words)}")
    return found


def told(rows: Sequence[Row], asked: Asked) -> str:
    """Return the rows as text; those of a suite with tiers have a table for each."""
    from gcbench.reporting import tables

    tiers = asked.by is None and any(row.tier is not None for row in rows)
    layout = tables.Layout(asked.sort, asked.columns, asked.width)
    return tables.render(rows, asked.format, by="tier" if tiers else asked.by, layout=layout)


# ---- filters and groups --------------------------------------------------------------------------


def _settings(run: Run) -> dict[str, Any]:
    """Return what a run can be chosen by: its config, and the fields of its method and task."""
    nested = ("options", "task_options", "memory_options")
    own = {key: value for name in nested for key, value in (run.config.get(name) or {}).items()}
    config = {key: value for key, value in run.config.items() if key not in nested}
    known = own | fields(run.summary) | config
    return known | {"compressor": run.summary.compressor_name, "seed": run.summary.seed}


def _known(key: str, runs: Sequence[Run]) -> None:
    keys = {key for run in runs for key in _settings(run)}
    if key not in keys:
        raise unknown("setting", key, keys)


def where(
    runs: Sequence[Run], conditions: Mapping[str, Sequence[str]]
) -> tuple[list[Run], Callable[[Row], bool]]:
    """Return the runs to make rows of, and whether a row is to be shown.

    `conditions`: setting -> the values allowed, as the command line writes them. Seeds are chosen
    before means are taken; all else afterwards, so that a row keeps its baseline.

    Raises:
        UsageError: a setting that no run has, or values that none has.
    """

    def meets(run: Run, key: str) -> bool:
        return text(_settings(run).get(key)) in conditions[key]

    for key, values in conditions.items():
        _known(key, runs)
        if not any(meets(run, key) for run in runs):
            present = {text(_settings(run).get(key)) for run in runs}
            raise unknown(key, ", ".join(values), present)
    kept = [run for run in runs if "seed" not in conditions or meets(run, "seed")]
    later = [key for key in conditions if key != "seed"]

    def shown(row: Row) -> bool:
        return all(meets(row.runs[0], key) for key in later)

    return kept, shown


def by(rows: Sequence[Row], key: str) -> dict[str, list[Row]]:
    """Return the rows by the value of a setting, as text.

    Raises:
        UsageError: a setting that no run has.
    """
    groups: dict[str, list[Row]] = {}
    tiers = key == "tier" and any(row.tier is not None for row in rows)
    if not tiers:
        _known(key, [row.runs[0] for row in rows])
    for row in rows:
        value = (row.tier or "none") if tiers else text(_settings(row.runs[0]).get(key))
        groups.setdefault(value, []).append(row)
    return groups
