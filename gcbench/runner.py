"""Carries out the runs of a grid: skips finished ones, resumes interrupted ones."""

from __future__ import annotations

import json as jsonlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gcbench import captures, engines, experiment, listing, registry, sinks
from gcbench.errors import GcbenchError, UsageError
from gcbench.experiment import Config
from gcbench.progress import Mode
from gcbench.schema import SCHEMA
from gcbench.store import Run
from gcbench.train import Interrupted, Options


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    ) -> None:
        """`told` names the sinks that hear of the records."""
        self.results, self.data_dir, self.force = results, data_dir, force
        self.checkpoint_seconds, self.progress = checkpoint_seconds, progress
        self.capture, self.told = capture, told

    def all(self, configs: Sequence[Config], *, json: bool) -> None:
        """Do all runs, then print their summaries.

        A run that fails does not keep the others from running; the first failure is raised at the
        end, after what was done has been printed.

        Raises:
            Interrupted: the user asked to stop.
            GcbenchError: a run failed.
        """
        configs = [self._in_environment(config) for config in configs]
        for config in configs:
            experiment.require_device(config.device)
            if self.capture is not None:
                self.capture.check(config.run_name, config.steps)
        leads = int(os.environ.get("RANK", "0")) == 0
        done: list[dict[str, Any]] = []
        failures: list[GcbenchError] = []
        for number, config in enumerate(configs, 1):
            try:
                done.append(self.one(config, f"[{number}/{len(configs)}]", leads=leads))
            except Interrupted as stopped:
                if leads:
                    self._explain_interruption(stopped, config, len(configs) - number + 1)
                raise
            except GcbenchError as error:
                if len(configs) > 1:
                    _say(f"gcbench: {config.run_name} failed: {error}")
                failures.append(error)
        if leads:
            self._print(done, single=len(configs) == 1, json=json)
        if failures:
            raise failures[0]

    def _in_environment(self, config: Config) -> Config:
        """Under torchrun, become one worker of its job."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
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
            experiment.check_objects(config, finished, run.folder)
            if missing := self.capture.missing(run) if self.capture and leads else []:
                raise captures.missed(config.run_name, missing)
            if leads:
                _say(f"{place} {config.run_name}: finished before, skipped (--force runs it again)")
                self._retell(run, finished)
            return finished
        if not leads:
            self._engine(config, run)
            return {}
        run.create()
        with run.locked():
            resumed = not self.force and run.can_resume(config.model_dump(mode="json"))
            if resumed:
                experiment.check_objects(config, {"provenance": run.read_provenance()}, run.folder)
                _say(f"{place} {config.run_name}: goes on from its checkpoint")
            else:
                run.start(config.model_dump(mode="json"), experiment.provenance(config))
                sinks.forget(run, registry.sinks().keys() - self.told)
                carried = "" if config.memory == "none" else f", memory {config.memory}"
                _say(
                    f"{place} {config.run_name}: {config.make_compressor()!r}, "
                    f"{config.workers} workers, {config.engine}, {config.collective}{carried}, "
                    f"{config.steps} steps of batch {config.batch}; "
                    f"backend {experiment.serving(config)}"
                )
            self._engine(config, run)
        summary = run.summary
        if summary is None:
            raise GcbenchError(f"{run.folder} has no summary after its run")
        return summary

    def _engine(self, config: Config, run: Run) -> None:
        options = Options(
            self.data_dir,
            self.checkpoint_seconds,
            self.progress,
            capture=self.capture,
            sinks=self.told,
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
            listing.show_table(listing.summaries(done))
            _say(f"runs in {self.results}; compare them: gcbench compare {self.results}")
