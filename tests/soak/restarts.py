"""Kill runs at random moments, again and again: parameters and records stay those of one whole run.

    python tests/soak/restarts.py --jobs 25 --kills 2 --save results/soak/restarts.json
    python tests/soak/restarts.py --engine spawn --jobs 25 --kills 2

torchrun: each job is `torchrun --max-restarts K -m gcbench run ...`, K of whose attempts end as one
of their workers, drawn at random, gets SIGKILL.
spawn: each job is `gcbench run --engine spawn ...`, repeated until it has been killed K times and
then to its end; the launcher or one of the workers, drawn at random, gets SIGKILL.

The moment is drawn, too: while they import, meet, train, evaluate or save. Not part of the suite:
it takes hours. It prints a line a job, and the figures in the end; its exit code is 1 if a job
hung, failed, left a process behind, or ended in other parameters or records than a run that nobody
disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import figures

TIMES = ("seconds",)
"""Columns of a record that no two runs have in common."""


class Ended(NamedTuple):
    """What a run that came to its end has left."""

    parameters: str
    """SHA-256 of the parameters."""
    records: list[dict[str, Any]]
    """The lines of metrics.jsonl, without times."""


def processes() -> Iterator[tuple[int, int, Path]]:
    """Yield every living process, its parent and its folder in /proc."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = path.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                yield int(path.name), int(parent), path


def workers_of(pid: int) -> dict[int, int]:
    """Return the workers of a launcher or of torchrun's agent `pid`, by rank."""
    forked = [child for child, parent, path in processes() if parent == pid and launches(path)]
    found = {}
    for child, parent, path in processes():
        with contextlib.suppress(OSError, IndexError):
            if parent in forked:
                found[int(path.joinpath("comm").read_text().rpartition("-")[2])] = child
            elif parent == pid and child not in forked:
                variables = path.joinpath("environ").read_text().split("\0")
                ranks = [int(word[5:]) for word in variables if word.startswith("RANK=")]
                found[ranks[0]] = child
    return found


def launches(path: Path) -> bool:
    """Return whether a process forks the local workers of a job."""
    words: list[str] = []
    with contextlib.suppress(OSError):
        words = path.joinpath("cmdline").read_text().split("\0")
    return any(word.endswith("training/launched.py") for word in words)


def command(results: str, engine: str, options: argparse.Namespace) -> list[str]:
    """Return the words of one run."""
    workers = options.workers
    words = f"run --task quadratic --compressor topk --workers {workers} --batch {12 * workers}"
    words += f" --steps {options.steps} --threads 1 --log-every 1 --eval-every 50"
    words += f" --checkpoint-seconds 0 --progress none --json --results {results}"
    return ["-m", "gcbench", *words.split(), *(["--engine", engine] if engine else [])]


def ended(results: str, out: str) -> Ended:
    """Return what a run that printed `out` has left in the folder `results`."""
    (path,) = Path(results).glob("*/metrics.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [{k: v for k, v in record.items() if k not in TIMES} for record in records]
    return Ended(json.loads(out)["params_sha256"], kept)


def undisturbed(options: argparse.Namespace) -> Ended:
    """Return what a simulated run leaves."""
    with tempfile.TemporaryDirectory() as results:
        words = [sys.executable, *command(results, "simulate", options)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return ended(results, done.stdout)


class Job:
    """A run in a folder of its own, and who kills it."""

    def __init__(self, options: argparse.Namespace, draw: random.Random, results: str) -> None:
        self.options, self.draw, self.results = options, draw, results
        self.kills: list[str] = []
        """Who was killed: "worker" or "launcher"."""
        self.end = time.monotonic() + options.patience

    def start(self, said: Any) -> subprocess.Popen[str]:
        """Start the run; stderr goes to the open file `said`."""
        words = command(self.results, "", self.options)
        if self.options.engine == "torchrun":
            agent = f"-m torch.distributed.run --max-restarts {self.options.kills}"
            words = [*agent.split(), "--nproc-per-node", str(self.options.workers), *words]
        else:
            words = command(self.results, "spawn", self.options)
        environment = {"OMP_NUM_THREADS": "1", "GCBENCH_COLLECTIVE_TIMEOUT": "120"}
        return subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, **environment},
        )

    def kill(self, process: subprocess.Popen[str], before: set[int]) -> set[int]:
        """Kill at a random moment of one attempt; return its workers, none if it ended first.

        `before`: workers of earlier attempts, which torchrun's agent has yet to end.
        """
        while process.poll() is None and time.monotonic() < self.end:
            there = {r: pid for r, pid in workers_of(process.pid).items() if pid not in before}
            if len(there) < self.options.workers:
                time.sleep(0.05)
                continue
            time.sleep(self.draw.uniform(0, self.options.longest))
            if set(workers_of(process.pid).values()) != set(there.values()):
                continue
            launcher = self.options.engine == "spawn" and self.draw.random() < 0.5
            pid = process.pid if launcher else there[self.draw.randrange(self.options.workers)]
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.kills.append("launcher" if launcher else "worker")
                    return set(there.values())
        return set()

    def wait(self, process: subprocess.Popen[str]) -> str | None:
        """Return what the run printed, or None if it hung."""
        try:
            return process.communicate(timeout=max(1.0, self.end - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return None

    def left(self, seen: set[int]) -> list[int]:
        """Return which of these processes still live ten seconds later."""
        end = time.monotonic() + 10
        while left := [pid for pid, *_ in processes() if pid in seen]:
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        return left

    def run(self, expected: Ended) -> str:
        """Return what came of the job: "same", or what is wrong."""
        seen: set[int] = set()
        spawned = self.options.engine == "spawn"
        with open(f"{self.results}/said", "w+") as said:
            while True:
                process, hit = self.start(said), False
                while len(self.kills) < self.options.kills:
                    workers = self.kill(process, seen)
                    seen |= workers
                    hit = bool(workers)
                    if spawned or not hit:
                        break
                out = self.wait(process)
                if out is None:
                    return "hung"
                if not (spawned and hit and process.returncode):
                    break
            said.seek(0)
            text = said.read()
        if process.returncode:
            return f"exit code {process.returncode}: {text[-600:]}"
        if spawned and "Traceback" in text:
            return f"a traceback: {text[-600:]}"
        if left := self.left(seen):
            return f"processes {left} were left behind"
        found = ended(self.results, out)
        if found.parameters != expected.parameters:
            return "other parameters"
        return "same" if found.records == expected.records else "other records"


def main() -> int:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["torchrun", "spawn"], default="torchrun")
    parser.add_argument("--jobs", type=int, default=25)
    parser.add_argument("--kills", type=int, default=2, help="in a job, at most")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--longest", type=float, default=8.0, help="seconds until a kill, at most")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for a job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="where the figures go, JSON")
    options = parser.parse_args()
    began, draw = datetime.now(UTC), random.Random(options.seed)
    expected = undisturbed(options)
    outcomes: list[str] = []
    kills: list[str] = []
    for number in range(1, options.jobs + 1):
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as results:
            job = Job(options, draw, results)
            outcomes.append(job.run(expected))
        kills += job.kills
        took = time.monotonic() - started
        print(f"{number}: {outcomes[-1]}, {len(job.kills)} kill(s), {took:.0f} s", flush=True)
        if options.save:
            found = {
                "engine": options.engine,
                "jobs": len(outcomes),
                "workers": options.workers,
                "kills": {who: kills.count(who) for who in sorted(set(kills))},
                "same": outcomes.count("same"),
                "others": [outcome for outcome in outcomes if outcome != "same"],
            }
            figures.save(options.save, began, found)
    good = outcomes.count("same")
    print(f"{good} of {len(outcomes)} jobs ended in the same bits, after {len(kills)} kills")
    return int(good < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
