"""Carries out the runs of a grid: skips finished ones, resumes interrupted ones."""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gcbench.core.errors import DivergedError, GcbenchError, Interrupted, UsageError
from gcbench.core.schema import SCHEMA
from gcbench.training import captures, configuration, engines, membership, rows, sinks
from gcbench.training.configuration import Config
from gcbench.training.progress import Mode
from gcbench.training.store import Run
from gcbench.training.train import Options


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


Work = Generator[Config, Mapping[str, Any], None]
"""Yields configs, and is sent the summary of each."""


def each(configs: Sequence[Config]) -> Work:
    """Return the work of a grid that is known beforehand."""
    for config in configs:  # noqa: UP028 - `yield from` a list could not be sent anything
        yield config


def _raise_if_failed(summary: Mapping[str, Any], where: str) -> None:
    """Raise again what a run that was made before failed with."""
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
        told: tuple[str, ...] = (),
        kept: Path | None = None,
        suite: str = "",
        show: Callable[[Sequence[Mapping[str, Any]]], object] | None = None,
    ) -> None:
        """Look at what all runs have in common.

        `show` prints the summaries of finished runs; `told` names the sinks that hear of the
        records. `kept`: a file of rows (`gcbench.training.rows`). A run that has a row there is not
        made again, and each finished run adds its own; `suite`, as name/version, is told in them.
        """
        self.results, self.data_dir, self.force = results, data_dir, force
        self.checkpoint_seconds, self.progress = checkpoint_seconds, progress
        self.capture, self.told = capture, told
        self.kept, self.suite, self.show = kept, suite, show
        self.after = 0
        """Steps of the runs that are still to be made."""

    def all(self, configs: Sequence[Config], *, json: bool) -> None:
        """Do all runs of a grid, see `work`; what they need is checked before the first."""
        configs = [self._in_environment(config) for config in configs]
        for config in configs:
            self._check(config)
        pending = [config for config in configs if self._pending(config)]
        self.after = sum(config.steps for config in pending)
        if len(pending) > 1 and membership.leads():
            _say(f"{len(pending)} runs to make, {self.after:,} steps in all")
        self.work(each(configs), len(configs), json=json)

    def _pending(self, config: Config) -> bool:
        """Whether a run is still to be made, or to be finished."""
        return self.force or Run(self.results / config.run_name).summary is None

    def _check(self, config: Config) -> None:
        configuration.require_device(config.device)
        configuration.check_limits(config)
        if self.capture is not None:
            self.capture.check(config.run_name, config.steps)

    def work(self, work: Work, count: int, *, json: bool, tuned: bool = False) -> None:
        """Do the runs that `work` yields, then print their summaries.

        `count` is how many are known beforehand. `tuned`: runs that are not tested come on top of
        them, as trials that choose a rate.

        A run that fails does not keep the others from running; the first failure is raised at the
        end, after what was done has been printed.

        Raises:
            Interrupted: the user asked to stop.
            GcbenchError: a run failed.
        """
        leads = membership.leads()
        known = {}
        if self.kept is not None and not self.force:
            known = {one["config_hash"]: one for one in rows.read(self.kept)}
        done: list[dict[str, Any]] = []
        failures: list[GcbenchError] = []
        number = 0
        told: Mapping[str, Any] = {}
        while True:
            try:
                config = self._in_environment(work.send(told) if told else next(work))
            except StopIteration:
                break
            self._check(config)
            trial = tuned and not config.test
            number += not trial
            place = "[trial]" if trial else f"[{number}/{count}]"
            try:
                if config.hash in known:
                    told = known[config.hash]
                    configuration.check_objects(config, told, Path(str(self.kept)))
                    if leads:
                        _say(f"{place} {config.run_name}: its row is in {self.kept}, skipped")
                    _raise_if_failed(told, f"row in {self.kept}")
                else:
                    told = self.one(config, place, leads=leads)
                if not trial:
                    done.append(dict(told))
            except Interrupted as stopped:
                if leads:
                    self._explain_interruption(stopped, config, count - number + 1)
                raise
            except GcbenchError as error:
                told = {"failed": {"reason": str(error)}}
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
        """Under torchrun, become one worker of its job."""
        if not membership.by_torchrun():
            if config.engine == "torchrun":
                raise UsageError(
                    "engine torchrun is found from the environment: start the command with "
                    "`torchrun --nproc-per-node N -m gcbench run ...`, or use --engine spawn"
                )
            return config
        given = {**config.model_dump(), "engine": "torchrun"}
        return Config.make(given)

    def one(self, config: Config, place: str, *, leads: bool) -> dict[str, Any]:
        """Do one run, or find it done; return its summary.

        Raises:
            MissedError: it is past a step that is to be captured.
            GcbenchError: it was made, or begun, by a gcbench with other defaults.
            GcbenchError: it failed; its records and checkpoint stay.
        """
        run = Run(self.results / config.run_name)
        finished = None if self.force else run.summary
        if finished is not None and finished.get("schema") == SCHEMA:
            configuration.check_objects(config, finished, run.folder)
            if missing := self.capture.missing(run) if self.capture and leads else []:
                raise captures.missed(config.run_name, missing)
            _raise_if_failed(finished, f"found in {run.folder}; --force runs it again")
            if leads:
                _say(f"{place} {config.run_name}: finished before, skipped (--force runs it again)")
                self._retell(run, finished)
                self._keep(run, finished)
            return finished
        if not leads:
            self._engine(config, run)
            return {}
        threads = None
        run.create()
        with run.locked():
            resumed = not self.force and run.can_resume(config.model_dump(mode="json"))
            if resumed:
                made = run.read_provenance()
                configuration.check_objects(config, {"provenance": made}, run.folder)
                threads = configuration.threads_to_resume(made, run.folder)
                usual = configuration.threads_per_worker(config)
                as_then = f", with {threads} thread(s) a worker as then" if threads != usual else ""
                _say(f"{place} {config.run_name}: goes on from its checkpoint{as_then}")
            else:
                run.start(config.model_dump(mode="json"), configuration.provenance(config))
                sinks.forget(run, sinks.registered().keys() - self.told)
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
                self._keep(run, run.summary or {})
                raise
        summary = run.summary
        if summary is None:
            raise GcbenchError(f"{run.folder} has no summary after its run")
        self._keep(run, summary)
        return summary

    def _keep(self, run: Run, summary: Mapping[str, Any]) -> None:
        """Add a finished run to the file of rows."""
        if self.kept is not None:
            curve = [record for record in run.records() if record["kind"] == "eval"]
            rows.add(self.kept, rows.row(summary, curve, self.suite))

    def _engine(self, config: Config, run: Run, threads: int | None = None) -> None:
        self.after = max(0, self.after - config.steps)
        options = Options(
            self.data_dir,
            self.checkpoint_seconds,
            self.progress,
            after=self.after,
            capture=self.capture,
            sinks=self.told,
            threads=threads,
        )
        engines.ENGINES[config.engine](config, run, options)

    def _retell(self, run: Run, finished: dict[str, Any]) -> None:
        """Tell the sinks the records of a run that was finished before."""
        if self.told:
            with run.locked():
                sinks.retell(self.told, run, finished)
            _say(f"    its stored records went to {', '.join(self.told)}")

    def _explain_interruption(self, stopped: Interrupted, config: Config, left: int) -> None:
        _say(f"\n{config.run_name}: {stopped}; what is done is kept in {self.results}")
        words = shlex.join(word for word in sys.argv[1:] if word != "--force")
        start = "the same torchrun command" if config.engine == "torchrun" else f"gcbench {words}"
        _say(f"{left} run(s) left. Go on with: {start}")

    def _print(self, done: Sequence[dict[str, Any]], *, single: bool, json: bool) -> None:
        if json and not (single and not done):  # a run alone that failed has no document
            print(jsonlib.dumps(done[0] if single else list(done), indent=2))
        elif done:
            if self.show is not None:
                self.show(done)
            _say(f"runs in {self.results}; compare them: gcbench compare {self.results}")
