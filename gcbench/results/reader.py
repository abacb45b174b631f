"""Finished runs as they lie on disk: summaries checked and read, each run once."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gcbench.core import files, progress, schedule
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.core.values import canonical
from gcbench.results import rows as rowfiles
from gcbench.results import sanitize
from gcbench.results.schema import SCHEMA
from gcbench.results.settings import DEFAULTS

if TYPE_CHECKING:
    from pandas import DataFrame

RUN_FILES = ("config.json", "provenance.json", "metrics.jsonl", "metrics.parquet")


class Wire(BaseModel):
    """Bytes that crossed the network over the whole run, the collective's own factor included."""

    per_worker: float
    total: float | None = None


class Modelled(BaseModel):
    """Communication time of a step that was computed from a link, not measured."""

    seconds: float
    link_gbit: float
    link_latency_us: float


class Failure(BaseModel):
    """Why a run has no result: it diverged at `step`, counted from 0."""

    step: int
    reason: str


class Summary(BaseModel):
    """The fields of summary.json (schema 1) that a comparison needs; the others are kept."""

    model_config = ConfigDict(extra="allow")

    task: str
    compressor: str
    compressor_name: str
    workers: int = Field(ge=1)
    collective: str
    engine: str
    gradients: str | None = None
    seed: int
    steps: int = Field(ge=1)
    batch: int = Field(ge=1)
    test_accuracy: float | None = None
    test_loss: float | None = None
    validation_accuracy: float | None = None
    validation_loss: float | None = None
    failed: Failure | None = None
    test_top5: float | None = None
    test_examples: int | None = Field(default=None, ge=1)
    train_loss: float | None = None
    params: int | None = None
    payload_bytes_up: float = Field(ge=0)
    payload_bytes_down: float = Field(ge=0)
    wire_bytes: Wire
    nominal_ratio: float | None = None
    payload_ratio_up: float | None = None
    payload_ratio_down: float | None = None
    phase_seconds: dict[str, float | None] = {}
    communicate_modelled: Modelled | None = None
    step_seconds: float | None = None
    config_hash: str | None = None
    skipped_steps: int = 0
    config: dict[str, Any]
    provenance: dict[str, Any] = {}


_OUTCOME = {
    *("test_accuracy", "test_loss", "test_top5", "validation_accuracy", "validation_loss"),
    *("train_loss", "failed", "skipped_steps"),
    *("payload_bytes_up", "payload_bytes_down", "wire_bytes"),
}


@dataclass(frozen=True)
class Run:
    """One finished run: its summary, and where it was read."""

    summary: Summary
    source: Path
    """The run's folder, or the .json or .parquet file that holds the summary."""
    curve: str | Sequence[Mapping[str, Any]] | None = None
    """The evaluations, where the row of a file brought them; as JSON text until they are used."""
    number: int = 0
    """The row's number in `source`, from 1; 0 for a run's folder."""
    suite: str = ""
    """The suite for which a row was made, as name/version."""

    @property
    def recorded(self) -> dict[str, Any]:
        """The stored config, with what the run resolved in place of what was asked."""
        resolved = ("task", "workers", "collective", "engine", "gradients", "steps", "batch")
        return self.summary.config | {key: getattr(self.summary, key) for key in resolved}

    @property
    def config(self) -> dict[str, Any]:
        """The recorded config without the seed; a setting that is missing has its default."""
        config = DEFAULTS | self.recorded
        return {key: value for key, value in config.items() if key != "seed"}

    @cached_property
    def method(self) -> str:
        """What tells this run from others except its seed, as canonical JSON."""
        config = {key: value for key, value in self.config.items() if key != "options"}
        by_step = schedules(self.summary)
        name = self.summary.compressor_name
        told = canonical([name, self.summary.compressor, config, by_step, self.sources])
        return sys.intern(told)  # the seeds of a configuration share it

    @property
    def sources(self) -> dict[str, str]:
        """Digests of the code of third parties' plug-ins, by kind ("compressor", "task", ...)."""
        plugins = self.summary.provenance.get("plugins") or {}
        named = {kind: own for kind, own in plugins.items() if isinstance(own, Mapping)}
        return {kind: str(own.get("sha256")) for kind, own in named.items()}

    @property
    def outcome(self) -> str:
        """What the run ended with, and what it sent; times and the machine are left out."""
        return canonical(self.summary.model_dump(include=_OUTCOME))

    @property
    def is_trial(self) -> bool:
        """Whether the run only helped to choose a setting: it never saw the test split."""
        return not self.summary.config.get("test", True)

    @property
    def judged_by(self) -> str:
        """The split that the evaluations are of: "validation" where examples were held out."""
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
        where = f"{self.source}, row {self.number}, column `evaluations`"
        curve = rowfiles.decoded(self.curve, where)
        try:
            return sorted(map(dict, curve), key=lambda record: record["step"])
        except (TypeError, ValueError, KeyError) as error:
            raise GcbenchError(
                f"{where}: a list of records with `step` expected ({error!r})"
            ) from error


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
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        call = ast.parse(summary.compressor, mode="eval").body
        if isinstance(call, ast.Call):
            options |= {
                word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg
            }
    return options | schedules(summary)


def _parse(data: Any, source: Path, number: int = 0) -> Run:
    """Return the run of one summary; `number` is that of its row in a file, 0 for a run's folder.

    Raises:
        UsageError: it is an analysis, not a run.
        GcbenchError: it does not match its digest, is of another schema, or has a wrong value. The
            message names the file, the row and the field.
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
            "with this version, or convert the file (results/README.md has the fields)"
        )
    if not sanitize.is_plain(data):
        data = sanitize.plain(data, where)
    try:
        run = Run(Summary.model_validate(data), source, number=number)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        came = sanitize.cut(sanitize.printable(repr(first["input"])), sanitize.LABEL)
        raise GcbenchError(
            f"{where}: `{field}`: {first['msg']}, not {came} ({len(error.errors())} in all); "
            f"{remedy} (results/README.md has the fields)"
        ) from error
    parts = (("config", sanitize.CONFIG), ("provenance", sanitize.PROVENANCE))
    for kind, known in parts:
        if wrong := sanitize.wrong_type(kind, data.get(kind) or {}, known):
            raise GcbenchError(f"{where}: {wrong}; {remedy} (results/README.md has the fields)")
    return run


def _read_json(path: Path) -> Any:
    try:
        return json.loads(files.read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise GcbenchError(
            f"{path} cannot be read ({error}); delete it, or its run's folder, and run again"
        ) from error


Faults = list[GcbenchError]
"""What is wrong with single rows, which are left out."""


def _read_folder(place: Path) -> Run:
    """Return the finished run in a folder.

    Raises:
        GcbenchError: a file of the run does not match its digest; or see `_parse`.
    """
    found = _read_json(place / "summary.json")
    run = _parse(found, place)
    files.check_run(place, found)
    return run


def _read_list(path: Path, faults: Faults) -> Iterator[Run]:
    """Yield the runs of a JSON file; rows that are wrong are left out, their errors in `faults`."""
    data = _read_json(path)
    items = data if isinstance(data, list) else [data]
    if not items:
        raise UsageError(f"{path} is an empty list; a summary or a list of summaries is expected")
    for number, item in enumerate(items, 1):
        try:
            yield _parse(item, path, number)
        except UsageError:
            raise
        except GcbenchError as error:
            faults.append(error)


def _read_rows(path: Path, faults: Faults) -> Iterator[Run]:
    """Yield the runs of a Parquet file; rows that are wrong are left out, as in `_read_list`."""
    number = 0
    before = len(faults)
    for number, one in rowfiles.each(path, faults, encoded=("evaluations",)):
        curve, suite = one.pop("evaluations", []), one.pop("suite", "")
        try:
            run = _parse(one, path, number)
        except GcbenchError as error:
            faults.append(error)
            continue
        if isinstance(suite, str):
            yield replace(run, curve=curve, suite=sys.intern(sanitize.printable(suite)))
        else:
            kind = type(suite).__name__
            faults.append(
                GcbenchError(f"{path}, row {number}: `suite`: a string expected, not {kind}")
            )
    if not number and len(faults) == before:
        raise UsageError(f"{path} has no row yet")


def row_files(folder: Path) -> list[Path]:
    """Return the files of rows in a folder at any depth, outside of the folders of runs."""
    found: list[Path] = []
    for place, below, names in os.walk(folder):
        below.sort()
        if "summary.json" in names or any(name in names for name in RUN_FILES):
            below.clear()
            continue
        parquets = [Path(place) / name for name in sorted(names) if name.endswith(".parquet")]
        found += filter(rowfiles.holds, parquets)
    return found


def run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs, finished or not, in a folder at any depth."""
    for place, below, names in os.walk(folder):
        below.sort()
        if "summary.json" in names or any(name in names for name in RUN_FILES):
            below.clear()  # there are no runs inside a run's folder
            yield Path(place)


def warn(line: str) -> None:
    """Print a warning on stderr."""
    print(f"gcbench: {sanitize.printable(line)}", file=sys.stderr)


def without_trials(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that saw the test split; the others are counted on stderr.

    Raises:
        UsageError: none did.
    """
    kept = [run for run in runs if not run.is_trial]
    if trials := len(runs) - len(kept):
        warn(f"{trials} trial{'s' * (trials > 1)} of learning rates left out; --trials shows them")
    if not kept:
        raise UsageError("only trials of learning rates here; --trials shows them")
    return kept


def _places(folder: Path) -> list[Path]:
    """Return what `load` reads of a path: files of rows and JSON, and folders of runs.

    Raises:
        UsageError: it is missing, or nothing in it is a run.
    """
    files.check_regular(folder)
    if not folder.exists():
        raise UsageError(f"{folder} does not exist; `gcbench run` writes to results/runs")
    if folder.is_file():
        if folder.suffix not in (".json", ".parquet"):
            raise UsageError(f"{folder} is no folder, and no .json or .parquet file of rows")
        return [folder]
    found = [*row_files(folder), *run_folders(folder)]
    if not found:
        raise UsageError(
            f"no run in {folder} (a run's folder holds config.json and, once finished, "
            "summary.json); name another folder, or make a run with `gcbench run`"
        )
    return found


def load(
    folders: Sequence[Path],
    watch: Callable[[int], progress.Observer] | None = None,
    faults: Faults | None = None,
) -> list[Run]:
    """Return the finished runs in `folders`, each once.

    Each path is a run's folder, a folder with runs or files of rows at any depth, a .parquet file
    of rows, or a .json file that holds one summary or a list of them. Unfinished runs, and
    different results for one config and seed, are reported on stderr. `watch` makes what shows how
    many files and folders of runs, of how many, are read.

    `faults`: a list to which the errors of rows, runs and files that cannot be read are appended;
    the others are returned. Without it the first of these errors is raised.

    Raises:
        UsageError: a path is missing, or nothing in it is a run.
        GcbenchError: a summary cannot be read, does not match its digest or is of another schema,
            or no run is finished.
    """
    if not folders:
        raise UsageError("no folder was named; name runs or a results folder, e.g. results/runs")
    found: list[Run] = []
    wrong: Faults = []
    unfinished: dict[Path, None] = {}
    places = [place for folder in map(Path, folders) for place in _places(folder)]
    shown = progress.Silent() if watch is None else watch(len(places))
    try:
        for number, place in enumerate(places):
            shown.step(number, f"reading {place.name}")
            try:
                if place.suffix == ".parquet" and not place.is_dir():
                    found += _read_rows(place, wrong)
                elif not place.is_dir():
                    found += _read_list(place, wrong)
                elif (place / "summary.json").exists():
                    found.append(_read_folder(place))
                else:
                    unfinished[place.resolve()] = None
            except UsageError:
                raise
            except GcbenchError as error:
                wrong.append(error)
            if wrong and faults is None:
                raise wrong[0]
        shown.step(len(places))
    finally:
        shown.close()
    if wrong and not found:
        raise wrong[0]
    if faults is not None:
        faults += wrong
    if unfinished:
        names = ", ".join(sorted(run.name for run in unfinished))
        count = f"{len(unfinished)} unfinished run{'s' * (len(unfinished) > 1)}"
        if not found:
            raise GcbenchError(
                f"{count} and no finished one: {names}; repeat the command to resume"
            )
        warn(f"{count} left out: {names}; repeat the command to resume")
    kept: dict[tuple[str, int], Run] = {}
    for candidate in found:
        key = (candidate.method, candidate.summary.seed)
        other = kept.setdefault(key, candidate)
        if other is not candidate and other.outcome != candidate.outcome:
            warn(
                f"same config and seed, other results: {candidate.source} left out, "
                f"{other.source} kept"
            )
    _warn_of_sources(list(kept.values()))
    return list(kept.values())


def _warn_of_sources(runs: Sequence[Run]) -> None:
    """Tell of configurations whose runs were made by different files of a built-in compressor."""
    digests: dict[str, dict[str, Run]] = {}
    for run in runs:
        if digest := run.summary.provenance.get("source"):
            digests.setdefault(run.method, {}).setdefault(digest, run)
    for made in digests.values():
        if len(made) > 1:
            name = next(iter(made.values())).summary.compressor_name
            told = ", ".join(f"{run.source} by {digest}" for digest, run in made.items())
            warn(f"runs of {name} by different versions of {name}.py are in one row: {told}")


def frame(runs: Sequence[Run]) -> DataFrame:
    """Return runs as a data frame, one a row; names of what is nested are joined by dots."""
    import pandas as pd

    return pd.json_normalize(
        [
            {**run.summary.model_dump(), "suite": run.suite, "source": str(run.source)}
            for run in runs
        ]
    )
