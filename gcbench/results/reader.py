"""Finished runs as they lie on disk: summaries checked and read, each run once."""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcbench.core import files, progress, schedule
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.core.values import canonical
from gcbench.results import rows as rowfiles
from gcbench.results import sanitize
from gcbench.results.schema import METRIC_COLUMNS, SCHEMA, Summary, WrongValueError
from gcbench.results.settings import DEFAULTS

if TYPE_CHECKING:
    from pandas import DataFrame


_OUTCOME = (
    *("test_accuracy", "test_loss", "test_top5", "validation_accuracy", "validation_loss"),
    *("train_loss", "failed", "skipped_steps"),
    *("payload_bytes_up", "payload_bytes_down", "wire_bytes"),
)
_RESOLVED = ("task", "workers", "collective", "engine", "gradients", "steps", "batch")
"""Settings whose resolved value the run records, in place of the requested one."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the seeds of a configuration share."""

    config: dict[str, Any]
    """The recorded config without the seed; a setting that is missing has its default."""
    method: str
    """The configuration's identity: a digest of all settings and sources."""


@dataclass(frozen=True, slots=True)
class Run:
    """One finished run: its summary, and where it was read."""

    summary: Summary
    source: Path
    """The run's folder, or the .json or .parquet file that holds the summary."""
    configuration: Configuration
    curve: rowfiles.PackedText | Sequence[Mapping[str, Any]] | None = None
    """The evaluations of a row of a file, as JSON text until they are used."""
    number: int = 0
    """The row's number in `source`, from 1; 0 for a run's folder."""
    suite: str = ""
    """The suite for which a row was made, as name/version."""

    @property
    def place(self) -> str:
        """The run's folder, or its file and row."""
        return f"{self.source}, row {self.number}" if self.number else f"{self.source}"

    @property
    def config(self) -> dict[str, Any]:
        """The config of the configuration: all settings but the seed."""
        return self.configuration.config

    @property
    def method(self) -> str:
        """The identity of the run's configuration, without the seed."""
        return self.configuration.method

    @property
    def outcome(self) -> str:
        """The run's final metrics and bytes, without times and the machine."""
        return canonical([getattr(self.summary, name) for name in _OUTCOME])

    @property
    def is_trial(self) -> bool:
        """Whether the run only served to choose a setting and never saw the test split."""
        return not self.summary.config.get("test", True)

    @property
    def result_split(self) -> str:
        """The split of the final results; trials never see the test split."""
        return "validation" if self.is_trial else "test"

    @property
    def judged_by(self) -> str:
        """The split that was evaluated: "validation" if examples were held out."""
        return "validation" if self.summary.config.get("holdout") else "test"

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the records of the evaluations; none for a row of a .json file without metrics.

        Raises:
            GcbenchError: the metrics cannot be read.
        """
        if self.curve is not None:
            return self._evaluations_of_row()
        parquet, lines = self.source / "metrics.parquet", self.source / "metrics.jsonl"
        try:
            if parquet.exists():
                from pyarrow import BufferReader
                from pyarrow import parquet as reader

                table = reader.read_table(BufferReader(files.read_bytes(parquet)))
                records = table.to_pylist()
            elif lines.exists():
                records = [json.loads(line) for line in files.read_text(lines).splitlines()]
            else:
                return []
            evaluations = (record for record in records if record["kind"] == "eval")
            return sorted(evaluations, key=lambda record: record["step"])
        except (OSError, ValueError, KeyError) as error:
            raise GcbenchError(
                f"the metrics in {self.source} cannot be read ({error}); delete that folder and "
                "run again"
            ) from error

    def _evaluations_of_row(self) -> list[dict[str, Any]]:
        where = f"{self.place}, column `evaluations`"
        curve = rowfiles.decoded(self.curve, where)
        try:
            records = [*map(dict, curve)]
            for number, record in enumerate(records, 1):
                _check_numbers(record, f"{where}, record {number}")
            return sorted(records, key=lambda record: record["step"])
        except (TypeError, ValueError, KeyError) as error:
            raise GcbenchError(
                f"{where}: a list of records with `step` expected ({error!r})"
            ) from error


_NUMBERS = frozenset(METRIC_COLUMNS) - {"kind"}
_NUMBER_TYPES = frozenset((float, int))


def _check_numbers(record: Mapping[str, Any], where: str) -> None:
    """Check the numbers of an evaluation, which may be null, except the step.

    Raises:
        GcbenchError: one is not a finite number.
    """
    for name in _NUMBERS & record.keys():
        value = record[name]
        if value is None and name != "step":
            continue
        if type(value) not in _NUMBER_TYPES or not abs(value) <= sys.float_info.max:
            came = sanitize.cut(sanitize.printable(repr(value)), sanitize.LABEL)
            null = "" if name == "step" else " or null"
            raise GcbenchError(f"{where}: `{name}`: a finite number{null} expected, not {came}")


def recorded(summary: Summary) -> dict[str, Any]:
    """Return the stored config, with resolved values in place of the requested ones."""
    resolved = {key: getattr(summary, key) for key in _RESOLVED}
    return {"seed": summary.seed, **summary.config, **resolved}


def sources(summary: Summary) -> dict[str, str]:
    """Return the digests of the code of third parties' plug-ins, by kind."""
    plugins = summary.provenance.get("plugins") or {}
    named = {kind: plugin for kind, plugin in plugins.items() if isinstance(plugin, Mapping)}
    return {kind: str(plugin.get("sha256")) for kind, plugin in named.items()}


class Configurations:
    """Makes the configuration of each run, one object for all of its seeds."""

    def __init__(self) -> None:
        self.by_parts: dict[tuple[Any, ...], Configuration] = {}
        self.by_method: dict[str, Configuration] = {}
        self.checked: dict[int, Mapping[str, Any]] = {}
        """Configs and provenances whose types are right, by `id`: rows of a file share them."""

    def of(self, summary: Summary) -> Configuration:
        """Return the configuration of a run.

        Runs whose config is one object, as `rows.shared` yields it, are not compared again. An id
        identifies only what `checked` keeps alive: a new object may get that of a freed one.
        """
        resolved = tuple(getattr(summary, key) for key in _RESOLVED)
        plugins = canonical(summary.provenance.get("plugins") or "")
        data = canonical(summary.provenance.get("data") or "")
        named = (summary.compressor_name, summary.compressor, plugins, data)
        parts = (id(summary.config), *resolved, *named)
        is_shared = self.checked.get(parts[0]) is summary.config
        configuration = self.by_parts.get(parts) if is_shared else None
        if configuration is None:
            config = DEFAULTS | recorded(summary)
            del config["seed"]
            rest = canonical([*named[:2], schedules(summary), sources(summary), data])
            method = hashlib.sha256(f"{_identity(config)} {rest}".encode()).hexdigest()[:32]
            configuration = self.by_method.setdefault(method, Configuration(config, method))
            if is_shared:
                self.by_parts[parts] = configuration
            if "seed" not in summary.config and summary.config == configuration.config:
                summary.config = configuration.config  # one object takes half of the memory
        return configuration


def _identity(config: Mapping[str, Any]) -> str:
    """Return the same text for equal settings, without the method's fields."""
    settings = {
        key: canonical(value) if value and type(value) is dict else value
        for key, value in config.items()
        if key != "options"
    }
    return repr(sorted(settings.items()))


def schedules(summary: Summary) -> dict[str, str]:
    """Return the fields that changed by step, as the command line writes them."""
    options = summary.config.get("options") or {}
    return {
        name: schedule.text(value) for name, value in options.items() if isinstance(value, Mapping)
    }


def fields(summary: Summary) -> dict[str, Any]:
    """Return the compressor's fields: from its stored repr, or else from the config.

    The repr is of the last step: fields that changed by step are shown as their schedule.
    """
    options = dict(summary.config.get("options") or {})
    return options | _arguments(summary.compressor) | schedules(summary)


def fields_of(part: str, summary: Summary) -> dict[str, Any]:
    """Return the fields of a run's "task" or "memory": as recorded, or else those in the config."""
    objects = summary.provenance.get("objects") or {}
    return {**(summary.config.get(f"{part}_options") or {}), **_arguments(str(objects.get(part)))}


def _arguments(call: str) -> dict[str, Any]:
    """Return the keyword arguments of a stored call; none if it cannot be read."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        if _PLAIN_CALL.fullmatch(call):
            return {name: _literal(value) for name, value in _ARGUMENT.findall(call)}
        if isinstance(parsed := ast.parse(call, mode="eval").body, ast.Call):
            return {word.arg: ast.literal_eval(word.value) for word in parsed.keywords if word.arg}
    return {}


_LITERAL = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|None|True|False|'[^'\\]*'"
_ARGUMENT = re.compile(rf"(\w+)=({_LITERAL})")
_PLAIN_CALL = re.compile(rf"\w+\((?:\w+=(?:{_LITERAL})(?:, (?!\))|(?=\))))*\)", re.ASCII)
"""A repr with numbers, constants and simple strings alone: parsing Python is 20 times slower."""
_CONSTANTS = {"None": None, "True": True, "False": False}


def _literal(text: str) -> Any:
    if text[0] == "'":
        return text[1:-1]
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    return float(text) if "." in text or "e" in text else int(text)


def _parse(
    data: Any, source: Path, configurations: Configurations, number: int = 0, *, plain: bool = False
) -> Run:
    """Return the run of one summary; `number` is that of its row in a file, 0 for a run's folder.

    `plain`: whether all text in it is known to be printable.
    """
    where = f"{source}, row {number}" if number else f"{source / 'summary.json'}"
    remedy = "repair it, or delete it and run again"
    if not isinstance(data, dict):
        raise GcbenchError(f"{where}: {type(data).__name__} found, a summary object expected")
    if "schema" not in data and data.keys() & {"tables", "rows"}:
        raise UsageError(
            f"{source} holds no run's summary; `gcbench report` shows analyses and kernel timings"
        )
    if files.DIGEST in data:
        files.check_digest(data, where, remedy.capitalize())
    if data.get("schema") != SCHEMA:
        raise GcbenchError(
            f"{where}: schema {data.get('schema')!r}, but this gcbench reads {SCHEMA}; run again "
            "with this version, or convert the file (`gcbench help reading-results`)"
        )
    if not (plain or sanitize.is_plain(data)):
        data = sanitize.plain(data, where)
    try:
        summary = Summary.of(data)
    except WrongValueError as error:
        came = sanitize.cut(sanitize.printable(repr(error.value)), sanitize.LABEL)
        raise GcbenchError(
            f"{where}: `{error.place}`: {error.expected}, not {came}; {remedy} "
            "(`gcbench help reading-results`)"
        ) from error
    nested = {
        key: value
        for key, value in data.items()
        if type(value) in (dict, list) and id(value) not in configurations.checked
    }
    if place := _place_of_infinite(nested):
        raise GcbenchError(
            f"{where}: `{sanitize.cut(place, sanitize.LABEL)}`: a finite number or null expected, "
            f"not NaN or infinity; {remedy} (`gcbench help reading-results`)"
        )
    for kind, types in (("config", sanitize.CONFIG), ("provenance", sanitize.PROVENANCE)):
        values = data.get(kind) or {}
        if id(values) in configurations.checked:
            continue
        if wrong := sanitize.wrong_type(kind, values, types):
            raise GcbenchError(f"{where}: {wrong}; {remedy} (`gcbench help reading-results`)")
        if plain:
            configurations.checked[id(values)] = values
    return Run(summary, source, configurations.of(summary), number=number)


_encode_finite = json.JSONEncoder(allow_nan=False, default=str).encode


def _place_of_infinite(value: Any, place: str = "") -> str:
    """Return the place of a number in a JSON value that is not finite; "" if all are.

    `place`: that of the value. Encoding it is the quick test.
    """
    if isinstance(value, float):
        return "" if math.isfinite(value) else place
    with suppress(ValueError):
        _encode_finite(value)
        return ""
    items = value.items() if isinstance(value, dict) else enumerate(value, 1)
    places = (_place_of_infinite(one, f"{place}.{key}".lstrip(".")) for key, one in items)
    return next(filter(None, places), "")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(files.read_text(path))
    except OSError as error:
        raise files.unreadable(error, path) from error
    except (ValueError, RecursionError) as error:
        raise GcbenchError(
            f"{path} cannot be read ({error}); delete it, or its run's folder, and run again"
        ) from error


Faults = list[GcbenchError]
"""What is wrong with single rows, which are left out."""


def _read_folder(place: Path, configurations: Configurations) -> Run:
    """Return the finished run in a folder."""
    data = _read_json(place / "summary.json")
    run = _parse(data, place, configurations)
    files.check_run(place, data)
    return run


def _read_list(path: Path, configurations: Configurations, faults: Faults) -> Iterator[Run]:
    """Yield the runs of a JSON file; rows that are wrong are left out, their errors in `faults`."""
    data = _read_json(path)
    items = data if isinstance(data, list) else [data]
    if not items:
        raise UsageError(f"{path} is an empty list; a summary or a list of summaries is expected")
    for number, item in enumerate(items, 1):
        try:
            yield _parse(item, path, configurations, number)
        except UsageError:
            raise
        except GcbenchError as error:
            faults.append(error)


def _read_rows(path: Path, configurations: Configurations, faults: Faults) -> Iterator[Run]:
    """Yield the runs of a Parquet file; rows that are wrong are left out, as in `_read_list`."""
    number = 0
    before = len(faults)
    for number, one, plain in rowfiles.shared(path, faults):
        curve, suite = one.pop("evaluations", []), one.pop("suite", "")
        try:
            run = _parse(one, path, configurations, number, plain=plain)
        except GcbenchError as error:
            faults.append(error)
            continue
        if isinstance(suite, str):
            name = sys.intern(sanitize.printable(suite))
            yield Run(run.summary, path, run.configuration, curve, number, name)
        else:
            kind = type(suite).__name__
            faults.append(
                GcbenchError(f"{path}, row {number}: `suite`: a string expected, not {kind}")
            )
    if not number and len(faults) == before:
        raise UsageError(f"{path} has no row yet")


def _runs_in(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Yield the folders in a folder, and the names of files in them; None for a run's folder.

    Raises:
        GcbenchError: one of them cannot be listed.
    """
    for place, below, names in files.walk(folder):
        if "summary.json" in names or {*names} >= STARTED:
            below.clear()  # there are no runs inside a run's folder
            yield place, None
        else:
            yield place, sorted(names)


STARTED = {"config.json", "provenance.json"}
"""What the folder of a run has from its start. Other programs have a `config.json`, too."""


def row_files(folder: Path) -> list[Path]:
    """Return the files of rows in a folder at any depth, outside of the folders of runs.

    Files that cannot be read as Parquet are among them; see `rows.holds`.
    """
    every = [place / name for place, names in _runs_in(folder) for name in names or ()]
    return [path for path in every if path.suffix == ".parquet" and rowfiles.holds(path)]


def run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs, finished or not, in a folder at any depth."""
    return (place for place, names in _runs_in(folder) if names is None)


def warn(line: str) -> None:
    """Print a warning on stderr."""
    print(f"gcbench: {sanitize.printable(line)}", file=sys.stderr)


def without_trials(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that saw the test split; the others are counted on stderr.

    Raises:
        UsageError: none did.
    """
    finished = [run for run in runs if not run.is_trial]
    if trials := len(runs) - len(finished):
        warn(f"{trials} trial{'s' * (trials > 1)} of learning rates left out; --trials shows them")
    if not finished:
        raise UsageError("only trials of learning rates here; --trials shows them")
    return finished


def _places(folder: Path) -> list[Path]:
    """Return what `load` reads of a path: files of rows and JSON, and folders of runs."""
    files.check_regular(folder)
    try:
        exists = folder.exists()
    except OSError as error:
        raise files.unreadable(error, folder) from error
    if not exists:
        raise UsageError(f"{folder} does not exist; `gcbench run` writes to results/runs")
    if folder.is_file():
        if folder.suffix not in (".json", ".parquet"):
            raise UsageError(f"{folder} is neither a folder nor a .json or .parquet file of rows")
        return [folder]
    places = [*row_files(folder), *run_folders(folder)]
    if not places:
        raise UsageError(
            f"no run in {folder} (a run's folder holds config.json and, once finished, "
            "summary.json); name another folder, or make a run with `gcbench run`"
        )
    return places


def load(
    folders: Sequence[Path],
    watch: Callable[[int], progress.Observer] | None = None,
    faults: Faults | None = None,
    *,
    repeated: bool = False,
) -> list[Run]:
    """Return the finished runs in `folders`, each once per label of a suite; see `once`.

    Each path is a run's folder, a folder with runs or files of rows at any depth, a .parquet file
    of rows, or a .json file that holds one summary or a list of them. Unfinished runs, and
    different results for one config and seed, are reported on stderr. `watch` makes what shows how
    many files and folders of runs, of how many, are read. `repeated`: runs are returned as often as
    they are there.

    `faults`: a list to which the errors of rows, runs and files that cannot be read are appended;
    the others are returned. Without it the first of these errors is raised.

    Raises:
        UsageError: a path is missing, or nothing in it is a run.
        GcbenchError: a summary cannot be read, does not match its digest or is of another schema,
            or no run is finished.
    """
    if not folders:
        raise UsageError("no folder was named; name runs or a results folder, e.g. results/runs")
    result: list[Run] = []
    configurations = Configurations()
    wrong: Faults = []
    unfinished: dict[Path, None] = {}
    places = [place for folder in map(Path, folders) for place in _places(folder)]
    shown = progress.Observer() if watch is None else watch(len(places))
    collecting = gc.isenabled()
    gc.disable()  # rows leave little garbage, and looking for it takes a tenth of the time
    try:
        for number, place in enumerate(places):
            shown.step(number, f"reading {place.name}")
            try:
                if place.suffix == ".parquet" and not place.is_dir():
                    result += _read_rows(place, configurations, wrong)
                elif not place.is_dir():
                    result += _read_list(place, configurations, wrong)
                elif (place / "summary.json").exists():
                    result.append(_read_folder(place, configurations))
                else:
                    unfinished[place.resolve()] = None
            except UsageError:
                raise
            except GcbenchError as error:
                wrong.append(error)
            except OSError as error:
                wrong.append(files.unreadable(error, place))
            if wrong and faults is None:
                raise wrong[0]
        shown.step(len(places))
    finally:
        if collecting:
            gc.enable()
        shown.close()
    if wrong and not result:
        raise wrong[0]
    if faults is not None:
        faults += wrong
    if unfinished:
        names = ", ".join(sorted(run.name for run in unfinished))
        count = f"{len(unfinished)} unfinished run{'s' * (len(unfinished) > 1)}"
        if not result:
            raise GcbenchError(
                f"{count} and no finished one: {names}; repeat the command to resume"
            )
        warn(f"{count} left out: {names}; repeat the command to resume")
    if repeated:
        return result
    unique = once(result, per_label=True)
    _warn_of_sources(unique)
    _warn_of_test_sets(unique)
    return unique


def once(runs: Sequence[Run], *, per_label: bool = False, per_machine: bool = False) -> list[Run]:
    """Return the first run of each configuration and seed.

    `per_label`: of each label of a suite, too: the user's copy of a suite's row must not take it
    from the suite. `per_machine`: of each machine, too. Left out runs with another result are
    reported on stderr.
    """
    unique: dict[tuple[str, int, str, str], Run] = {}
    for run in runs:
        machine = canonical(run.summary.provenance.get("machine")) if per_machine else ""
        key = run.method, run.summary.seed, run.suite if per_label else "", machine
        other = unique.setdefault(key, run)
        if other is not run and other.outcome != run.outcome:
            warn(f"same config and seed, other results: {run.place} left out, {other.place} kept")
    return list(unique.values())


def _warn_of_sources(runs: Sequence[Run]) -> None:
    """Warn about configurations whose runs used different versions of a built-in compressor."""
    digests: dict[str, dict[str, Run]] = {}
    for run in runs:
        if digest := run.summary.provenance.get("source"):
            digests.setdefault(run.method, {}).setdefault(digest, run)
    for versions in digests.values():
        if len(versions) > 1:
            name = next(iter(versions.values())).summary.compressor_name
            listed = ", ".join(f"{run.source} by {digest}" for digest, run in versions.items())
            warn(f"runs of {name} by different versions of {name}.py are in one row: {listed}")


def _warn_of_test_sets(runs: Sequence[Run]) -> None:
    """Warn about runs of one task whose test sets differ in size."""
    sizes: dict[str, dict[int, Run]] = {}
    for run in runs:
        if size := run.summary.test_examples:
            task = f"{run.summary.task} {canonical(run.config.get('task_options') or {})}"
            sizes.setdefault(task, {}).setdefault(size, run)
    for some in sizes.values():
        if len(some) > 1:
            listed = ", ".join(f"{size} ({run.place})" for size, run in sorted(some.items()))
            warn(f"test sets differ in size, so results are not comparable: {listed} examples")


def frame(runs: Sequence[Run]) -> DataFrame:
    """Return runs as a data frame, one a row; names of what is nested are joined by dots."""
    import pandas as pd

    return pd.json_normalize(
        [
            {**run.summary.model_dump(), "suite": run.suite, "source": str(run.source)}
            for run in once(runs)
        ]
    )
