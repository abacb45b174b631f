"""Suites: a paper's table or figure as a grid of runs, with the published number of each.

A suite is a YAML file, in this folder by name, or elsewhere by path. `config` has the settings of
all entries, and each entry adds settings; both have the keys of `gcbench run --config`, and lists
define a grid. `published` is the test accuracy, a fraction of 1: one number for the grid of the
entry, or one per value of the setting in `by`. null means that the paper does not report a number,
or that its figure cannot be read. `published_top5` is the top-5 accuracy, for tasks that measure
`test_top5`. A run of a suite equals a run with its settings as flags.

gcbench's suites without published numbers compare methods by `gcbench help protocol`. `tune` is the
rule that chooses each entry's learning rate (`tuning`), and `tiers` are ranges of measured bits per
element, up, within which methods are compared. `shares` lists built-in suites that have some of
its runs, whose rows can be reused.

An entry with `factors` has a point for each combination of their values, a group. The rule chooses
one point of the group, which is run with all seeds. So is the combination of the method's source:
that of `config` with the settings of `as_published`. An entry with `tuned: false` sets its rate. A
suite with `settings_from` runs entries of another suite, selected by their published settings, with
the settings chosen there; it may only set FREE settings.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gcbench.core import registry, schedule, settings_file
from gcbench.core.errors import GcbenchError, UsageError, unknown
from gcbench.core.values import canonical, text
from gcbench.results import rows
from gcbench.results.settings import SET_FLAGS, TUNED_KEYS
from gcbench.results.suites import FOLDER
from gcbench.results.suites import names as names
from gcbench.training import grid
from gcbench.training.configuration import Config
from gcbench.training.suites.tuning import Trial, Tune, decide_among, quality

ROWS = Path("results/reference")
"""Folder of the committed rows of suites, NAME.parquet."""
FREE = frozenset(
    {
        *("seed", "steps", "eval_every", "log_every", "engine", "gradients", "threads", "device"),
        *("backend", "on_nonfinite", "link_gbit", "link_latency_us"),
    }
)
"""Settings that do not determine the entry of a run: budget, engine, machine."""

Steps = Annotated[int, Field(ge=1)]


class Published(NamedTuple):
    """A paper's result for a run, and its source."""

    accuracy: float | None
    """Test accuracy, a fraction of 1; None if it cannot be read."""
    steps: int
    """The steps of the paper's run, at the same batch."""
    paper: str
    """The paper, with its table or figure."""
    place: str | None
    """The place in the table or figure."""
    suite: str
    """The name of the suite."""
    differs: str
    """How the suite differs from the paper."""
    top5: float | None = None
    """Top-5 test accuracy, a fraction of 1; None where the paper does not report it."""
    loss: float | None = None
    """Test loss; None where the paper reports an accuracy."""

    @property
    def source(self) -> str:
        """Paper and place."""
        return ", ".join(filter(None, [self.paper, self.place]))


@dataclass(frozen=True)
class Point:
    """One run of a suite."""

    config: Config
    entry: int
    """The number of its entry in the suite, from 1."""
    settings: Mapping[str, Any]
    """The settings of the entry, without those of the suite."""
    published: Published | None
    tune: Tune | None = None
    """The rule that chooses the learning rate; until then `config` has one of its rates."""
    group: str = ""
    """The key of the alternatives of one method."""
    as_published: bool = True
    """Whether it has the settings of the method's source, except the learning rate."""

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """The config as JSON, with every field of compressor, task and memory, without FREE.

        It has no learning rate if trials choose it.
        """
        settings = resolved(self.config)
        return {k: v for k, v in settings.items() if self.tune is None or k not in self.tune.free}

    @cached_property
    def identity(self) -> str:
        """The key of runs that differ only in FREE settings (or in a tuned rate)."""
        return canonical(self.resolved)

    @property
    def tried_as(self) -> tuple[str, int]:
        """The key of the points whose settings the same trials choose: `group` and their steps."""
        trial_steps = None if self.tune is None else self.tune.steps
        return self.group, trial_steps or self.config.steps


class Entry(BaseModel):
    """A grid of runs, and the published numbers for them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: dict[str, Any]
    by: str | None = None  # the setting whose values are the keys of `published`
    published: float | dict[int | float | str, float | None] | None = None
    published_top5: float | None = None
    published_loss: Annotated[float, Field(gt=0)] | None = None  # of a task without accuracy
    start: list[float] | None = None  # rates that are tried first, in place of those of `tune`
    factors: list[str] = []  # names in the factors of `tune`, whose values are alternatives
    as_published: dict[str, Any] = {}  # settings of the source that differ from `config`
    tuned: bool = True  # false: the entry sets its rate
    place: str | None = None  # within the suite's table or figure
    paper_steps: Steps | None = None  # of the published number; None: the suite's

    @field_validator("published", "published_top5", mode="before")
    @classmethod
    def _are_fractions(cls, numbers: Any) -> Any:
        for number in numbers.values() if isinstance(numbers, dict) else [numbers]:
            right = isinstance(number, int | float) and 0 <= number <= 1
            if number is not None and not right:
                raise ValueError(f"accuracy {number!r}: expected a fraction of 1, or null")
        return numbers

    @model_validator(mode="after")
    def _numbers_have_their_setting(self) -> Entry:
        if (self.by is not None) != isinstance(self.published, dict):
            raise ValueError(
                "`by` is the setting whose values `published` maps to numbers: give both or neither"
            )
        if self.by is not None and (self.by in self.config or self.by in FREE | {*grid.NESTED}):
            raise ValueError(
                f"by {self.by!r}: expected a setting that `config` does not set, e.g. workers, and "
                "neither a budget nor a mapping"
            )
        return self

    def cells(self) -> Iterator[tuple[dict[str, Any], float | None]]:
        """Yield settings, which may be a grid, and their published accuracy."""
        if not isinstance(self.published, dict):
            yield self.config, self.published
            return
        for value, accuracy in self.published.items():
            yield {**self.config, str(self.by): value}, accuracy


class Suite(BaseModel):
    """A table or figure of a paper, or a comparison by gcbench, as a grid of runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    file: Path
    title: str
    source: str
    place: str
    differs: str
    takes: str | None = None  # duration and machine
    shares: list[str] = []  # names of suites that have some of its runs
    version: Annotated[int, Field(ge=1)] = 1  # increased when the definition changes results
    paper_steps: Steps | None = None
    tune: Tune | None = None
    settings_from: str | None = None  # name of the suite that chooses the settings
    varies: list[str] = []  # settings that may differ between an entry and its baseline
    tiers: dict[str, tuple[float, float]] = {}  # minimum and maximum bits per element, up, by name
    config: dict[str, Any] = {}
    entries: list[Entry] = Field(min_length=1)

    @property
    def paper(self) -> str:
        """The paper, and its table or figure."""
        return f"{self.source}, {self.place}"

    @field_validator("shares")
    @classmethod
    def _are_suites(cls, shared: list[str]) -> list[str]:
        for name in shared:
            if name not in names():
                raise ValueError(f"{name!r} is not a built-in suite: {', '.join(names())}")
        return shared

    @model_validator(mode="after")
    def _takes_baseof_a_suite_that_tunes(self) -> Suite:
        if self.settings_from is None:
            return self
        if self.settings_from not in names() or load(self.settings_from).tune is None:
            tuned = ", ".join(name for name in names() if load(name).tune is not None)
            raise ValueError(f"settings_from {self.settings_from!r}: expected one of {tuned}")
        if self.tune is not None:
            raise ValueError("settings_from and tune: the other suite's rule applies; remove tune")
        if beyond := self.config.keys() - FREE:
            raise ValueError(
                f"config has {', '.join(sorted(beyond))}: with settings_from it may only have "
                f"{', '.join(sorted(FREE))}"
            )
        return self

    @property
    def tunes(self) -> bool:
        """Whether trials choose settings, here or in the suite of `settings_from`."""
        return self.tune is not None or self.settings_from is not None

    @property
    def choices(self) -> frozenset[str]:
        """The settings that may differ between an entry and its baseline."""
        return frozenset(self.varies) | (TUNED_KEYS if self.tunes else frozenset())

    @property
    def asked(self) -> str:
        """The suite's name or file, as for --suite."""
        return self.name if self.file.parent == FOLDER else str(self.file)

    def points(self, settings: Mapping[str, Any] | None = None) -> list[Point]:
        """Return the distinct runs.

        `settings`: as for `grid.expand`. Those in FREE replace the suite's; the others select the
        runs with these values.

        Raises:
            UsageError: no run has such a setting or value, or an entry of the file is invalid.
        """
        settings = settings or {}
        if self.tunes and "lr" in settings:
            raise UsageError(
                f"suite {self.name!r} chooses the learning rate by trials; remove --lr"
            )
        changed = {key: value for key, value in settings.items() if key in FREE}
        chosen = [*_conditions({k: v for k, v in settings.items() if k not in FREE})]
        points = self._expanded(changed) if changed else self._every
        for condition in chosen:
            condition.check(self.name, points)
        selected = [point for point in points if all(c.holds(point) for c in chosen)]
        if not selected:
            words = " ".join(condition.words for condition in chosen)
            raise UsageError(f"no run of suite {self.name!r} matches all of {words}")
        return selected

    @cached_property
    def _every(self) -> list[Point]:
        return self._expanded({})

    def _expanded(self, changed: Mapping[str, Any]) -> list[Point]:
        return [point for cell in self._cells(changed) for point in cell]

    def runs(self, settings: Mapping[str, Any]) -> Generator[Config, Mapping[str, Any], None]:
        """Yield the configs to run, seed by seed; the generator receives the summary of each.

        All trials come first, for each number of steps. If `settings` selects a part of a group,
        the whole group is tuned, and the selected points are run that are chosen or as published.
        """
        points = sorted(self.points(settings), key=lambda point: point.config.seed)
        groups: dict[tuple[str, int], dict[str, Point]] = {}
        for point in self.points({key: value for key, value in settings.items() if key in FREE}):
            groups.setdefault(point.tried_as, {}).setdefault(point.identity, point)
        rates: dict[tuple[str, int], dict[str, float]] = {}
        for key in dict.fromkeys(p.tried_as for p in points if p.tune is not None):
            rates[key] = yield from _tuned([*groups[key].values()])
        for point in points:
            if point.tune is None:
                yield point.config
            elif rate := rates[point.tried_as].get(point.identity):
                yield point.config.model_copy(update={"lr": rate})

    def label(self) -> str:
        """Return name/version, the label of the rows of this version."""
        return f"{self.name}/{self.version}"

    def adopt(self, path: Path) -> int:
        """Relabel rows of other versions that are runs or trials of this one; return their number.

        Raises:
            GcbenchError: the file of rows cannot be read or written.
        """
        identities = {point.identity for point in self.points()}
        frees = {point.tune.free if point.tune else frozenset() for point in self.points()}

        def belongs(row: Mapping[str, Any]) -> bool:
            try:
                every = resolved(Config.model_validate(row["config"]))
            except (GcbenchError, ValidationError):
                return False
            return any(
                canonical({k: v for k, v in every.items() if k not in free}) in identities
                for free in frees
            )

        return rows.relabel(path, self.label(), belongs)

    def tier(self, bits: float) -> str | None:
        """Return the tier of these measured bits per element, up, or None."""
        for name, (low, high) in self.tiers.items():
            if low <= bits <= high:
                return name
        return None

    def _cells(self, changed: Mapping[str, Any]) -> Iterator[list[Point]]:
        """Yield the runs of each published number, with `changed` settings replaced."""
        if self.settings_from is not None:
            yield from self._chosen_elsewhere(load(self.settings_from), changed)
            return
        owners: dict[str, int] = {}
        for number, entry in enumerate(self.entries, 1):
            steps = entry.paper_steps or self.paper_steps
            if steps is None and (entry.published, entry.published_loss) != (None, None):
                raise UsageError(f"suite {self.name!r}, entry {number}: paper_steps is missing")
            tune = self._tune(number, entry)
            for base, accuracy in entry.cells():
                published = None
                if steps is not None:
                    published = Published(
                        accuracy,
                        steps,
                        self.paper,
                        entry.place,
                        self.name,
                        self.differs,
                        entry.published_top5,
                        entry.published_loss,
                    )
                try:
                    cell = [*self._alternatives(number, entry, base, tune, published, changed)]
                except (UsageError, ValueError) as error:
                    raise UsageError(f"suite {self.name!r}, entry {number}: {error}") from error
                for identity in {point.identity for point in cell}:
                    if identity in owners:
                        raise UsageError(
                            f"suite {self.name!r}: entries {owners[identity]} and {number} have "
                            "the same run; remove one"
                        )
                    owners[identity] = number
                yield cell

    def _alternatives(
        self,
        number: int,
        entry: Entry,
        base: Mapping[str, Any],
        tune: Tune | None,
        published: Published | None,
        changed: Mapping[str, Any],
    ) -> Iterator[Point]:
        """Yield the points of an entry: a group of alternatives per config of its grid."""
        rate = {} if tune is None else {"lr": tune.start[len(tune.start) // 2]}

        def expand(settings: Mapping[str, Any]) -> list[Config]:
            return grid.expand({**self._with(base, settings), **rate, **changed}, None)

        if tune is None or not entry.factors:
            if entry.factors or entry.as_published:
                raise UsageError("factors and as_published need an entry that is tuned")
            for one in expand({}):
                point = Point(one, number, base, published, tune)
                yield replace(point, group=point.identity)
            return
        alternatives = []
        for settings in tune.alternatives(entry.factors):
            start = settings.pop("start", None)
            rule = tune if start is None else tune.model_copy(update={"start": start})
            both = self._with(base, settings, suite=False)
            alternatives.append(
                [Point(one, number, both, published, rule) for one in expand(settings)]
            )
        for origin, *group in zip(expand(entry.as_published), *alternatives, strict=True):
            name = Point(origin, number, base, published, tune).identity
            if name not in {point.identity for point in group}:
                raise UsageError(
                    f"as_published {entry.as_published}: expected values of "
                    f"{', '.join(entry.factors)}"
                )
            for point in group:
                yield replace(point, group=name, as_published=point.identity == name)

    def _chosen_elsewhere(self, other: Suite, changed: Mapping[str, Any]) -> Iterator[list[Point]]:
        """Yield the runs of each entry, with all alternatives of the other suite's group."""
        assert other.tune is not None, "the suite of settings_from tunes"
        theirs = other.points()
        seed = theirs[0].config.seed
        for number, entry in enumerate(self.entries, 1):
            chosen = [*_conditions(entry.config)]
            published = [p for p in theirs if p.as_published and all(c.holds(p) for c in chosen)]
            groups = {point.group for point in published}
            if len(groups) != 1:
                raise UsageError(
                    f"suite {self.name!r}, entry {number}: {len(groups)} entries of suite "
                    f"{other.name} match {' '.join(c.words for c in chosen)}; expected one"
                )
            cell = []
            for point in theirs:
                if point.group not in groups or point.config.seed != seed or point.tune is None:
                    continue
                rule = point.tune.model_copy(
                    update={"steps": point.tune.steps or point.config.steps}
                )
                origin = point.config.model_dump(exclude={"task_version", *self.config, *changed})
                cell += [
                    Point(one, number, point.settings, None, rule, point.group, as_published=False)
                    for one in grid.expand({**_as_given(origin), **self.config, **changed}, None)
                ]
            yield cell

    def _tune(self, number: int, entry: Entry) -> Tune | None:
        """Return the rule for an entry's learning rate, with the entry's `start`."""
        if not entry.tuned:
            return None
        if self.tune is None or entry.start is None:
            if entry.start is not None:
                raise UsageError(f"suite {self.name!r}, entry {number}: start without tune")
            tune = self.tune
        else:
            try:
                self.tune.check(entry.start)
            except ValueError as error:
                raise UsageError(f"suite {self.name!r}, entry {number}: {error}") from None
            tune = self.tune.model_copy(update={"start": entry.start})
        if tune is not None and ("lr" in self.config or "lr" in entry.config):
            raise UsageError(
                f"suite {self.name!r}, entry {number}: tune chooses lr; remove lr, or add "
                "`tuned: false`"
            )
        return tune

    def _with(
        self, entry: Mapping[str, Any], more: Mapping[str, Any], *, suite: bool = True
    ) -> dict[str, Any]:
        """Return the suite's settings, overridden by an entry's, then by `more`."""
        layers = [self.config, entry, more] if suite else [entry, more]
        merged = {key: value for layer in layers for key, value in layer.items()}
        for key in grid.NESTED:
            parts = [layer.get(key) or {} for layer in layers]
            for part in parts:
                if not isinstance(part, dict):
                    raise UsageError(f"{key}={part!r}: expected a mapping of fields")
            if suite or any(parts):
                merged[key] = {name: value for part in parts for name, value in part.items()}
        return merged

    def sets(self, key: str, field: str | None = None) -> bool:
        """Return whether the suite sets `key`, or the `field` of a mapping `key`."""
        if self.settings_from is not None:
            return load(self.settings_from).sets(key, field)
        factors = [] if self.tune is None else [*itertools.chain(*self.tune.factors.values())]
        every = [self.config, *(entry.config for entry in self.entries), *factors]
        if field is not None:
            return any(field in (config.get(key) or {}) for config in every)
        return any(key in config for config in every) or any(key == e.by for e in self.entries)


def _tuned(group: Sequence[Point]) -> Generator[Config, Mapping[str, Any], dict[str, float]]:
    """Yield the trials of a group and receive their summaries.

    Return the rates of the points to run (the best, and those as published), by identity.
    """
    rules = [point.tune for point in group if point.tune is not None]
    assert len(rules) == len(group) > 0, "the points of a group are tuned"
    tried: list[dict[Trial, float]] = [{} for _ in group]
    while True:
        decision = decide_among(rules, tried, group[0].config.steps)
        if decision.trial is None:
            return {
                point.identity: rate
                for number, (point, rate) in enumerate(zip(group, decision.rates, strict=True))
                if number == decision.best or point.as_published
            }
        number, trial = decision.trial
        tried[number][trial] = quality((yield rules[number].trial(group[number].config, trial)))


def _as_given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a config's values for `grid.expand`: a sequence is wrapped in a list."""
    return {k: [list(v)] if k in grid.SEQUENCES else v for k, v in config.items()}


# ---- the settings of a run -----------------------------------------------------------------------


def resolved(config: Config) -> dict[str, Any]:
    """Return a config as JSON, with every field of compressor, task and memory, without FREE.

    Schedules have the syntax of the command line.
    """
    dumped = config.model_dump(mode="json")
    settings = {key: value for key, value in dumped.items() if key not in FREE}
    owners = {
        "options": config.make_compressor(),
        "task_options": config.make_task(),
        "memory_options": config.make_memory(),
    }
    for key, owner in owners.items():
        every = {name: getattr(owner, name) for name in registry.fields(type(owner))}
        settings[key] = every | {
            name: schedule.text(value) if isinstance(value, Mapping) else value
            for name, value in settings[key].items()
        }
    return settings


class _Condition(NamedTuple):
    """A setting (or, if `field` is given, a field of it) and the values that select a run."""

    key: str
    field: str | None
    values: Sequence[Any]

    def of(self, point: Point) -> Any:
        """Return the value that a run has; `_ABSENT` if it has no such setting or field."""
        value = point.resolved.get(self.key, _ABSENT)
        return value if self.field is None else value.get(self.field, _ABSENT)

    def holds(self, point: Point) -> bool:
        """Return whether a run has one of the values, compared as text."""
        return text(self.of(point)) in map(text, self.values)

    @property
    def words(self) -> str:
        """The condition as a flag of the command line."""
        values = ",".join(map(text, self.values))
        if self.field is None:
            return f"--{self.key.replace('_', '-')} {values}"
        return f"{SET_FLAGS[self.key]} {self.field}={values}"

    def check(self, suite: str, points: Sequence[Point]) -> None:
        """Raise UsageError if no run has the setting, or none has one of the values."""
        present = dict.fromkeys(text(v) for p in points if (v := self.of(p)) is not _ABSENT)
        if not present:
            if self.field is None:
                raise UsageError(f"suite {suite!r} chooses {self.key}; remove the setting")
            choices = {name for p in points for name in p.resolved[self.key]}
            raise unknown(f"field of suite {suite}:", str(self.field), choices)
        missing = [value for value in map(text, self.values) if value not in present]
        if missing:
            raise UsageError(
                f"{self.words}: suite {suite!r} has no run with {', '.join(missing)}, only with "
                f"{', '.join(present)}; settings other than budget, engine and machine select "
                "among its runs"
            )


_ABSENT = object()


def _conditions(settings: Mapping[str, Any]) -> Iterator[_Condition]:
    """Yield the conditions for given settings."""
    for key, value in settings.items():
        if key in grid.NESTED:
            for field, choice in value.items():
                values = choice if isinstance(choice, list) else [choice]
                texts = [schedule.text(v) if isinstance(v, Mapping) else v for v in values]
                yield _Condition(key, field, texts)
        else:
            values = grid.choices(key, value)
            if key == "compressor":
                values = [registry.add_file(str(v)) for v in values]
            yield _Condition(key, None, values)


# ---- files ---------------------------------------------------------------------------------------


def load(name: str) -> Suite:
    """Return the suite of that name, or in that file.

    Raises:
        UsageError: an unknown name; a file that is missing or invalid.
    """
    if not name:
        raise UsageError(f"--suite is empty: expected a name ({', '.join(names())}) or a file")
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return _read(name, Path(name))
    if name not in names():
        raise unknown("suite", name, names(), "For a file, give its path: my.yaml.")
    return _builtin(name, FOLDER)


@cache
def _builtin(name: str, folder: Path) -> Suite:
    """Return a built-in suite, cached."""
    return _read(name, folder / f"{name}.yaml")


def _read(name: str, path: Path) -> Suite:
    content = settings_file.read(path, "--suite")
    for key in ("name", "file"):
        if key in content:
            raise UsageError(f"--suite {name}: {key!r} comes from the file's path; remove it")
    try:
        suite = Suite(name=path.stem, file=path, **content)
    except (ValidationError, TypeError) as error:
        raise UsageError(f"--suite {name}: {_problems(error)}") from None
    suite.points()
    return suite


def _problems(error: ValidationError | TypeError) -> str:
    """Return the problems of a file in one line."""
    if isinstance(error, TypeError):  # a key that is not a string
        return "keys must be names: title, source, place, differs, config, entries"
    problems = []
    for problem in error.errors():
        message, place = problem["msg"].removeprefix("Value error, "), problem["loc"]
        if problem["type"] == "extra_forbidden":
            message = f"unknown key; expected {', '.join(_KEYS[len(place) > 1])}"
        where = [f"entry {p + 1}" if isinstance(p, int) else str(p) for p in place[-2:]]
        problems.append(f"{', '.join(where)}: {message[0].lower()}{message[1:]}")
    return "; ".join(problems)


_KEYS = (sorted(Suite.model_fields.keys() - {"name", "file"}), sorted(Entry.model_fields))
