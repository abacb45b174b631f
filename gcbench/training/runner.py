"""Makes the runs of a grid one after the other: skips finished ones, resumes interrupted ones."""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gcbench.core import output
from gcbench.core.errors import DivergedError, GcbenchError, Interrupted, UsageError
from gcbench.core.progress import Mode
from gcbench.results import rows, update_rule
from gcbench.results.schema import SCHEMA
from gcbench.training import captures, configuration, engines, membership, sinks
from gcbench.training.configuration import Config
from gcbench.training.store import Run
from gcbench.training.train import Options


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


Work = Generator[Config, Mapping[str, Any], None]
"""A generator that yields configs, and is sent the summary of each before it yields the next."""


def each(configs: Sequence[Config]) -> Work:
    """Yield the configs of a grid, whatever their summaries are."""
    for config in configs:  # noqa: UP028 - `yield from` a list could not be sent anything
        yield config


def _raise_if_failed(summary: Mapping[str, Any], where: str) -> None:
    """Raise the error with which a stored run failed, if it did; `where` says where it is stored.

    Raises:
        DivergedError: the run diverged.
    """
    if failed := summary.get("failed"):
        raise DivergedError(f"{failed['reason']} ({where})", failed["step"])


class Runner:
    """Runs configs one after the other, each in its folder below `results`."""

    def __init__(
        self,
        results: Path,
        data_dir: Path | None,
        checkpoint_seconds: float,
        progress: Mode,
        *,
        force: bool,
        capture: captures.Plan | None = None,
        sink_names: tuple[str, ...] = (),
        rows_files: Sequence[Path] = (),
        suite: str = "",
        show: Callable[[Sequence[Mapping[str, Any]]], object] | None = None,
    ) -> None:
        """Keep what all runs have in common.

        `capture`: which gradients are kept; `sink_names`: the sinks that receive the records;
        `show` prints the summaries of finished runs. `rows_files`: files of rows
        (`gcbench.results.rows`); a run that has a row in one of them is not made again, and each
        finished run adds its own to the first, with `suite`, name/version, as the suite for which
        it was made.
        """
        self.results, self.data_dir, self.force = results, data_dir, force
        self.checkpoint_seconds, self.progress = checkpoint_seconds, progress
        self.capture, self.sink_names = capture, sink_names
        self.rows_files, self.suite, self.show = tuple(rows_files), suite, show
        self.stale: set[str] = set()
        """The hashes of configs that `force` makes again, and that still have earlier results."""
        self.marked: set[str] = set()
        """What was said of runs that have another update rule than their method."""
        self.after = 0
        """How many steps the runs that are still to be made have together."""

    def all(self, configs: Sequence[Config], *, json: bool) -> None:
        """Make all runs of a grid, as `work` does, after their devices and limits are checked."""
        configs = [self._in_environment(config) for config in configs]
        for config in configs:
            self._check(config)
        known = self._rows()
        pending = [one for one in configs if one.hash not in known and self._pending(one)]
        if self.force:
            places = {one.hash: self.results / one.run_name / "summary.json" for one in configs}
            self.stale = {name for name, path in places.items() if path.exists()}
        self.after = sum(config.steps for config in pending)
        if len(pending) > 1 and membership.leads():
            _say(f"{len(pending)} runs to make, {self.after:,} steps in all")
        self.work(each(configs), len(configs), json=json)

    def _rows(self) -> dict[str, tuple[rows.StoredRun, Path]]:
        """Return the rows of runs that are not to be made again, each with its file.

        The keys are the hashes of their configs. Of two rows with one config the first counts.
        """
        found: dict[str, tuple[rows.StoredRun, Path]] = {}
        for path in () if self.force else self.rows_files:
            for one in rows.read(path):
                found.setdefault(configuration.hash_of(one["config"]), (one, path))
        return found

    def stored_elsewhere(self, work: Work, path: Path) -> list[Config]:
        """Return the runs, trials too, that `work` would have made though `path` has their rows.

        Runs that have a row in one of the files given, or are finished, would not be made. A run
        that has a row nowhere counts as failed.

        Raises:
            GcbenchError: the file cannot be read, or holds something else.
        """
        known = self._rows()
        elsewhere = {configuration.hash_of(one["config"]): one for one in rows.read(path)}
        found: list[Config] = []
        summary: Mapping[str, Any] = {}
        while True:
            try:
                config = work.send(summary) if summary else next(work)
            except StopIteration:
                return found
            finished = None if self.force else Run(self.results / config.run_name).summary
            if config.hash in known:
                summary = known[config.hash][0]
            elif finished is not None:
                summary = finished
            elif config.hash in elsewhere:
                summary = elsewhere[config.hash]
                found.append(config)
            else:
                summary = {"failed": {"reason": "not made yet"}}

    def _pending(self, config: Config) -> bool:
        """Return whether a run is not finished yet, or is to be repeated."""
        return self.force or Run(self.results / config.run_name).summary is None

    def _check(self, config: Config) -> None:
        configuration.require_device(config.device)
        configuration.check_limits(config)
        if self.capture is not None:
            self.capture.check(config.run_name, config.steps)

    def _mark(self, config: Config) -> None:
        """Say once that a run applies its update otherwise than the method's source, if it does."""
        found = update_rule.other(config.model_dump(mode="json"))
        if found is None:
            return
        said = (
            f"{config.compressor} does not move here as in its source: {found.words}. "
            f"`gcbench compare` marks the run; as in its source: {found.flags}"
        )
        if said not in self.marked:
            self.marked.add(said)
            _say(said)

    def work(self, work: Work, count: int, *, json: bool, tuned: bool = False) -> None:
        """Make the runs that `work` yields, then print their summaries.

        `count` is the number of runs, without trials. `tuned`: `work` also yields trials, which
        choose a learning rate: the runs that do not evaluate the test split.

        If a run fails, the others are still made; the first failure is raised at the end, after
        the summaries have been printed. A trial that diverges is no failure.

        Raises:
            Interrupted: the user asked to stop.
            GcbenchError: a run failed.
        """
        leads, known = membership.leads(), self._rows()
        done: list[dict[str, Any]] = []
        failures: list[GcbenchError] = []
        number = 0
        summary: Mapping[str, Any] = {}
        while True:
            try:
                config = self._in_environment(work.send(summary) if summary else next(work))
            except StopIteration:
                break
            self._check(config)
            if leads:
                self._mark(config)
            trial = tuned and not config.test
            number += not trial
            place = "[trial]" if trial else f"[{number}/{count}]"
            try:
                if config.hash in known:
                    summary, path = known[config.hash]
                    configuration.check_objects(config, summary, path)
                    if leads:
                        then = configuration.other_source(config, summary)
                        _say(f"{place} {config.run_name}: its row is in {path}, skipped{then}")
                    _raise_if_failed(summary, f"row in {path}")
                else:
                    summary = self.one(config, place, leads=leads)
                if not trial:
                    done.append(dict(summary))
            except Interrupted as stopped:
                if leads:
                    self._explain_interruption(stopped, config, count - number + 1)
                raise
            except GcbenchError as error:
                summary = {"failed": {"reason": str(error)}}
                if trial:
                    if not isinstance(error, DivergedError):
                        raise  # without it no rate can be chosen
                    _say(f"{place} {config.run_name}: {error}")
                    continue
                if count > 1:
                    _say(f"gcbench: {config.run_name} failed: {error}")
                failures.append(error)
        if leads:
            self._print(done, single=count == 1, json=json)
        if failures:
            raise failures[0]

    def _in_environment(self, config: Config) -> Config:
        """Return the config with engine torchrun under torchrun, unless its engine is ddp.

        Raises:
            UsageError: engine torchrun was asked for, but torchrun did not start this process.
        """
        if not membership.by_torchrun():
            if config.engine == "torchrun":
                raise UsageError(
                    "engine torchrun is found from the environment: start the command with "
                    "`torchrun --nproc-per-node N -m gcbench run ...`, or use --engine spawn"
                )
            return config
        if config.engine == "ddp":
            return config
        given = {**config.model_dump(), "engine": "torchrun"}
        return Config.make(given)

    def one(self, config: Config, place: str, *, leads: bool) -> dict[str, Any]:
        """Make or resume one run, or find it finished; return its summary.

        `place` is its number among all, for messages. Without `leads` the summary is empty, unless
        the run was finished before: worker 0's process has it.

        Raises:
            MissedError: the run is past a step that is to be captured.
            UsageError: its row would be a reference row of a state that is not committed.
            GcbenchError: it was made, or begun, by a gcbench with other defaults.
            GcbenchError: it failed; its records and checkpoint stay.
        """
        run = Run(self.results / config.run_name)
        finished = None if self.force else run.summary
        if finished is not None and finished.get("schema") == SCHEMA:
            configuration.check_objects(config, finished, run.folder)
            if missing := self.capture.missing(run) if self.capture and leads else []:
                raise captures.missed(config.run_name, missing)
            if leads:
                self._add_row(run, finished)
            _raise_if_failed(finished, f"found in {run.folder}; --force runs it again")
            if leads:
                then = configuration.other_source(config, finished)
                _say(
                    f"{place} {config.run_name}: finished before, skipped{then} (--force runs it "
                    "again)"
                )
                self._retell(run, finished)
            return finished
        if not leads:
            self._engine(config, run)
            return {}
        threads = None
        for path in self.rows_files[:1]:
            configuration.require_clean(path)
        run.create()
        with run.locked():
            resumed = not self.force and run.can_resume(config.model_dump(mode="json"))
            if resumed:
                made = run.read_provenance()
                configuration.check_objects(config, {"provenance": made}, run.folder)
                threads = configuration.threads_to_resume(made, run.folder)
                usual = configuration.threads_per_worker(config)
                as_then = f", with {threads} thread(s) a worker as then" if threads != usual else ""
                then = configuration.other_source(config, {"provenance": made})
                _say(f"{place} {config.run_name}: goes on from its checkpoint{as_then}{then}")
            else:
                run.start(config.model_dump(mode="json"), configuration.provenance(config))
                self.stale.discard(config.hash)
                sinks.forget(run, sinks.registered().keys() - self.sink_names)
                carried = "" if config.memory == "none" else f", memory {config.memory}"
                _say(
                    f"{place} {config.run_name}: {config.make_compressor()!r}, "
                    f"{config.workers} workers, {config.engine}, {config.collective}{carried}, "
                    f"{config.steps} steps of batch {config.batch}; "
                    f"backend {configuration.serving(config)}"
                )
            try:
                self._engine(config, run, threads)
            except DivergedError as error:
                run.finish(configuration.failed(config, run, error))
                self._add_row(run, run.summary or {})
                raise
        summary = run.summary
        if summary is None:
            raise GcbenchError(f"{run.folder} has no summary after its run")
        self._add_row(run, summary)
        return summary

    def _add_row(self, run: Run, summary: Mapping[str, Any]) -> None:
        """Add a finished run to the first file of rows, if there is one."""
        if self.rows_files:
            curve = [record for record in run.records() if record["kind"] == "eval"]
            rows.add(self.rows_files[0], rows.row(summary, curve, self.suite))

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

    def _retell(self, run: Run, finished: dict[str, Any]) -> None:
        """Send the sinks the records of a run that was finished before."""
        if self.sink_names:
            with run.locked():
                sinks.retell(self.sink_names, run, finished)
            _say(f"    its stored records went to {', '.join(self.sink_names)}")

    def _explain_interruption(self, stopped: Interrupted, config: Config, left: int) -> None:
        _say(f"\n{config.run_name}: {stopped}; what is done is kept in {self.results}")
        words = shlex.join(word for word in sys.argv[1:] if word != "--force")
        start = "the same torchrun command" if config.engine == "torchrun" else f"gcbench {words}"
        _say(f"{left} run(s) left. Go on with: {start}")
        if self.stale:
            _say(
                f"It skips {len(self.stale)} of them, whose results are still those of before "
                "--force: make these again by --force with their own settings, such as --seed"
            )

    def _print(self, done: Sequence[dict[str, Any]], *, single: bool, json: bool) -> None:
        if json and not (single and not done):  # a single run that failed prints no document
            output.emit(jsonlib.dumps(done[0] if single else list(done), indent=2))
        elif done:
            if self.show is not None:
                self.show(done)
            what, places = (
                ("rows", self.rows_files) if self.rows_files else ("runs", [self.results])
            )
            words = shlex.join(map(str, places))
            _say(f"{what} in {words}; compare them: gcbench compare {words}")
