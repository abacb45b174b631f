"""Runs a grid sequentially: skips finished runs and resumes interrupted ones."""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from gcbench.core import output
from gcbench.core.errors import DivergedError, GcbenchError, Interrupted, UsageError
from gcbench.core.progress import Mode
from gcbench.results import rows, update_rule
from gcbench.results.schema import SCHEMA
from gcbench.training import captures, configuration, engines, rank, resume, sinks
from gcbench.training.configuration import Config
from gcbench.training.store import Run
from gcbench.training.train import Options


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


Work = Generator[Config, Mapping[str, Any], None]
"""A generator that yields configs, and receives the summary of each before it yields the next."""


def each(configs: Sequence[Config]) -> Work:
    """Yield the configs of a grid, ignoring their summaries."""
    for config in configs:  # noqa: UP028 - `yield from` a list cannot receive summaries
        yield config


def _raise_if_failed(summary: Mapping[str, Any], where: str) -> None:
    """Raise DivergedError if a stored run diverged; `where` describes where it is stored."""
    if failed := summary.get("failed"):
        raise DivergedError(f"{failed['reason']} ({where})", failed["step"])


@dataclass
class Runner:
    """Runs configs sequentially, each in its folder below `results`."""

    results: Path
    data_dir: Path | None
    checkpoint_seconds: float
    progress: Mode
    _: KW_ONLY
    force: bool
    capture: captures.Plan | None = None
    """The gradients to store."""
    sink_names: tuple[str, ...] = ()
    """The sinks that receive the records."""
    rows_files: Sequence[Path] = ()
    """Files of rows (`gcbench.results.rows`). Runs with a row in one of them are skipped; each
    finished run adds a row to the first."""
    suite: str = ""
    """The label of added rows, name/version."""
    show: Callable[[Sequence[Mapping[str, Any]]], object] | None = None
    """Prints the summaries of finished runs."""
    caller: str = ""
    """The function of the Python API that a script called; "" for a command."""
    stale: dict[str, Path] = field(default_factory=dict, init=False)
    """The earlier summaries of configs to repeat by `force`, by hash, until these are finished. A
    run deletes its own at its first step."""
    stale_rows: set[str] = field(default_factory=set, init=False)
    """The hashes of configs to repeat by `force`, of which a file still has the earlier row."""
    flagged: set[str] = field(default_factory=set, init=False)
    """Printed messages about runs whose update rule differs from their method's."""
    finished: set[str] = field(default_factory=set, init=False)
    """The hashes of the configs whose runs this runner has finished."""
    after: int = field(default=0, init=False)
    """The total steps of the remaining runs."""

    def all(self, configs: Sequence[Config], *, json: bool) -> None:
        """Run all configs of a grid, like `work`, after checking their devices and limits."""
        configs = [self._in_environment(config) for config in configs]
        for config in configs:
            self._check(config)
        stored = self._rows()
        if self.force:
            places = {one.hash: self.results / one.run_name / "summary.json" for one in configs}
            self.stale = {name: path for name, path in places.items() if path.exists()}
            self.stale_rows, stored = places.keys() & stored.keys(), {}
        pending = [one for one in configs if one.hash not in stored and self._pending(one)]
        self.after = sum(config.steps for config in pending)
        if len(pending) > 1 and rank.leads():
            _say(f"{len(pending)} runs, {self.after:,} steps in total")
        self.work(each(configs), len(configs), json=json)

    def _rows(self) -> dict[str, tuple[rows.StoredRun, Path]]:
        """Return the rows of all files, with their files, by config hash.

        If several rows have the same config, the first one counts.
        """
        stored: dict[str, tuple[rows.StoredRun, Path]] = {}
        for path in self.rows_files:
            for one in rows.read(path):
                stored.setdefault(configuration.hash_of(one["config"]), (one, path))
        return stored

    def stored_elsewhere(self, work: Work, path: Path) -> list[Config]:
        """Return the runs and trials of `work` that are not stored here but have rows in `path`.

        Runs with a row in one of the files of rows, and finished runs, are stored here. A run
        without any row counts as failed.

        Raises:
            GcbenchError: the file cannot be read, or is not a file of rows.
        """
        stored = {} if self.force else self._rows()
        elsewhere = {configuration.hash_of(one["config"]): one for one in rows.read(path)}
        configs: list[Config] = []
        summary: Mapping[str, Any] = {}
        while True:
            try:
                config = work.send(summary) if summary else next(work)
            except StopIteration:
                return configs
            finished = None if self.force else Run(self.results / config.run_name).summary
            if config.hash in stored:
                summary = stored[config.hash][0]
            elif finished is not None:
                summary = finished
            elif config.hash in elsewhere:
                summary = elsewhere[config.hash]
                configs.append(config)
            else:
                summary = {"failed": {"reason": "not run yet"}}

    def _pending(self, config: Config) -> bool:
        """Return whether a run is unfinished or must be repeated."""
        return self.force or Run(self.results / config.run_name).summary is None

    def _check(self, config: Config) -> None:
        configuration.require_device(config.device)
        configuration.check_limits(config)
        if self.capture is not None:
            self.capture.check(config.run_name, config.steps)

    def _flag(self, config: Config) -> None:
        """Print once that a run's update rule differs from that of the method's source."""
        other = update_rule.other(config.model_dump(mode="json"))
        if other is None:
            return
        message = (
            f"{config.compressor}: the update rule differs from its source: {other.summary}. "
            f"`gcbench compare` flags the run; the rule of the source: {other.flags}"
        )
        if message not in self.flagged:
            self.flagged.add(message)
            _say(message)

    def work(self, work: Work, count: int, *, json: bool, tuned: bool = False) -> None:
        """Run the configs that `work` yields, then print their summaries.

        `count`: the number of runs, without trials. `tuned`: `work` also yields trials that choose
        a learning rate, the runs that do not evaluate the test split.

        If a run fails, the others continue; the first failure is raised at the end, after printing
        the summaries. A trial that diverges does not count as a failure.

        Raises:
            Interrupted: the user interrupted the runs.
            GcbenchError: a run failed.
        """
        leads, stored = rank.leads(), {} if self.force else self._rows()
        done: list[dict[str, Any]] = []
        failures: list[Exception] = []
        number = 0
        summary: Mapping[str, Any] = {}
        while True:
            try:
                config = self._in_environment(work.send(summary) if summary else next(work))
            except StopIteration:
                break
            self._check(config)
            if leads:
                self._flag(config)
            trial = tuned and not config.test
            number += not trial
            place = "[trial]" if trial else f"[{number}/{count}]"
            try:
                if config.hash in stored:
                    summary, path = stored[config.hash]
                    resume.check_objects(config, summary, path, self.data_dir)
                    if leads:
                        if not trial:
                            self._check_captured(config, path)
                        source = resume.other_source(config, summary)
                        _say(f"{place} {config.run_name}: its row is in {path}, skipped{source}")
                        self._resend(Run(self.results / config.run_name))
                    _raise_if_failed(summary, f"row in {path}")
                else:
                    summary = self.one(config, place, leads=leads)
                if not trial:
                    done.append(dict(summary))
            except Interrupted as stopped:
                if leads:
                    left = count - number + (config.hash not in self.finished)
                    self._explain_interruption(stopped, config, left, tuned=tuned)
                raise
            except GcbenchError as error:
                summary = {"failed": {"reason": str(error)}}
                if trial:
                    if not isinstance(error, DivergedError):
                        raise  # a rate cannot be chosen without it
                    _say(f"{place} {config.run_name}: {error}")
                    continue
                if count > 1:
                    _say(f"gcbench: {config.run_name} failed: {error}")
                failures.append(error)
            except Exception as error:  # of a plug-in, for example
                closed = isinstance(error, BrokenPipeError)
                if trial or count == 1 or closed or rank.by_torchrun():
                    raise  # under torchrun other ranks may wait for this one: the job must end
                summary = {"failed": {"reason": repr(error)}}
                _say(f"gcbench: {config.run_name} failed: {type(error).__name__}: {error}")
                failures.append(error)
        if leads:
            self._print(done, single=count == 1, json=json)
        if failures:
            raise failures[0]

    def _in_environment(self, config: Config) -> Config:
        """Return the config with engine torchrun under torchrun, unless its engine is ddp."""
        if not rank.by_torchrun():
            if config.engine == "torchrun":
                raise UsageError(
                    "engine torchrun needs torchrun: start the command with "
                    "`torchrun --nproc-per-node N -m gcbench run ...`, or use --engine spawn"
                )
            return config
        if config.engine == "ddp":
            return config
        return Config.make({**config.model_dump(), "engine": "torchrun"})

    def one(self, config: Config, place: str, *, leads: bool) -> dict[str, Any]:
        """Run or resume one config, unless it is finished; return its summary.

        `place`: its number among all runs, for messages. Without `leads` the summary is empty
        unless the run was finished before, because worker 0's process has it.

        Raises:
            MissedError: the run has passed a step to capture.
            UsageError: it would add a reference row from an uncommitted working tree.
            GcbenchError: it was started by a gcbench with other defaults.
            GcbenchError: it failed; its records and checkpoint remain.
        """
        run = Run(self.results / config.run_name)
        finished = None if self.force else run.summary
        if finished is not None and finished.get("schema") == SCHEMA:
            resume.check_objects(config, finished, run.folder, self.data_dir)
            if missing := self.capture.missing(run) if self.capture and leads else []:
                raise captures.missed(config.run_name, missing)
            if leads:
                self._require_clean(finished.get("provenance"))
                self._add_row(run, finished)
            _raise_if_failed(finished, f"stored in {run.folder}; --force runs it again")
            if leads:
                source = resume.other_source(config, finished)
                _say(
                    f"{place} {config.run_name}: finished before, skipped{source} (--force runs it "
                    "again)"
                )
                self._resend(run)
            return finished
        if not leads:
            self._engine(config, run)
            return {}
        with ExitStack() as lock:
            try:
                self._require_clean(None)
                run.create()
                lock.enter_context(run.locked())
                threads = self._prepare(config, run, place)
            except GcbenchError as error:
                engines.refuse(config, error)
                raise
            try:
                self._engine(config, run, threads)
            except DivergedError as error:
                run.finish(configuration.failed(config, run, error))
                self._add_row(run, run.summary or {})
                raise
            except Interrupted:
                if (summary := run.summary) is not None:  # interrupted after the last step
                    self.finished.add(config.hash)
                    self._add_row(run, summary)
                run.remove_unless_begun()
                raise
            except BaseException:
                run.remove_unless_begun()
                raise
        summary = run.summary
        if summary is None:
            raise GcbenchError(f"{run.folder} has no summary after its run")
        self._add_row(run, summary)
        return summary

    def _prepare(self, config: Config, run: Run, place: str) -> int | None:
        """Prepare the folder of a run; return the threads per worker if it resumes, else None."""
        settings = config.model_dump(mode="json")
        if self.force or not run.can_resume(settings):
            if run.has_checkpoint and not self.force:
                _say(
                    f"{place} {config.run_name}: its checkpoint was written with other settings, "
                    "so the run starts over at step 0"
                )
            provenance = configuration.provenance(config, self.data_dir)
            run.start(settings, provenance)
            carried = "" if config.memory == "none" else f", memory {config.memory}"
            _say(
                f"{place} {config.run_name}: {config.make_compressor()!r}, "
                f"{config.workers} workers, {config.engine}, {config.collective}{carried}, "
                f"{config.steps} steps of batch {config.batch}; "
                f"backend {configuration.serving(config)}"
            )
            return None
        provenance = run.read_provenance()
        self._require_clean(provenance)
        resume.check_objects(config, {"provenance": provenance}, run.folder, self.data_dir)
        threads = resume.threads_to_resume(config, provenance, run.folder)
        original = ""
        if threads != configuration.threads_per_worker(config):
            each = f"{threads} thread{'s' * (threads > 1)}"
            original = f" with {each} per worker, as in the original run"
        source = resume.other_source(config, {"provenance": provenance})
        _say(f"{place} {config.run_name}: resuming from checkpoint{original}{source}")
        return threads

    def _require_clean(self, started: Mapping[str, Any] | None) -> None:
        """Check the file that the row will be added to, see `configuration.require_clean`."""
        for path in self.rows_files[:1]:
            configuration.require_clean(path, started)

    def _add_row(self, run: Run, summary: Mapping[str, Any]) -> None:
        """Add a finished run to the first file of rows, if any."""
        self.stale.pop(summary["config_hash"], None)
        if self.rows_files:
            curve = [record for record in run.records() if record["kind"] == "eval"]
            rows.add(self.rows_files[0], rows.row(summary, curve, self.suite))
            self.stale_rows.discard(summary["config_hash"])

    def _engine(self, config: Config, run: Run, threads: int | None = None) -> None:
        self.after = max(0, self.after - config.steps)
        options = Options(
            self.data_dir,
            self.checkpoint_seconds,
            self.progress,
            after=self.after,
            capture=self.capture,
            sinks=self.sink_names,
            threads=threads,
        )
        engines.ENGINES[config.engine](config, run, options)

    def _check_captured(self, config: Config, path: Path) -> None:
        """Raise MissedError for a run with a row in `path` and without the planned captures."""
        run = Run(self.results / config.run_name)
        if self.capture is not None and (missing := self.capture.missing(run)):
            raise captures.MissedError(
                f"{config.run_name} has a row in {path}, and {self.results} has no gradients of "
                f"its step(s) {', '.join(map(str, missing))}; use --force to run it again, or "
                "another file of rows"
            )

    def _resend(self, run: Run) -> None:
        """Send the sinks the records of a run that was finished before, if they are here."""
        if not self.sink_names:
            return
        names = ", ".join(self.sink_names)
        if (finished := run.summary) is None:
            _say(f"    sent nothing to {names}: {self.results} has no records of it")
            return
        with run.locked():
            sinks.resend(self.sink_names, run, finished)
        _say(f"    sent its stored records to {names}")

    def _explain_interruption(
        self, stopped: Interrupted, config: Config, left: int, *, tuned: bool
    ) -> None:
        _say(f"\n{config.run_name}: {stopped}; finished steps are stored in {self.results}")
        arguments = shlex.join(each for each in sys.argv[1:] if each != "--force")
        command, flag = f"gcbench {arguments}", ""
        if self.caller:
            command, flag = f"the same call of {self.caller}", "force"
        elif rank.by_torchrun():
            command, flag = "the same torchrun command", "--force"
        if self.force and flag:
            command += f" without {flag}"
        verb = "Continue" if left else "Show the results"
        _say(f"{left} run(s) left. {verb} with: {command}")
        existing = {name for name, path in self.stale.items() if path.exists()}
        if stale := existing | self.stale_rows:
            _say(
                f"It skips {len(stale)} of them, which still have results from before --force: "
                "repeat these with --force and their own settings, such as --seed"
            )
        elif self.force and tuned:
            _say(
                "It skips runs and trials that still have results from before --force: to repeat "
                "these, too, start again with --force"
            )

    def _print(self, done: Sequence[dict[str, Any]], *, single: bool, json: bool) -> None:
        if json and not (single and not done):  # print nothing for a single run that failed
            output.emit(jsonlib.dumps(done[0] if single else list(done), indent=2))
        elif done:
            if self.show is not None:
                self.show(done)
            what, places = (
                ("rows", self.rows_files) if self.rows_files else ("runs", [self.results])
            )
            paths = shlex.join(map(str, places))
            _say(f"{what} in {paths}; compare them: gcbench compare {paths}")
