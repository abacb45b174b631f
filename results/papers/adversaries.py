"""Accuracy against the number of adversaries: majority vote, mean and trimmed mean.

Every adversary sends an attack at every step (`gcbench run --attack`). The source claims that the
vote of N workers converges with fewer than N / 2 blind multiplicative adversaries (theorem 2); it
shows up to 3 of 7 that flip signs. Here a method survives a number of adversaries if its accuracy
is at least half of its accuracy without any. Learning rates: the task's; for the vote `--vote-lr`.
Source: Bernstein et al., ICLR 2019, arXiv:1810.05291. Trimmed mean: Yin et al., ICML 2018,
arXiv:1803.01498.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from _paper import (
    Choices,
    Columns,
    Distinct,
    Seeds,
    main,
    name,
    number,
    plot,
    result,
    table,
    title,
    values,
)
from pydantic import Field

from gcbench.checks.bounds.training import trainer_of
from gcbench.core.errors import DivergedError, UsageError
from gcbench.core.progress import Observer
from gcbench.report import figures, verdicts
from gcbench.report.analysis import Analysis, Ledger, Row, Table
from gcbench.report.verdicts import Claim
from gcbench.training.configuration import Config

KIND = "adversaries"
SOURCE = "Bernstein et al. 2019, theorem 2"
RULES = ("vote", "mean", "trimmed mean")


class Settings(Choices):
    """The settings that decide the result."""

    task: str = Field(default="mnist", description="Task.")
    network: str = Field(default="lenet-caffe", description="Its network; empty: the task's.")
    steps: int = Field(default=100, ge=1, description="Training steps.")
    workers: int = Field(default=7, ge=3, description="Workers.")
    examples: int = Field(default=10, ge=1, description="Examples per worker and step.")
    adversaries: Annotated[list[int], Distinct] = Field(
        default=[0, 1, 3, 4], min_length=1, description="Numbers of adversaries, 0 among them."
    )
    attack: Annotated[list[str], Distinct] = Field(
        default=["flip", "scale"], min_length=1, description="flip, random or scale."
    )
    vote_lr: float = Field(default=1e-3, gt=0, description="Learning rate of the vote.")
    seed: Seeds = Field(default=[0, 1, 2], description="Seeds; each is one training.")

    @property
    def trim(self) -> int:
        """The largest number of adversaries that a trimmed mean can leave out."""
        return (self.workers - 1) // 2

    def config(self, rule: str, attack: str, count: int, seed: int) -> Config:
        """Return the config of one training.

        Raises:
            UsageError: see `Config.make`.
        """
        config: dict[str, Any] = {
            "task": self.task,
            "steps": self.steps,
            "workers": self.workers,
            "batch": self.workers * self.examples,
            "seed": seed,
            "adversaries": count,
            "attack": attack if count else "flip",
            "ema": 0.0,
        }
        config |= {"task_options": {"network": self.network}} if self.network else {}
        if rule == "vote":
            config |= {"compressor": "signsgd", "lr": self.vote_lr}
        elif rule == "mean":
            config |= {"compressor": "none"}
        else:
            config |= {"compressor": "none", "collective": "allgather", "trim": self.trim}
        return Config.make(config)


def steps(settings: Settings) -> int:
    """Return the number of progress steps."""
    return len(settings.seed) * len(settings.attack) * len(RULES) * len(settings.adversaries)


def run(
    settings: Settings,
    command: str,
    observer: Observer,
    ledger: Ledger,
    data_dir: Path | None = None,
) -> Analysis:
    """Train once for each seed, rule, attack and number of adversaries.

    Raises:
        UsageError: no comparison without adversaries, an invalid config, or a task without an
            accuracy.
        GcbenchError: data are missing.
    """
    if 0 not in settings.adversaries:
        raise UsageError(f"--adversaries {settings.adversaries}: include 0, the comparison")
    rows: list[Row] = []
    ways = (settings.seed, settings.attack, RULES, settings.adversaries)
    for seed, attack, rule, count in product(*ways):
        config = settings.config(rule, attack, count, seed)
        if config.run_name not in ledger:
            ledger[config.run_name] = train(config, ledger.path.parent, data_dir)
        where: Row = {"seed": seed, "rule": rule, "attack": attack, "adversaries": count}
        rows.append({**where, **ledger[config.run_name]})
        observer.step(len(rows), f"{rule}, {count} that {attack}")
    summary = _summary(rows, settings)
    notes = ["Measured: the accuracy divided by that without adversaries, by seed."]
    return result(KIND, settings, command, judge(rows, settings.workers), summary, notes=notes)


def train(config: Config, folder: Path, data_dir: Path | None) -> Row:
    """Return the test accuracy after one training, 0 to 1; that of chance if it diverges.

    Raises:
        UsageError: the task has no accuracy.
    """
    with trainer_of(config, folder, data_dir) as training:
        try:
            for _ in range(config.steps):
                training.train_step()
            accuracy = training.evaluate()["test_accuracy"]
        except DivergedError:
            classes = len(torch.unique(training.test.targets))
            return {"accuracy": 1 / classes, "diverged": True}
    if accuracy is None:
        raise UsageError(f"--task {config.task} has no accuracy; use one that has")
    return {"accuracy": accuracy, "diverged": False}


def judge(rows: Sequence[Row], workers: int) -> list[Row]:
    """Return whether each rule survives the largest tested minority and majority, by attack."""
    judged = []
    counts = sorted({int(number(row["adversaries"])) for row in rows} - {0})
    tested = [
        max(side)
        for side in (
            [c for c in counts if 2 * c < workers],
            [c for c in counts if 2 * c >= workers],
        )
        if side
    ]
    for attack in dict.fromkeys(str(row["attack"]) for row in rows):
        for rule, count in product(RULES, tested):
            group = [row for row in rows if (row["rule"], row["attack"]) == (rule, attack)]
            shares = []
            for runs in verdicts.by_seed(group):
                accuracy = {row["adversaries"]: number(row["accuracy"]) for row in runs}
                shares.append(accuracy[count] / accuracy[0])
            claim = Claim(
                f"{rule} survives {count} of {workers}: {attack}", SOURCE, 0.5, above=True
            )
            judged.append(verdicts.row(claim, verdicts.over_seeds(shares)))
    return judged


# ---- table and picture ---------------------------------------------------------------------------


def _summary(rows: Sequence[Row], settings: Settings) -> Table:
    summary: list[Row] = []
    for attack, rule, count in product(settings.attack, RULES, settings.adversaries):
        group = [
            row
            for row in rows
            if (row["attack"], row["rule"], row["adversaries"]) == (attack, rule, count)
        ]
        accuracies = values(group, "accuracy")
        summary.append(
            {
                "attack": attack,
                "rule": rule,
                "adversaries": count,
                "accuracy": fmean(accuracies),
                "low": min(accuracies),
                "high": max(accuracies),
                "diverged": sum(bool(row["diverged"]) for row in group),
                "n": len(group),
            }
        )
    columns: Columns = {
        "attack": "attack",
        "rule": "rule",
        "adversaries": "adversaries",
        "accuracy": ("accuracy %\nmean", 100.0),
        "low": ("\nleast", 100.0),
        "high": ("\nlargest", 100.0),
        "diverged": "diverged",
        "n": "n",
    }
    notes = [
        f"{name(settings.task, settings.network)}, {settings.steps} steps, {settings.workers} "
        f"workers; n: seeds. The trimmed mean leaves out {settings.trim} values at both ends. A "
        "run that diverged counts with the accuracy of chance."
    ]
    heading = "Accuracy by number of adversaries"
    return table("accuracy", heading, columns, summary, by="attack", which=3, notes=notes)


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the accuracies over the number of adversaries, one panel per attack."""
    rows = analysis.table("accuracy").rows
    attacks = list(dict.fromkeys(str(row["attack"]) for row in rows))
    look, workers = figures.styles(RULES), analysis.settings["workers"]
    heading = f"Adversaries among {workers} workers: {title(analysis)}"
    with plot(path, 4.4 * len(attacks), 4, heading, len(attacks), sharey=True) as panels:
        for axes, attack in zip(panels, attacks, strict=True):
            for rule in RULES:
                line = [r for r in rows if (r["attack"], r["rule"]) == (attack, rule)]
                x, y = values(line, "adversaries"), values(line, "accuracy", 100)
                axes.plot(x, y, **{**look[rule], "lw": 1.6, "ms": 6}, label=rule)
                low, high = values(line, "low", 100), values(line, "high", 100)
                axes.vlines(x, low, high, color=look[rule]["color"], lw=1)
            axes.axvline(workers / 2, color="0.6", lw=1, ls=":")
            axes.set(xlabel="adversaries", title=attack, ylim=(0, 100))
        panels[0].set_ylabel("test accuracy, %")


if __name__ == "__main__":
    main()
