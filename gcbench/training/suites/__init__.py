"""Suites: a paper's table or figure as a grid of runs, with the published number of each.

A suite is a YAML file, found by name in this folder, or by path elsewhere. `config` has the
settings that all entries share, each entry adds its own; both have the keys of `gcbench run
--config`, and lists make a grid. `published` is the test accuracy, a fraction of 1: one number for
the whole grid of the entry, or one for each value of the setting that `by` names. null stands for a
number that the paper does not have, or from whose figure it cannot be read. `published_top5` is the
top-5 accuracy, for tasks that measure `test_top5`. A run of a suite is the same as a run with its
settings given by flags.

A suite of gcbench's own has no published numbers: it follows `gcbench help protocol`.
`tune` is the rule by which each entry's learning rate is chosen (`tuning`), and `tiers` are ranges
of measured bits an element, up, within which methods are compared. `shares` names suites of
gcbench's own that have some of its runs: their rows are given beside its own, so that nothing is
trained twice.

An entry with `factors` has a point for each combination of their values; its group is all of them.
The rule chooses one of the group, which is run with all seeds. So is the combination that the
method's source has: that of `config` with the settings of `as_published`. An entry with `tuned:
false` sets a rate itself. A suite with `settings_from` runs entries of another suite, selected by
their settings as published, with the settings chosen there, and only FREE ones of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gcbench.core import registry, schedule
from gcbench.core.errors import GcbenchError, UsageError, unknown
from gcbench.core.values import canonical, text
from gcbench.results import rows
from gcbench.results.settings import SET_FLAGS, TUNED_KEYS
from gcbench.results.suites import FOLDER
from gcbench.results.suites import names as names
from gcbench.training import grid
from gcbench.training.configuration import Config
from gcbench.training.suites.tuning import Choice, Decision, Trial, Tune, decide_among, quality

ROWS = Path("results/reference")
"""Where the committed rows of suites are, in gcbench's folder: NAME.parquet."""
FREE = frozenset(
    {
        *("seed", "steps", "eval_every", "log_every", "engine", "gradients", "threads", "device"),
        *("backend", "on_nonfinite", "link_gbit", "link_latency_us"),
    }
)
"""Settings that do not decide to which entry of a suite a run belongs: budget, engine, machine."""

Steps = Annotated[int, Field(ge=1)]


class Published(NamedTuple):
    """What a paper reports for a run, and where."""

    accuracy: float | None
    """Test accuracy, a fraction of 1; None where it cannot be read."""
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
    """The settings that come from the entry, not from the suite."""
    published: Published | None
    tune: Tune | None = None
    """The rule by which the learning rate is chosen; until then `config` has one of its rates."""
    group: str = ""
    """Text that all alternatives of one method have in common."""
    as_published: bool = True
    """Whether it has the settings of the method's source, apart from the learning rate."""

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """The config as JSON, with every field of compressor, task and memory, without FREE.

        It has no learning rate where that is chosen by trials.
        """
        known = resolved(self.config)
        return {k: v for k, v in known.items() if self.tune is None or k not in self.tune.free}

    @cached_property
    def identity(self) -> str:
        """Text that two runs share if they differ only in FREE settings (or in a tuned rate)."""
        return canonical(self.resolved)

    def trial(self, trial: Trial) -> Config:
        """Return the run of a trial."""
        assert self.tune is not None, "a point without a rule has no trials"
        return self.tune.trial(self.config, trial)

    def choose(self, tried: Mapping[Trial, float]) -> Choice:
        """Return the rate to take or the next trial, given the result of each trial made."""
        assert self.tune is not None, "a point without a rule has no trials"
        return self.tune.choose(tried, self.config.steps)

    def with_rate(self, lr: float) -> Config:
        """Return the run with the chosen learning rate."""
        return self.config.model_copy(update={"lr": lr})


class Entry(BaseModel):
    """A grid of runs, and the published numbers for them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: dict[str, Any]
    by: str | None = None  # the setting for whose values `published` has numbers
    published: float | dict[int | float | str, float | None] | None = None
    published_top5: float | None = None
    start: list[float] | None = None  # rates that are tried first, in place of those of `tune`
    factors: list[str] = []  # names in the factors of `tune`, whose values are alternatives
    as_published: dict[str, Any] = {}  # settings of the source, where `config` has others
    tuned: bool = True  # false: the entry sets its rate
    place: str | None = None  # within the suite's table or figure
    paper_steps: Steps | None = None  # of the published number; None: the suite's

    @field_validator("published", "published_top5", mode="before")
    @classmethod
    def _are_fractions(cls, given: Any) -> Any:
        for number in given.values() if isinstance(given, dict) else [given]:
            right = isinstance(number, int | float) and 0 <= number <= 1
            if number is not None and not right:
                raise ValueError(f"an accuracy is a fraction of 1, or null: {number!r} came")
        return given

    @model_validator(mode="after")
    def _numbers_have_their_setting(self) -> Entry:
        if (self.by is not None) != isinstance(self.published, dict):
            raise ValueError(
                "`by` names the setting whose values `published` maps to numbers: both or neither"
            )
        if self.by is not None and (self.by in self.config or self.by in FREE | {*grid.NESTED}):
            raise ValueError(
                f"by {self.by!r}: a setting expected that `config` leaves open, e.g. workers, and "
                "neither a budget nor a mapping"
            )
        return self

    def cells(self) -> Iterator[tuple[dict[str, Any], float | None]]:
        """Yield settings, which may still be a grid, and the accuracy published for them."""
        if not isinstance(self.published, dict):
            yield self.config, self.published
            return
        for value, accuracy in self.published.items():
            yield {**self.config, str(self.by): value}, accuracy


class Suite(BaseModel):
    """A table or figure of a paper, or a comparison of gcbench's own, as a grid of runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    file: Path
    title: str
    source: str
    place: str
    differs: str
    takes: str | None = None  # how long, on which machine
    shares: list[str] = []  # names of suites that have some of its runs
    version: Annotated[int, Field(ge=1)] = 1  # increased when the definition changes results
    paper_steps: Steps | None = None
    tune: Tune | None = None
    settings_from: str | None = None  # name of the suite that chooses the settings
    own: list[str] = []  # settings in which an entry may differ from its baseline
    tiers: dict[str, tuple[float, float]] = {}  # name -> least and most bits an element, up
    config: dict[str, Any] = {}
    entries: list[Entry] = Field(min_length=1)

    @property
    def paper(self) -> str:
        """The paper, and where in it."""
        return f"{self.source}, {self.place}"

    @field_validator("shares")
    @classmethod
    def _are_suites(cls, given: list[str]) -> list[str]:
        for name in given:
            if name not in names():
                raise ValueError(f"{name!r} is no suite of gcbench's own: {', '.join(names())}")
        return given

    @model_validator(mode="after")
    def _takes_settings_of_a_suite_that_tunes(self) -> Suite:
        if self.settings_from is None:
            return self
        if self.settings_from not in names() or load(self.settings_from).tune is None:
            tuned = ", ".join(name for name in names() if load(name).tune is not None)
            raise ValueError(f"settings_from {self.settings_from!r}: one of {tuned} expected")
        if self.tune is not None:
            raise ValueError("settings_from and tune: the other suite's rule holds; drop tune")
        if beyond := self.config.keys() - FREE:
            raise ValueError(
                f"config beside settings_from: only {', '.join(sorted(FREE))} are allowed, not "
                f"{', '.join(sorted(beyond))}"
            )
        return self

    @property
    def tunes(self) -> bool:
        """Whether trials choose settings, its own or those of the suite of `settings_from`."""
        return self.tune is not None or self.settings_from is not None

    @property
    def choices(self) -> frozenset[str]:
        """The settings in which the baseline of an entry may differ from it."""
        return frozenset(self.own) | (TUNED_KEYS if self.tunes else frozenset())

    @property
    def asked(self) -> str:
        """The suite's name or file, as given to --suite."""
        return self.name if self.file.parent == FOLDER else str(self.file)

    def points(self, given: Mapping[str, Any] | None = None) -> list[Point]:
        """Return the runs, each once.

        `given`: settings as `grid.expand` takes them. Those in FREE replace the suite's; the others
        select the runs that have these values.

        Raises:
            UsageError: no run has such a setting or value; or an entry of the file is invalid.
        """
        given = given or {}
        if self.tunes and "lr" in given:
            raise UsageError(f"suite {self.name!r} chooses the learning rate by trials; drop --lr")
        changed = {key: value for key, value in given.items() if key in FREE}
        chosen = [*_conditions({k: v for k, v in given.items() if k not in FREE})]
        points = [point for cell in self._cells(changed) for point in cell]
        for condition in chosen:
            condition.check(self.name, points)
        kept = [point for point in points if all(c.holds(point) for c in chosen)]
        if not kept:
            words = " ".join(condition.words for condition in chosen)
            raise UsageError(f"no run of suite {self.name!r} has all of {words}")
        return kept

    def configs(self, given: Mapping[str, Any]) -> list[Config]:
        """Return the configs of `points`, for a suite that does not choose learning rates."""
        return [point.config for point in self.points(given)]

    def runs(self, given: Mapping[str, Any]) -> Generator[Config, Mapping[str, Any], None]:
        """Yield the configs to run, seed by seed; the summary of each is sent to the generator.

        All trials that choose settings come first. A group of which `given` selects a part is tuned
        as a whole, and what is selected is run if it is chosen, or as published.
        """
        points = sorted(self.points(given), key=lambda point: point.config.seed)
        groups: dict[str, dict[str, Point]] = {}
        for point in self.points({key: value for key, value in given.items() if key in FREE}):
            groups.setdefault(point.group, {}).setdefault(point.identity, point)
        rates: dict[str, float] = {}
        for group in dict.fromkeys(p.group for p in points if p.tune is not None):
            rates |= yield from _tuned([*groups[group].values()])
        for point in points:
            if point.tune is None:
                yield point.config
            elif point.identity in rates:
                yield point.with_rate(rates[point.identity])

    def label(self) -> str:
        """Return name/version, as the rows of this version have it."""
        return f"{self.name}/{self.version}"

    def adopt(self, path: Path) -> int:
        """Label the rows of other versions that are runs or trials of this one; return how many.

        Raises:
            GcbenchError: the file of rows cannot be read or written.
        """
        known = {point.identity for point in self.points()}
        frees = {point.tune.free if point.tune else frozenset() for point in self.points()}

        def belongs(row: Mapping[str, Any]) -> bool:
            try:
                every = resolved(Config.model_validate(row["config"]))
            except (GcbenchError, ValidationError):
                return False
            return any(
                canonical({k: v for k, v in every.items() if k not in free}) in known
                for free in frees
            )

        return rows.relabel(path, self.label(), belongs)

    def tier(self, bits: float) -> str | None:
        """Return the tier with these measured bits an element, up; None if there is none."""
        for name, (low, high) in self.tiers.items():
            if low <= bits <= high:
                return name
        return None

    def _cells(self, changed: Mapping[str, Any]) -> Iterator[list[Point]]:
        """Yield the runs that belong to each published number, with `changed` settings replaced."""
        if self.settings_from is not None:
            yield from self._chosen_elsewhere(load(self.settings_from), changed)
            return
        owners: dict[str, int] = {}
        for number, entry in enumerate(self.entries, 1):
            steps = entry.paper_steps or self.paper_steps
            if steps is None and entry.published is not None:
                raise UsageError(f"suite {self.name!r}, entry {number}: paper_steps is missing")
            tune = self._tune(number, entry)
            for own, accuracy in entry.cells():
                told = None
                if steps is not None:
                    told = Published(
                        accuracy,
                        steps,
                        self.paper,
                        entry.place,
                        self.name,
                        self.differs,
                        entry.published_top5,
                    )
                try:
                    cell = [*self._alternatives(number, entry, own, tune, told, changed)]
                except (UsageError, ValueError) as error:
                    raise UsageError(f"suite {self.name!r}, entry {number}: {error}") from error
                for identity in {point.identity for point in cell}:
                    if identity in owners:
                        raise UsageError(
                            f"suite {self.name!r}: entries {owners[identity]} and {number} have "
                            "the same run; give it one number"
                        )
                    owners[identity] = number
                yield cell

    def _alternatives(
        self,
        number: int,
        entry: Entry,
        own: Mapping[str, Any],
        tune: Tune | None,
        told: Published | None,
        changed: Mapping[str, Any],
    ) -> Iterator[Point]:
        """Yield the points of an entry: for each config of its grid the group of alternatives.

        Raises:
            UsageError: the settings are invalid, or none of a group is as published.
            ValueError: the factors are unknown, or do not combine.
        """
        rate = {} if tune is None else {"lr": tune.start[len(tune.start) // 2]}

        def expand(settings: Mapping[str, Any]) -> list[Config]:
            return grid.expand({**self._with(own, settings), **rate, **changed}, None)

        if tune is None or not entry.factors:
            if entry.factors or entry.as_published:
                raise UsageError("factors and as_published belong to an entry that is tuned")
            for one in expand({}):
                point = Point(one, number, own, told, tune)
                yield replace(point, group=point.identity)
            return
        made = []
        for settings in tune.alternatives(entry.factors):
            start = settings.pop("start", None)
            rule = tune if start is None else tune.model_copy(update={"start": start})
            both = self._with(own, settings, suite=False)
            made.append([Point(one, number, both, told, rule) for one in expand(settings)])
        for origin, *group in zip(expand(entry.as_published), *made, strict=True):
            name = Point(origin, number, own, told, tune).identity
            if name not in {point.identity for point in group}:
                raise UsageError(
                    f"as_published {entry.as_published}: these settings are not among the values "
                    f"of {', '.join(entry.factors)}"
                )
            for point in group:
                yield replace(point, group=name, as_published=point.identity == name)

    def _chosen_elsewhere(self, other: Suite, changed: Mapping[str, Any]) -> Iterator[list[Point]]:
        """Yield the runs of each entry, with all alternatives of the other suite's group.

        Raises:
            UsageError: an entry selects no group of the other suite, or several.
        """
        assert other.tune is not None, "settings_from names a suite that tunes"
        theirs = other.points()
        seed = theirs[0].config.seed
        for number, entry in enumerate(self.entries, 1):
            chosen = [*_conditions(entry.config)]
            published = [p for p in theirs if p.as_published and all(c.holds(p) for c in chosen)]
            groups = {point.group for point in published}
            if len(groups) != 1:
                raise UsageError(
                    f"suite {self.name!r}, entry {number}: {len(groups)} entries of suite "
                    f"{other.name} have {' '.join(c.words for c in chosen)}; one expected"
                )
            cell = []
            for point in theirs:
                if point.group not in groups or point.config.seed != seed or point.tune is None:
                    continue
                rule = point.tune.model_copy(
                    update={"steps": point.tune.steps or point.config.steps}
                )
                given = point.config.model_dump(exclude={"task_version", *self.config, *changed})
                cell += [
                    Point(one, number, point.settings, None, rule, point.group, as_published=False)
                    for one in grid.expand({**_as_given(given), **self.config, **changed}, None)
                ]
            yield cell

    def _tune(self, number: int, entry: Entry) -> Tune | None:
        """Return the rule for an entry's learning rate, with the rates that are tried first.

        Raises:
            UsageError: the entry also sets a rate, or its `start` does not suit the rule.
        """
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
                f"suite {self.name!r}, entry {number}: lr is chosen by tune; drop it, or say "
                "`tuned: false`"
            )
        return tune

    def _with(
        self, own: Mapping[str, Any], more: Mapping[str, Any], *, suite: bool = True
    ) -> dict[str, Any]:
        """Return the suite's settings, overridden by an entry's, and these by `more`."""
        layers = [self.config, own, more] if suite else [own, more]
        merged = {key: value for layer in layers for key, value in layer.items()}
        for key in grid.NESTED:
            parts = [layer.get(key) or {} for layer in layers]
            for part in parts:
                if not isinstance(part, dict):
                    raise UsageError(f"{key}: a mapping of fields expected, not {part!r}")
            if suite or any(parts):
                merged[key] = {name: value for part in parts for name, value in part.items()}
        return merged

    def sets(self, key: str, field: str | None = None) -> bool:
        """Return whether the suite sets `key`, or, if that is a mapping, its `field`."""
        if self.settings_from is not None:
            return load(self.settings_from).sets(key, field)
        factors = [] if self.tune is None else [*itertools.chain(*self.tune.factors.values())]
        every = [self.config, *(entry.config for entry in self.entries), *factors]
        if field is not None:
            return any(field in (config.get(key) or {}) for config in every)
        return any(key in config for config in every) or any(key == e.by for e in self.entries)


def _tuned(group: Sequence[Point]) -> Generator[Config, Mapping[str, Any], dict[str, float]]:
    """Yield the trials of a group of alternatives, and receive their summaries.

    Return the identities of the points to run, with their rates.
    """
    tried: list[dict[Trial, float]] = [{} for _ in group]
    while True:
        decision = decide(group, tried)
        if decision.trial is None:
            return {
                point.identity: rate
                for number, (point, rate) in enumerate(zip(group, decision.rates, strict=True))
                if number == decision.best or point.as_published
            }
        number, trial = decision.trial
        tried[number][trial] = quality((yield group[number].trial(trial)))


def decide(group: Sequence[Point], tried: Sequence[Mapping[Trial, float]]) -> Decision:
    """Return which alternative of a group to take, given the trials of each, or the next trial."""
    rules = [point.tune for point in group if point.tune is not None]
    assert len(rules) == len(group) > 0, "the points of a group are tuned"
    return decide_among(rules, tried, group[0].config.steps)


def _as_given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's values as `grid.expand` takes them: a sequence in a list of its own."""
    return {k: [list(v)] if k in grid.SEQUENCES else v for k, v in config.items()}


# ---- the settings of a run -----------------------------------------------------------------------


def resolved(config: Config) -> dict[str, Any]:
    """Return a config as JSON, with every field of compressor, task and memory, without FREE.

    Schedules are text, as the command line writes them.
    """
    known = {key: value for key, value in config.model_dump(mode="json").items() if key not in FREE}
    owners = {
        "options": config.make_compressor(),
        "task_options": config.make_task(),
        "memory_options": config.make_memory(),
    }
    for key, owner in owners.items():
        every = {name: getattr(owner, name) for name in registry.fields(type(owner))}
        known[key] = every | {
            name: schedule.text(value) if isinstance(value, Mapping) else value
            for name, value in known[key].items()
        }
    return known


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
        """Return whether a run has one of the values; they are compared as text."""
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
                raise UsageError(f"suite {suite!r} chooses {self.key} itself; leave it out")
            known = {name for p in points for name in p.resolved[self.key]}
            raise unknown(f"field of suite {suite}:", str(self.field), known)
        missing = [word for word in map(text, self.values) if word not in present]
        if missing:
            raise UsageError(
                f"{self.words}: suite {suite!r} has no run with {', '.join(missing)}, only with "
                f"{', '.join(present)}; budget, engine and machine are free, all else chooses "
                "among its runs"
            )


_ABSENT = object()


def _conditions(given: Mapping[str, Any]) -> Iterator[_Condition]:
    """Yield the conditions for given settings."""
    for key, value in given.items():
        if key in grid.NESTED:
            for field, own in value.items():
                values = own if isinstance(own, list) else [own]
                told = [schedule.text(v) if isinstance(v, Mapping) else v for v in values]
                yield _Condition(key, field, told)
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
        raise UsageError(f"--suite: a name expected ({', '.join(names())}), or a file")
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return _read(name, Path(name))
    if name not in names():
        raise unknown("suite", name, names(), "A file is named by its path: my.yaml.")
    return _own(name, FOLDER)


@cache
def _own(name: str, folder: Path) -> Suite:
    """Return a built-in suite, read and checked once."""
    return _read(name, folder / f"{name}.yaml")


def _read(name: str, path: Path) -> Suite:
    found = grid.read(path, "--suite")
    for key in ("name", "file"):
        if key in found:
            raise UsageError(f"--suite {name}: {key!r} is the file's own; leave it out")
    try:
        suite = Suite(name=path.stem, file=path, **found)
    except (ValidationError, TypeError) as error:
        raise UsageError(f"--suite {name}: {_problems(error)}") from None
    suite.points()
    return suite


def _problems(error: ValidationError | TypeError) -> str:
    """Return in one line what is wrong with a file."""
    if isinstance(error, TypeError):  # a key that is no text
        return "its keys are names: title, source, place, differs, config, entries"
    told = []
    for problem in error.errors():
        message, place = problem["msg"].removeprefix("Value error, "), problem["loc"]
        if problem["type"] == "extra_forbidden":
            message = f"no such key; known: {', '.join(_KEYS[len(place) > 1])}"
        where = [f"entry {p + 1}" if isinstance(p, int) else str(p) for p in place[-2:]]
        told.append(f"{', '.join(where)}: {message[0].lower()}{message[1:]}")
    return "; ".join(told)


_KEYS = (sorted(Suite.model_fields.keys() - {"name", "file"}), sorted(Entry.model_fields))
