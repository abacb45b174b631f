"""Rows of a comparison: one per configuration, with label, baseline and statistics over seeds.

`reader.load` reads runs, `rows` makes rows with the statistics of `gcbench.stats.seeds`, and
`gcbench.report.tables` and `brief` print them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from gcbench.core.errors import UsageError, unknown
from gcbench.core.schema import PHASES
from gcbench.core.values import canonical, finite, text
from gcbench.report.rendering import LINES, MB, plain_values, sentence
from gcbench.results import declared, update_rule
from gcbench.results.reader import Run, fields, fields_of, sources
from gcbench.results.schema import Modelled, Summary
from gcbench.results.settings import (
    BARE,
    CHANGES_FP32,
    DEFAULTS,
    METHOD_KEYS,
    ROLES,
    TUNED_KEYS,
)
from gcbench.stats import ranks, seeds
from gcbench.stats.seeds import BASELINE

if TYPE_CHECKING:
    from pandas import DataFrame

    from gcbench.training.suites import Published


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One configuration over its seeds. Bytes are per worker and step, times in seconds.

    Statistics are columns of `gcbench.stats.seeds`, which explains them; None means unknown.
    """

    method: str
    """Short label: the name, and the fields in which the row differs from others of that name."""
    name: str
    """The compressor's name, or the user's for this row."""
    context: Mapping[str, Any]
    """Keys of the budget that differ among the rows of the table (task, workers, ...)."""
    choices: Mapping[str, Any]
    """Keys that are the method's own choice and differ among the rows (lr, momentum, ...)."""
    runs: tuple[Run, ...]
    """By seed, ascending."""
    metric: str
    """"accuracy" (a fraction, higher is better) or "test_loss" (lower is better)."""
    values: Mapping[int, float]
    """The metric of each seed whose run has a finite one."""
    failed: tuple[int, ...]
    """Seeds whose run diverged: no finite metric, or a test loss that is not finite."""
    phases: Mapping[str, float | None]
    """Seconds of each phase of a step, median over seeds."""
    mean: float | None
    sd: float | None
    half_interval: float
    examples: float | None
    """Size of the test set, recorded or derived from the accuracies; None if unknown."""
    n: int
    difference: float | None
    difference_sd: float | None
    difference_low: float | None
    difference_high: float | None
    pairs: int
    above_baseline: bool
    below_baseline: bool
    faster: bool
    """Whether the target was met in fewer steps than uncompressed, interval included."""
    tuned: tuple[str, ...]
    """The keys of TUNED_KEYS in which the baseline differs, if no baseline has equal ones."""
    on_front: bool
    target: float | None
    """The requested metric, if any."""
    target_reached: int
    """Number of runs that met it, of `target_runs` with evaluations."""
    target_runs: int
    target_step: float | None
    target_payload_bytes: float | None
    target_wire_bytes: float | None
    target_seconds: float | None
    target_link_seconds: float | None
    baseline_n: int
    """Seeds of the `none` row of equal budget that did not diverge; 0 without such a row."""
    band_low: float | None
    band_high: float | None
    in_band: str
    bits_up: float | None
    """Measured bits per element that a worker sends."""
    nominal_ratio: float | None
    payload_ratio_up: float | None
    payload_ratio_down: float | None
    test_top5: float | None
    payload_bytes_step: float | None
    """Encoded, up and down together, of finished runs; None without any."""
    wire_bytes_step: float | None
    """Bytes on the network."""
    communicate_modelled_seconds: float | None
    """Communication as modelled from a link; None if measured or unknown."""
    step_seconds: float | None
    skipped_steps: int
    """Steps that were skipped for a non-finite gradient, all seeds together."""
    published: Published | None = None
    """The published result of this run, for rows of a suite."""
    tier: str | None = None
    """The suite's tier of the row, by its measured bits."""
    rank: str | None = None
    """Possible places in the tier, "1" or "2-4".

    "-" with fewer than 5 common seeds, or if the settings of a row in the tier are open.
    """
    beaten: bool = False
    """Whether a row of the tier is better with no more payload bytes, by the ranks' intervals."""
    as_published: ComparisonRow | None = None
    """The row with the settings of the method's source, if a suite's trials chose others."""
    differs_from_source: bool = False
    """Whether a suite's trials chose other settings; False without trials that choose them."""
    rate: str | None = None
    """How a suite's rule chose the learning rate: "tuned", "edge" of what was tried, "untuned".

    "open" while trials of the rule are missing.
    """
    settings_open: bool = False
    """Whether another alternative of the method may count: trials, or runs of the chosen one, are
    missing."""

    @property
    def payload(self) -> float:
        """`payload_bytes_step` in MB; NaN where no run ended."""
        return math.nan if self.payload_bytes_step is None else self.payload_bytes_step / MB

    @property
    def first(self) -> Summary:
        """The summary of the first seed, for fields that all seeds share."""
        return self.runs[0].summary

    @property
    def place(self) -> str:
        """The context as text, "" without one."""
        return " ".join(f"{key}={text(value)}" for key, value in self.context.items())

    @property
    def words(self) -> tuple[str, ...]:
        """The name, which may have spaces, and the fields of `method`."""
        return self.name, *self.method.removeprefix(self.name).split()

    @property
    def is_baseline(self) -> bool:
        """Whether this is an uncompressed row."""
        return self.first.compressor_name == BASELINE

    @property
    def behind(self) -> float:
        """What sorts rows, the best result first and failed ones last."""
        sign = -1 if self.metric == "accuracy" else 1
        return math.inf if self.mean is None else sign * self.mean

    @property
    def may_be_best(self) -> bool:
        """Whether the first place of its tier is among its possible places."""
        return self.rank is not None and self.rank.partition("-")[0] == "1"

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean paired difference; None below two pairs."""
        low, high = self.difference_low, self.difference_high
        return None if low is None or high is None else (low, high)

    @property
    def band(self) -> tuple[float, float] | None:
        """Lowest and highest value of the baseline's seeds; None below two of them."""
        low, high = self.band_low, self.band_high
        return None if low is None or high is None else (low, high)

    @property
    def link(self) -> Modelled | None:
        """The link from which communication was modelled; None if it was measured."""
        links = [run.summary.communicate_modelled for run in self.runs]
        modelled = self.communicate_modelled_seconds is not None
        return next(filter(None, links)) if modelled else None

    @property
    def beyond_published(self) -> float | None:
        """Mean accuracy, or loss, minus the published one; None if either is unknown."""
        if self.published is None:
            return None
        accuracy = self.metric == "accuracy"
        theirs = self.published.accuracy if accuracy else self.published.loss
        return None if theirs is None or self.mean is None else self.mean - theirs

    @property
    def other_budget(self) -> bool:
        """Whether the published number took another number of steps."""
        return self.published is not None and self.published.steps != self.first.steps

    @cached_property
    def other_rule(self) -> str:
        """The settings in which the update differs from the method's declaration; "" if none."""
        difference = update_rule.other(
            {**self.first.config, "compressor": self.first.compressor_name}
        )
        return "" if difference is None else difference.summary

    @cached_property
    def not_quoted(self) -> str:
        """The author's reason for not quoting these times; "" without one."""
        return next(filter(None, (run.summary.provenance.get("times") for run in self.runs)), "")

    def record(self) -> dict[str, Any]:
        """Return the row as raw numbers: fractions, bytes, seconds. None if unknown.

        A task's field that has the name of another entry is called task.NAME.
        """
        first = self.first
        named = ("task", "workers", "collective", "engine", "gradients", "steps", "batch", "params")
        settings = {
            "method": self.method,
            "compressor": first.compressor,
            "compressor_name": first.compressor_name,
            **{key: getattr(first, key) for key in named},
        }
        context = {key: value for key, value in self.context.items() if key not in named}
        results = self._results()
        taken = settings.keys() | self.choices.keys() | results.keys()
        apart = {f"task.{key}" if key in taken else key: value for key, value in context.items()}
        return {**settings, **apart, **self.choices, **results}

    def _results(self) -> dict[str, Any]:
        """Return the fields of the record that are not settings."""
        return {
            **({} if self.tier is None else {"tier": self.tier, "rank": self.rank}),
            **(
                {}
                if self.rate is None
                else {"rate": self.rate, "settings_open": self.settings_open}
            ),
            **({"other_rule": self.other_rule} if self.other_rule else {}),
            **{name: getattr(self, name) for name in ("bits_up", "metric", "mean", "sd", "n")},
            "failed": len(self.failed),
            "seeds": [*self.values],
            "values": [*self.values.values()],
            "failed_seeds": [*self.failed],
            **{name: getattr(self, name) for name in _COMPARED},
            **{name: finite(getattr(self, name)) for name in seeds.TARGET},
            **{name: getattr(self, name) for name in _MEASURED},
            **{f"{phase}_seconds": seconds for phase, seconds in self.phases.items()},
            "communicate_modelled_seconds": self.communicate_modelled_seconds,
            "step_seconds": self.step_seconds,
            "times_not_quoted": self.not_quoted or None,
            "skipped_steps": self.skipped_steps,
            **self._published(),
            **({} if self.as_published is None else {"as_published": self.as_published.mean}),
        }

    def _published(self) -> dict[str, Any]:
        """Return the fields that a suite adds to the record."""
        if self.published is None:
            return {}
        return {
            "suite": self.published.suite,
            "published": self.published.accuracy,
            "published_loss": self.published.loss,
            "published_difference": self.beyond_published,
            "test_top5": self.test_top5,
            "published_top5": self.published.top5,
            "published_steps": self.published.steps,
            "published_source": self.published.source,
        }


_COMPARED = (
    *("difference", "difference_sd", "difference_low", "difference_high", "pairs", "on_front"),
    *("target", "target_reached", "target_runs", "faster"),
)
_MEASURED = (
    *("baseline_n", "band_low", "band_high", "in_band"),
    *("nominal_ratio", "payload_ratio_up", "payload_ratio_down"),
    *("payload_bytes_step", "wire_bytes_step"),
)
"""Fields of a record, in its order."""


def _varying(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which some of the mappings differ from the first."""
    columns = {
        key: [config.get(key) for config in configs]
        for key in dict.fromkeys(chain.from_iterable(configs))
    }
    return [key for key, column in columns.items() if column.count(column[0]) < len(column)]


def _equalized(values: Sequence[Any]) -> list[Any]:
    """Return the values with the first of equal ones for each: programs write 1 and 1.0."""
    firsts: dict[Any, Any] = {}
    plain = (int, float, str)
    return [firsts.setdefault(v if isinstance(v, plain) else canonical(v), v) for v in values]


class Label(NamedTuple):
    """The user's name for the rows of a method with some settings."""

    name: str
    method: str
    settings: Mapping[str, str]
    """Values of settings and fields as text."""

    @classmethod
    def parse(cls, argument: str) -> Label:
        """Return the label of NAME=METHOD[:SETTING=VALUE...]; METHOD may be a file, as ./mine.py.

        Raises:
            UsageError: it has another form.
        """
        name, equals, spec = argument.partition("=")
        method, *pairs = spec.split(":")
        settings = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        settings = {key: plugin_name(key, value) for key, value in settings.items()}
        if not (name and equals and method) or len(settings) < len(pairs):
            raise UsageError(
                f"--label {argument!r}: expected NAME=METHOD[:SETTING=VALUE...], such as "
                "mine=./mine.py or lion=signsgd:memory=momentum"
            )
        return cls(name, plugin_name("compressor", method), settings)

    def fits(self, run: Run) -> bool:
        """Return whether a run is of the method and has the settings."""
        if run.summary.compressor_name != self.method:
            return False
        return all(value_of(run, key) == value for key, value in self.settings.items())


def _labels(
    runs: Sequence[Run],
    varying: Sequence[str],
    choices: frozenset[str],
    names: Sequence[Label],
) -> list[tuple[str, str]]:
    """Return a short label for each row, given one of its runs; equal only for equal methods.

    Beside it is what the label begins with: the compressor's or the user's name for the row.

    `varying`: the keys in which the rows' configs differ.
    """
    configs = [run.config for run in runs]
    matches = [next((one for one in names if one.fits(run)), None) for run in runs]
    groups: dict[str, list[int]] = {}
    for i, (run, label) in enumerate(zip(runs, matches, strict=True)):
        groups.setdefault(label.name if label else run.summary.compressor_name, []).append(i)
    labels, heads = [""] * len(runs), [""] * len(runs)
    methods = declared.Methods()
    apart = [key for key in varying if key in choices or key not in METHOD_KEYS]
    places = [canonical({key: config.get(key) for key in apart}) for config in configs]
    in_tags = {
        place: _keys_of_tags(
            _varying([config for config, its in zip(configs, places, strict=True) if its == place])
        )
        for place in places
    }
    for name, group in groups.items():
        every = {i: fields(runs[i].summary) for i in group}
        differing = _varying(list(every.values()))
        several = frozenset(
            key
            for key in ("collective", "memory", "memory_options")
            if key in varying
            if len({canonical(configs[i].get(key) or None) for i in group}) > 1
        )
        digests = {sources(runs[i].summary).get("compressor") for i in group}
        for i in group:
            run, config, label = runs[i], configs[i], matches[i]
            method = methods.of(config)
            in_label = label.settings if label else {}
            shown = dict.fromkeys([*(config.get("options") or {}), *differing])
            words = [name]
            words += [
                f"{key}={text(every[i][key])}"
                for key in shown
                if key in every[i] and key not in in_label
            ]
            if "collective" in several:
                words.append(run.summary.collective)
            words += _memory_words(config, method, several, in_label)
            if config.get("dense_last"):
                words.append("dense-last")
            if config.get("dense_below"):
                words.append(f"dense<{config['dense_below']}")
            tags = _tags(config, method, [key for key in in_tags[places[i]] if key not in in_label])
            if len(digests) > 1:
                tags.append(f"source {sources(run.summary).get('compressor', '')[:6]}")
            labels[i] = " ".join(words + [f"[{tag}]" for tag in tags])
            heads[i] = name
    rows = list(zip(labels, places, strict=True))
    count = Counter(rows)
    return [  # rows with equal short labels get the long ones
        (label, head) if count[label, place] == 1 else (run.summary.compressor,) * 2
        for run, (label, place), head in zip(runs, rows, heads, strict=True)
    ]


def _keys_of_tags(varying: Sequence[str]) -> list[str]:
    """Return the settings that the brackets of a label may have.

    `varying`: the keys in which the rows of the same context and choices differ.
    """
    return [
        key
        for key, role in ROLES.items()
        if key not in _IN_WORDS and (role == "method" or (role == "place" and key in varying))
    ]


def _tags(
    config: Mapping[str, Any], method: declared.Declared | None, keys: Sequence[str]
) -> list[str]:
    """Return the settings among `keys` for the brackets of a label.

    These are the method's settings with other values than its defaults, and settings of the place.
    """
    bare, pairs = [], []
    for key in keys:
        value = config.get(key)
        if ROLES[key] == "method":
            usual = DEFAULTS[key] if method is None else method.default(key)
            if value != usual:
                pairs.append(f"{key}={text(value)}")
        elif key not in BARE:
            pairs.append(f"{key}={text(value)}")
        elif value:
            bare.append(text(value))
    return bare + pairs


_IN_WORDS = frozenset(
    {
        *("seed", "compressor", "options", "collective", "memory", "memory_options"),
        *("dense_last", "dense_below"),
    }
)
"""Settings of a method in the first part of its label."""


def _memory_words(
    config: Mapping[str, Any],
    method: declared.Declared | None,
    several: frozenset[str],
    in_label: Mapping[str, str],
) -> list[str]:
    """Return the memory of a row and its fields, if they differ from the method's declaration.

    They are also shown if they differ among the rows of the method. A label of the user that names
    the memory, with the settings `in_label`, has only those fields.
    """
    memory, options = config.get("memory"), config.get("memory_options") or {}
    words = []
    if "memory" in in_label:
        method = None
    elif "memory" in several or (method is not None and memory != method.memory):
        words.append(f"memory={memory}")
    usual = {} if method is None or memory != method.memory else method.memory_options
    if "memory_options" in several or (method is not None and {**usual, **options} != usual):
        words += [
            f"{name}={text(value)}"
            for name, value in options.items()
            if text(value) not in (in_label.get(name), in_label.get(f"memory.{name}"))
        ]
    return words


def _baselines(
    firsts: Sequence[Run],
    varying: Sequence[str],
    contexts: Sequence[Mapping[str, Any]],
    choices: Sequence[str],
    table: DataFrame,
    values: Mapping[str, Mapping[int, float]],
    preferred: frozenset[str],
) -> Iterator[tuple[str | None, tuple[str, ...]]]:
    """Yield the `none` configuration of each row's budget, and the tuned keys that differ.

    Of several the one with most equal settings that change an uncompressed run (local steps,
    delay, ...), then a preferred one, then most equal `choices`, then most common seeds, then most
    seeds, then most equal keys. Without one of equal budget: the best that differs in tuned keys
    only, of those without a diverged seed and with two seeds in common; without that: None.
    """
    changing_fp32 = [key for key in varying if key in CHANGES_FP32]
    of_methods = [key for key in varying if key in METHOD_KEYS]
    scores = (table["sign"] * table["mean"]).fillna(-math.inf).to_dict()
    diverged = table["diverged"].to_dict()
    equal: dict[str, list[Run]] = {}
    near: dict[str, list[tuple[Run, Mapping[str, Any]]]] = {}
    for run, context in zip(firsts, contexts, strict=True):
        if run.summary.compressor_name == BASELINE:
            equal.setdefault(_budget(context), []).append(run)
            near.setdefault(_budget(context, TUNED_KEYS), []).append((run, context))

    def closeness(other: Run, run: Run) -> tuple[int, bool, int, int, int, int]:
        def alike(keys: Iterable[str]) -> int:
            return sum(other.config.get(key) == run.config.get(key) for key in keys)

        theirs = values[other.method]
        common = len(values[run.method].keys() & theirs.keys())
        settings = alike(changing_fp32), other.method in preferred, alike(choices)
        return *settings, common, len(theirs), alike(of_methods)

    def quality(other: tuple[Run, Mapping[str, Any]], run: Run) -> tuple[bool, int, float]:
        name = other[0].method
        common = len(values[run.method].keys() & values[name].keys())
        return diverged[name] == 0, min(common, 2), scores[name]

    for run, context in zip(firsts, contexts, strict=True):
        if equals := equal.get(_budget(context)):
            best = max(equals, key=partial(closeness, run=run)) if len(equals) > 1 else equals[0]
            yield best.method, ()
        elif nearest := near.get(_budget(context, TUNED_KEYS)):
            best, theirs = max(nearest, key=partial(quality, run=run))
            yield best.method, tuple(key for key in varying if theirs.get(key) != context.get(key))
        else:
            yield None, ()


def _budget(context: Mapping[str, Any], left: frozenset[str] = frozenset()) -> str:
    """Return a key of equal budgets, except for the settings `left` out."""
    settings = {key: value for key, value in context.items() if key not in left}
    return canonical(settings) if settings else ""


def order(value: Any) -> tuple[int, float, str]:
    """Return a sort key for the values of a setting: numbers by size, then other values as text."""
    if isinstance(value, (int, float)):
        return 0, float(value), ""
    return 1, 0.0, canonical(value)


def fp32_target(runs: Sequence[Run], preferred: frozenset[str] = frozenset()) -> float:
    """Return the target that the uncompressed runs set: the median of their last evaluation.

    Runs that diverged are left out: with NaN parameters they still have an accuracy. `preferred`:
    configurations, by `Run.method`; if some are uncompressed, these alone set it.

    Raises:
        UsageError: there is no uncompressed run with evaluations, or of more than one task.
    """
    values = []
    plain = [run for run in runs if run.summary.compressor_name == BASELINE]
    for run in [run for run in plain if run.method in preferred] or plain:
        if run.summary.failed:
            continue
        if curve := run.evaluations():
            loss = curve[-1].get(f"{run.judged_by}_loss", math.inf)
            accuracy = curve[-1].get(f"{run.judged_by}_accuracy")
            if loss is not None:
                values.append(loss if accuracy is None else accuracy)
    if not values or len({run.summary.task for run in runs}) > 1:
        raise UsageError(
            "--target fp32: uncompressed runs (`none`) of one task expected, with their "
            "evaluations; give a number, e.g. --target 0.7, or choose a task by --where"
        )
    return float(statistics.median(values))


def level(
    target: str | None, runs: Sequence[Run], preferred: frozenset[str] = frozenset()
) -> float | None:
    """Return the target as a number: `fp32` is what the uncompressed runs set; see `fp32_target`.

    Raises:
        UsageError: another word, or see `fp32_target`.
    """
    if target is None:
        return None
    if target == "fp32":
        return fp32_target(runs, preferred)
    try:
        number = float(target)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"--target {target}: an accuracy from 0 to 1, a loss, or fp32 expected")
    return number


def rows(
    runs: Sequence[Run],
    target: float | None = None,
    choices: frozenset[str] = frozenset(),
    labels: Sequence[Label] = (),
    preferred: frozenset[str] = frozenset(),
) -> list[ComparisonRow]:
    """Return a row for each configuration: all settings but the seed.

    Rows are sorted by budget, the uncompressed ones first. `target`: an accuracy (a fraction), or a
    loss for tasks without one; rows then contain what a worker had spent when it was met, on
    validation examples where the runs held some out, else on the test split. `choices`: keys of the
    config that each method chooses for itself and that do not belong to the budget. `labels`: the
    user's names for rows; the first match counts. `preferred`: configurations, by `Run.method`,
    that are the baseline if others have an equal budget.

    Raises:
        UsageError: a target that no accuracy can meet.
        GcbenchError: with a target, metrics that cannot be read.
    """
    if not runs:
        return []
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    for group in groups.values():
        group.sort(key=lambda run: run.summary.seed)
    metrics = _metrics(runs)
    if target is not None and "accuracy" in metrics.values() and not 0 < target <= 1:
        raise UsageError(f"--target {target:g}: an accuracy in (0, 1] expected, e.g. 0.9")
    firsts = [group[0] for group in groups.values()]
    varying = _varying([run.config for run in firsts])
    of_budget = [key for key in varying if key not in METHOD_KEYS | choices]
    contexts = _contexts(firsts, sorted(of_budget, key=_context_order))
    chosen = [key for key in varying if key in choices]

    per_run = seeds.per_run([run for group in groups.values() for run in group], metrics, target)
    values = seeds.values(per_run)
    table = seeds.per_config(per_run)
    baselines = list(_baselines(firsts, varying, contexts, chosen, table, values, preferred))
    methods = _labels(firsts, varying, choices, labels)
    columns: dict[str, Any] = {
        "method": [label for label, _ in methods],
        "name": [name for _, name in methods],
        "metric": [metrics[run.summary.task] for run in firsts],
        "context": contexts,
        "choices": [{key: run.config.get(key) for key in chosen} for run in firsts],
        "budget": [_budget(one) for one in contexts],
        "baseline": [baseline for baseline, _ in baselines],
        "tuned": [keys for _, keys in baselines],
    }
    table = table.assign(**columns)
    table["on_front"] = ranks.on_front(per_run, table)
    table = seeds.against_baselines(per_run, table)
    fields_of = [field for field in ComparisonRow.__dataclass_fields__ if field in table.columns]
    statistics_of = zip(*(plain_values(table[field]) for field in fields_of), strict=True)
    phases = {
        str(name).removeprefix("phase "): plain_values(table[name])
        for name in table
        if str(name).startswith("phase ")
    }
    result = [
        ComparisonRow(
            runs=tuple(group),
            values=values[name],
            failed=tuple(run.summary.seed for run in group if run.summary.seed not in values[name]),
            phases={phase: phases[phase][place] for phase in _phases(group)},
            target=target,
            **dict(zip(fields_of, columns_of, strict=True)),
        )
        for place, ((name, group), columns_of) in enumerate(
            zip(groups.items(), statistics_of, strict=True)
        )
    ]
    return sorted(
        result,
        key=lambda row: (
            [order(value) for value in row.context.values()],
            not row.is_baseline,
            row.method,
            [order(value) for value in row.choices.values()],
        ),
    )


def _contexts(runs: Sequence[Run], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the values of the settings `keys` for each run, with `task_options` by field."""
    columns: dict[str, list[Any]] = {}
    for key in keys:
        values = _equalized([run.config.get(key) for run in runs])
        columns |= _task_columns(runs, values) if key == "task_options" else {key: values}
    columns |= _origins(runs)
    return [{key: column[i] for key, column in columns.items()} for i in range(len(runs))]


def _origins(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return digests of the task's code and data, where runs of one task differ in them."""
    tasks = [run.summary.task for run in runs]
    recorded = {
        "task source": [sources(run.summary).get("task") for run in runs],
        "data": [run.summary.provenance.get("data") for run in runs],
    }
    return {
        key: [str(digest)[:8] if digest else "-" for digest in digests]
        for key, digests in recorded.items()
        if len({*zip(tasks, digests, strict=True)}) > len({*tasks})
    }


def _task_columns(runs: Sequence[Run], options: list[Any]) -> dict[str, list[Any]]:
    """Return the task's fields in which runs of one task differ, defaults included.

    `options`: the fields that each run was given. They have a column of their own if the fields do
    not distinguish all of them, as where one run was given a default. "-": not recorded.
    """
    tasks = [run.summary.task for run in runs]
    values_of = [fields_of("task", run.summary) for run in runs]
    settings = {name for run in runs for name in settings_of(run)}
    columns: dict[str, list[Any]] = {}
    for field in dict.fromkeys(chain.from_iterable(one or {} for one in options)):
        values = _equalized([one.get(field, "-") for one in values_of])
        if len({canonical(pair) for pair in zip(tasks, values, strict=True)}) > len(set(tasks)):
            columns[f"task.{field}" if f"task.{field}" in settings else field] = values
    apart = {canonical(one) for one in zip(tasks, *columns.values(), strict=True)}
    wanted = {canonical(one) for one in zip(tasks, options, strict=True)}
    return columns if len(apart) == len(wanted) else {**columns, "task_options": options}


def _phases(runs: Sequence[Run]) -> dict[str, None]:
    return dict.fromkeys([*PHASES, *chain.from_iterable(run.summary.phase_seconds for run in runs)])


def _metrics(runs: Sequence[Run]) -> dict[str, str]:
    """Return the metric of each task: "accuracy" where runs have one, else "test_loss".

    If none of a configuration's runs has an accuracy, but all have a loss, all runs of its task are
    compared by their losses: without an accuracy a run counts as diverged.
    """
    metrics = {run.summary.task: "test_loss" for run in runs}
    has_losses_alone: dict[str, bool] = {}
    for run in runs:
        has_accuracy = _accuracies(run) != (None, None)
        if has_accuracy:
            metrics[run.summary.task] = "accuracy"
        loss = getattr(run.summary, f"{run.result_split}_loss")
        alone = not has_accuracy and loss is not None and not run.summary.failed
        has_losses_alone[run.method] = alone and has_losses_alone.get(run.method, True)
    by_loss = {run.summary.task for run in runs if has_losses_alone[run.method]}
    return metrics | dict.fromkeys(by_loss, "test_loss")


def _accuracies(run: Run) -> tuple[float | None, float | None]:
    return run.summary.test_accuracy, run.summary.validation_accuracy


def _context_order(key: str) -> tuple[int, str]:
    first = ("task", "task_options", "workers", "steps", "batch", "optimizer", "lr")
    return (first.index(key) if key in first else len(first)), key


# ---- tiers and ranks ----------------------------------------------------------------------------


def ranked(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows with their places in their tier and budget, and whether one beats them.

    See `ranks.places` and `ranks.pairwise`. A tier is not ranked while one of its rows has open
    settings or too few runs, because the places of the others depend on it. A row with a diverged
    seed has no place, and the others are ranked without it: its mean is that of the seeds that
    did not diverge.
    """
    import pandas as pd

    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if row.tier is not None:
            groups.setdefault(canonical([row.tier, row.context]), []).append(i)
    ranked_rows = list(rows)
    for members in groups.values():
        too_few = any(rows[i].n + len(rows[i].failed) < ranks.LEAST_SEEDS for i in members)
        is_open = any(rows[i].settings_open for i in members)
        for i in members:
            ranked_rows[i] = replace(ranked_rows[i], rank="-")
        members = [i for i in members if not rows[i].failed]
        if too_few or is_open or not members:
            continue
        values = pd.DataFrame({i: rows[i].values for i in members})
        sign = 1 if rows[members[0]].metric == "accuracy" else -1
        examples = rows[members[0]].examples or math.nan
        better = ranks.pairwise(values, sign, examples) > 0
        sizes = pd.Series({i: rows[i].payload for i in better.index})
        for i, rank in zip(members, ranks.places(values, sign, examples), strict=True):
            beaten = i in better and bool((better[i] & (sizes <= rows[i].payload)).any())
            ranked_rows[i] = replace(ranked_rows[i], rank=rank, beaten=beaten)
    return ranked_rows


# ---- what a command asks for --------------------------------------------------------------------


class Asked(NamedTuple):
    """The options of a comparison, as given on the command line."""

    conditions: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Setting -> the values allowed."""
    target: str | None = None
    by: str | None = None
    format: str = "table"
    sort: str = ""
    """One of `tables.SORTS`: the best row comes first, or the worst with "-" before the name."""
    columns: Sequence[str] = ()
    """Beginnings of headings; empty: all columns in which rows differ."""
    width: str = ""
    """"single" or "double": the column of a paper."""
    labels: Sequence[Label] = ()
    details: bool = False
    lines: int = LINES
    """Of a table without `details`."""


def chosen(
    runs: Sequence[Run],
    asked: Asked,
    choices: frozenset[str] = frozenset(),
    complete: Callable[[list[ComparisonRow]], list[ComparisonRow]] = list,
    preferred: frozenset[str] = frozenset(),
) -> list[ComparisonRow]:
    """Return the requested rows, maybe none; `choices` and `preferred` as for `rows`.

    `complete` adds to all rows, before any is left out, what it takes all of them to know.

    Raises:
        UsageError: see `level` and `rows`.
    """
    runs, meets = where(runs, asked.conditions)
    if not runs:
        return []
    target = level(asked.target, runs, preferred)
    every = rows(runs, target, choices, asked.labels, preferred)
    return [row for row in complete(every) if meets(row.runs[0])]


def render(rows: Sequence[ComparisonRow], asked: Asked, title: str = "") -> str:
    """Return the rows as text; those of a suite with tiers have a table for each.

    A `title` stands above tables, not in CSV or JSON. Without `asked.details` a table has at most
    `asked.lines` lines.
    """
    from gcbench.report import brief, tables

    if asked.format == "table" and not asked.details:
        return brief.render(rows, asked, title, tables.columns())
    tiers = asked.by is None and any(row.tier is not None for row in rows)
    text = tables.render(rows, asked.format, by="tier" if tiers else asked.by, asked=asked)
    if not title or asked.format in ("csv", "json"):
        return text
    return f"{sentence(title, asked.format, tables.columns())}\n\n{text}"


# ---- filters and groups --------------------------------------------------------------------------


def settings_of(run: Run) -> dict[str, Any]:
    """Return the settings for conditions: config, and the fields of method, task and memory.

    A field with the name of another setting, or of a field of an earlier part, is under its part's
    name instead, such as `memory.decay`.
    """
    nested = ("options", "task_options", "memory_options")
    config = {key: value for key, value in run.config.items() if key not in nested}
    config |= {"compressor": run.summary.compressor_name, "seed": run.summary.seed}
    settings: dict[str, Any] = {}
    for part in ("compressor", "task", "memory"):
        options = fields(run.summary) if part == "compressor" else fields_of(part, run.summary)
        taken = config.keys() | settings.keys()
        settings |= {f"{part}.{k}" if k in taken else k: value for k, value in options.items()}
    return settings | config


def value_of(run: Run, key: str) -> str:
    """Return the value of a setting as text; "-" for a run whose parts have no such field."""
    settings = settings_of(run)
    return text(settings[key]) if key in settings else "-"


def plugin_name(key: str, value: str) -> str:
    """Return the value of a setting; of a compressor or memory in a file, its name."""
    is_file = key in ("compressor", "memory") and value.endswith(".py")
    return Path(value).stem if is_file else value


def _check_setting(key: str, runs: Sequence[Run]) -> None:
    keys = {key for run in runs for key in settings_of(run)}
    if key not in keys:
        raise unknown("setting", key, keys)


def check(runs: Sequence[Run], conditions: Mapping[str, Sequence[str]]) -> None:
    """Check the conditions of `where`.

    Raises:
        UsageError: a setting that no run has, or a value that none has.
    """
    firsts = list({run.method: run for run in runs}.values())
    for key, values in conditions.items():
        _check_setting(key, firsts)
        present = {value_of(run, key) for run in (runs if key == "seed" else firsts)}
        if missing := [value for value in values if plugin_name(key, value) not in present]:
            others = {name for run in firsts for name in settings_of(run)} - {key}
            alike = sorted(name for name in others if name.endswith(f".{key}"))
            hint = f"Other settings of this name: {', '.join(alike)}." if alike else ""
            raise unknown(key, ", ".join(missing), present, hint)


def where(
    runs: Sequence[Run], conditions: Mapping[str, Sequence[str]]
) -> tuple[list[Run], Callable[[Run], bool]]:
    """Return the runs to make rows of, and whether the row of a run is to be shown.

    `conditions`: setting -> the values allowed, as the command line writes them. A condition on the
    seed or the task selects runs, before means are taken. Every other one selects rows, once they
    are made: the baseline of a row may be one that is not shown.
    """

    def meets(run: Run, key: str) -> bool:
        return value_of(run, key) in conditions[key]

    conditions = {
        key: [plugin_name(key, value) for value in values] for key, values in conditions.items()
    }
    first = conditions.keys() & {"seed", "task"}
    selected = [run for run in runs if all(meets(run, key) for key in first)]
    later = conditions.keys() - first

    def shown(run: Run) -> bool:
        return all(meets(run, key) for key in later)

    return selected, shown


def by(rows: Sequence[ComparisonRow], key: str) -> dict[str, list[ComparisonRow]]:
    """Return the rows by the value of a setting, as text; tiers come with the most bits first.

    Raises:
        UsageError: a setting that no run has, or the seed where a row has several.
    """
    if key == "seed" and any(len(row.runs) > 1 for row in rows):
        raise UsageError("--by seed: rows have several seeds; choose one with --where seed=0")
    groups: dict[str, list[ComparisonRow]] = {}
    tiers = key == "tier" and any(row.tier is not None for row in rows)
    if not tiers:
        _check_setting(key, [row.runs[0] for row in rows])
    for row in rows:
        value = (row.tier or "outside the tiers") if tiers else value_of(row.runs[0], key)
        groups.setdefault(value, []).append(row)
    if tiers:
        most = {name: max(row.bits_up or 0.0 for row in group) for name, group in groups.items()}
        return dict(sorted(groups.items(), key=lambda group: -most[group[0]]))
    return groups
