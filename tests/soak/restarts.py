"""Kill workers of torchrun at random moments, again and again: the parameters stay the same.

    python tests/soak/restarts.py --jobs 50

Each job is `torchrun --max-restarts R -m gcbench run ...`, R of whose attempts end as one of their
workers, drawn at random, gets SIGKILL at a random moment: while it imports, meets the others,
trains or evaluates. Not part of the suite: it takes hours. It prints a line a job and the figures
in the end; its exit code is 1 if a job hung, failed, or ended in other parameters than a run that
nobody disturbed.
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
from pathlib import Path


def children(pid: int) -> dict[int, int]:
    """Return the workers of torchrun's agent `pid`: their process by RANK."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = path.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
            words = path.joinpath("environ").read_text().split("\0")
            ranks = [int(word[5:]) for word in words if word.startswith("RANK=")]
            if int(parent) == pid and state != "Z" and ranks:
                found[ranks[0]] = int(path.name)
    return found


def command(results: str, workers: int, steps: int) -> list[str]:
    """Return the words of one run."""
    words = f"run --task quadratic --workers {workers} --batch {12 * workers} --steps {steps}"
    rest = "--log-every 1 --eval-every 50 --checkpoint-seconds 0 --progress none --json --results"
    return ["-m", "gcbench", *words.split(), *rest.split(), results]


def undisturbed(workers: int, steps: int) -> str:
    """Return the digest of the parameters of a simulated run."""
    with tempfile.TemporaryDirectory() as results:
        words = [sys.executable, *command(results, workers, steps), "--threads", "1"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    return str(json.loads(done.stdout)["params_sha256"])


def job(options: argparse.Namespace, draw: random.Random, expected: str) -> tuple[str, int]:
    """Run one job under kills; return what came of it, and how many kills hit."""
    hits, killed = 0, set()
    launcher = f"-m torch.distributed.run --max-restarts {options.restarts}"
    launcher += f" --nproc-per-node {options.workers}"
    with tempfile.TemporaryDirectory() as results, open(f"{results}/said", "w+") as said:
        words = [*launcher.split(), *command(results, options.workers, options.steps)]
        process = subprocess.Popen(
            [sys.executable, *words, "--threads", "1"],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GCBENCH_COLLECTIVE_TIMEOUT": "120"},
        )
        end = time.monotonic() + options.patience
        while hits < options.restarts and process.poll() is None and time.monotonic() < end:
            there = {rank: pid for rank, pid in children(process.pid).items() if pid not in killed}
            if len(there) < options.workers:
                time.sleep(0.05)
                continue
            time.sleep(draw.uniform(0, options.longest))
            now = children(process.pid)
            pid = now.get(draw.randrange(options.workers), 0)
            if pid and set(now.values()) == set(there.values()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    hits += 1
                killed |= set(now.values())  # the agent ends all of this attempt
        try:
            out, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "hung", hits
        if process.returncode:
            said.seek(0)
            return f"exit code {process.returncode}: {said.read()[-600:]}", hits
        same = json.loads(out)["params_sha256"] == expected
        return "same" if same else "other parameters", hits


def main() -> int:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--restarts", type=int, default=1, help="kills in a job")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--longest", type=float, default=8.0, help="seconds until a kill, at most")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for a job")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    expected = undisturbed(options.workers, options.steps)
    outcomes, kills = [], 0
    for number in range(1, options.jobs + 1):
        began = time.monotonic()
        outcome, hits = job(options, draw, expected)
        outcomes.append(outcome)
        kills += hits
        took = time.monotonic() - began
        print(f"{number}: {outcome}, {hits} kill(s), {took:.0f} s", flush=True)
    good = outcomes.count("same")
    print(f"{good} of {len(outcomes)} jobs ended in the same parameters, after {kills} kills")
    return int(good < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
