"""Densities of a gradient and of its noise while a network trains (signSGD, figure 1).

phi(v) = ||v||_1^2 / (d ||v||_2^2) is 1 if all elements have one magnitude, about 2 / pi for a long
vector of normal values, and 1 / d if a single element is not zero. g is the mean gradient at fixed
parameters, sigma the standard deviation of one batch's gradient, coordinate by coordinate.

Each snapshot draws `--batches` batches with replacement, so g is known only up to noise. The means
a and b of two halves of the batches are independent: <a, b> has the expectation ||g||_2^2,
(<sign(a), b> + <sign(b), a>) / 2 an expectation of at most ||g||_1, and ||(a + b) / 2||_1 one of at
least ||g||_1. So phi(g) lies between `gradient_low` and `gradient_high` for any distribution of the
noise; the verdicts use both. phi(sigma) needs no such limits. The paper computes g from all of the
data; its curves are for 160 epochs with SGD, Signum and Adam, three repeats each.
Source: Bernstein et al. 2018, arXiv:1802.04434, figure 1.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _paper import (
    Choices,
    Columns,
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

from gcbench.checks.bounds.observe import Plan, Watch, Welford, density
from gcbench.checks.bounds.training import trainer_of
from gcbench.core.errors import UsageError
from gcbench.core.progress import Observer
from gcbench.core.values import finite
from gcbench.core.writing import explained
from gcbench.report import figures, verdicts
from gcbench.report.analysis import Analysis, Ledger, Row, Table
from gcbench.report.verdicts import Claim
from gcbench.training import captures, configuration
from gcbench.training.configuration import Config

KIND = "densities"
SOURCE = "Bernstein et al. 2018, figure 1"
NORMAL = 2 / math.pi
"""phi of a long vector of independent normal values."""

NOISE = Claim("the noise is dense: least phi(sigma) of a run", SOURCE, 0.1, above=True)
GRADIENT = Claim("the gradient is dense: least phi(g) of a run", SOURCE, 0.1, above=True)
ORDER = Claim(
    "both densities are of one order: largest factor between them in a run", SOURCE, 10.0, False
)
COUPLED = Claim(
    "the densities are coupled: correlation of log phi(g) and log phi(sigma)", SOURCE, 0.0, True
)
"""The paper gives no numbers; dense is here within an order of magnitude of 1."""


class Settings(Choices):
    """The settings that decide the result."""

    task: str = Field(default="digits", description="Task.")
    network: str = Field(default="", description="Its network; empty: the task's.")
    steps: int = Field(default=600, ge=2, description="Training steps.")
    snapshots: int = Field(
        default=6, ge=2, description="Steps at which gradients are drawn, evenly spaced."
    )
    batches: int = Field(
        default=128, ge=8, multiple_of=2, description="Batches drawn per snapshot; even."
    )
    workers: int = Field(
        default=1, ge=1, description="Workers; the noise is of one worker's batch."
    )
    batch: int = Field(default=0, ge=0, description="Examples per step; 0: the task's.")
    seed: Seeds = Field(default=[0, 1, 2], description="Seeds; each is one training.")

    def config(self, seed: int) -> Config:
        """Return the config of the uncompressed training with this seed.

        Raises:
            UsageError: see `Config.make` and `configuration.check_limits`.
        """
        config: dict[str, Any] = {"task": self.task, "compressor": "none", "workers": self.workers}
        config |= {"steps": self.steps, "seed": seed}
        config |= {"batch": self.batch} if self.batch else {}
        config |= {"task_options": {"network": self.network}} if self.network else {}
        checked = Config.make(config)
        configuration.check_limits(checked)
        return checked

    def snapshot_steps(self) -> tuple[int, ...]:
        """Return the steps of the snapshots, counted from 0."""
        return captures.spread(self.steps, self.snapshots)


def steps(settings: Settings) -> int:
    """Return the number of progress steps."""
    return settings.steps * len(settings.seed)


def run(
    settings: Settings,
    command: str,
    observer: Observer,
    ledger: Ledger,
    data_dir: Path | None = None,
) -> Analysis:
    """Train once per seed, and measure the gradient and its noise at each snapshot.

    Raises:
        UsageError: an invalid config.
        GcbenchError: a gradient is not finite, or data are missing.
    """
    rows: list[Row] = []
    for position, seed in enumerate(settings.seed):
        before = position * settings.steps

        def report(step: int, seed: int = seed, before: int = before) -> None:
            observer.step(before + step, f"seed {seed}, step {step}")

        rows += _train(settings, seed, ledger, data_dir, report)
    observer.step(steps(settings), "done")
    return result(
        KIND,
        settings,
        command,
        judge(rows),
        _table(rows, settings),
        notes=[
            "The paper gives no numbers; here a density of 0.1 or more counts as dense. The "
            "density of g is known only within a bracket, and its limits are those of the "
            "bracket's ends."
        ],
    )


def _train(
    settings: Settings,
    seed: int,
    ledger: Ledger,
    data_dir: Path | None,
    report: Callable[[int], None],
) -> list[Row]:
    """Return one row per snapshot of one training; `report` is called with each step.

    Each row is in the ledger and followed by a checkpoint, from which a repeated command continues.
    """
    keys = {step: f"seed {seed}, step {step}" for step in settings.snapshot_steps()}
    if not all(key in ledger for key in keys.values()):
        folder = ledger.path.parent / f"seed-{seed}"
        with explained(folder):
            if ledger.afresh and folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(exist_ok=True)
        watch = Watch(Plan(settings.steps, snapshots=(), batches=settings.batches, wanted=bool))
        with trainer_of(settings.config(seed), folder, data_dir) as trainer:
            trainer.resume()
            watch.start(trainer)
            for step in range(trainer.step, max(keys) + 1):
                report(step)
                if step in keys:
                    if keys[step] not in ledger:
                        ledger[keys[step]] = look(watch.drawn(step), settings.batches)
                    trainer.save()
                if step < max(keys):
                    trainer.train_step()
        shutil.rmtree(folder)
    return [{"seed": seed, "step": step, **ledger[key]} for step, key in keys.items()]


def look(drawn: Any, batches: int) -> Row:
    """Return the densities of g and sigma from the gradients of `batches` batches.

    `drawn` yields them: independent, float32, shape (n,), alternately for the two halves. A density
    is None where it would divide by zero, or by an estimate of ||g||^2 that is not positive.

    Raises:
        UsageError: `drawn` yields another number of gradients.
    """
    halves: list[Welford] = []
    whole: Welford | None = None
    for position, gradient in enumerate(drawn):
        if whole is None:
            whole, halves = Welford(gradient), [Welford(gradient), Welford(gradient)]
        whole.add(gradient)
        halves[position % 2].add(gradient)
    if whole is None or whole.n != batches:
        raise UsageError(f"received {0 if whole is None else whole.n} batches, expected {batches}")
    a, b = (half.mean for half in halves)
    mean, sigma = whole.mean, whole.variance().sqrt()
    square = float(a @ b)
    least = float(a.sign() @ b + b.sign() @ a) / 2
    most = float(mean.abs().sum())
    nonzero = square > 0

    def phi(length: float) -> float | None:
        return min(1.0, max(0.0, length) ** 2 / (mean.numel() * square)) if nonzero else None

    noise = float(sigma.square().sum()) / whole.n
    return {
        "gradient": finite(density(mean)),
        "gradient_low": phi(least),
        "gradient_high": phi(most),
        "noise": finite(density(sigma)),
        "noise_share": finite(noise / float(mean @ mean)) if bool(mean.any()) else None,
        "norm": math.sqrt(square) if nonzero else None,
        "sigma": float(sigma.norm()),
        "batches": whole.n,
    }


# ---- verdicts ------------------------------------------------------------------------------------


def judge(rows: Sequence[Row]) -> list[Row]:
    """Return the verdicts on the paper's four claims, from the rows of all snapshots."""
    runs = verdicts.by_seed(rows)

    def each(of: Callable[[Sequence[Row]], float]) -> list[float]:
        return [of(run) for run in runs]

    def least(field: str) -> list[float]:
        return each(lambda run: _extreme(min, [number(row[field]) for row in run]))

    low, high = least("gradient_low"), least("gradient_high")
    factors = [
        each(lambda run, end=end: _extreme(max, [_factors(row)[end] for row in run]))  # type: ignore[misc]
        for end in range(3)
    ]
    ends = [
        each(lambda run, field=field: _correlation(run, field))  # type: ignore[misc]
        for field in ("gradient_low", "gradient", "gradient_high")
    ]
    coupled = [tuple(map(_fisher, one)) for one in zip(*ends, strict=True)]
    interval = verdicts.bracket(
        [_extreme(min, one) for one in coupled],
        [one[1] for one in coupled],
        [_extreme(max, one) for one in coupled],
    )
    middle, least_of_all, most = (
        math.tanh(end) for end in (interval.mean, interval.low, interval.high)
    )
    interval = interval._replace(mean=middle, low=least_of_all, high=most)
    return [
        verdicts.row(NOISE, verdicts.over_seeds(least("noise"))),
        verdicts.row(GRADIENT, verdicts.bracket(low, least("gradient"), high)),
        verdicts.row(ORDER, verdicts.bracket(*factors)),
        verdicts.row(COUPLED, interval),
    ]


def _extreme(of: Callable[[Sequence[float]], float], values: Sequence[float]) -> float:
    """Return `of(values)`, the least or the largest; NaN if any value is NaN."""
    return math.nan if any(map(math.isnan, values)) else of(values)


def _factors(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the factor, at least 1, between phi(g) and phi(sigma) at one snapshot.

    Three values: the least within the limits of phi(g), that at phi of the mean, the largest.
    """
    noise = number(row["noise"])
    low, at, high = (number(row[f]) for f in ("gradient_low", "gradient", "gradient_high"))
    if not (noise > 0 and at > 0 and high > 0):
        return math.nan, math.nan, math.nan

    def factor(value: float) -> float:
        return max(value / noise, noise / value) if value > 0 else math.inf

    inside = 1.0 if low <= noise <= high else min(factor(low), factor(high))
    return inside, factor(at), max(factor(low), factor(high))


def _fisher(correlation: float) -> float:
    """Return atanh of a correlation, which is nearly normal (Fisher 1921); finite at +-1."""
    if math.isnan(correlation):
        return correlation
    return math.atanh(max(-1 + 1e-12, min(1 - 1e-12, correlation)))


def _correlation(run: Sequence[Row], field: str) -> float:
    """Return Pearson's correlation of the logarithms over a run's snapshots; NaN if undefined."""
    both = [(number(row[field]), number(row["noise"])) for row in run]
    if len(both) < 3 or not all(value > 0 for pair in both for value in pair):
        return math.nan
    one, other = ([math.log(value) for value in values] for values in zip(*both, strict=True))
    if len({*one}) < 2 or len({*other}) < 2:
        return math.nan
    return statistics.correlation(one, other)


# ---- table and picture ---------------------------------------------------------------------------


def _table(rows: Sequence[Row], settings: Settings) -> Table:
    config = settings.config(settings.seed[0])
    columns: Columns = {
        "seed": "seed",
        "step": "step",
        "gradient_low": "phi(g)\nat least",
        "gradient": "of the\nmean",
        "gradient_high": "\nat most",
        "noise": "phi(sigma)",
        "noise_share": ("noise in\n||g||^2, %", 100.0),
        "norm": "||g||_2",
        "sigma": "||sigma||_2",
        "batches": "batches",
    }
    notes = [
        f"{name(settings.task, settings.network)}, trained uncompressed; noise of batches of "
        f"{config.batch // config.workers}. of the mean: phi of the mean of all drawn batches, "
        "which still contains noise; the next column but two is its share of the squared length. "
        "at least, at most: limits for phi of the true gradient g, from independent halves of the "
        "batches."
    ]
    heading = "Densities phi(v) = ||v||_1^2 / (d ||v||_2^2) of the gradient and of its noise"
    return table("snapshots", heading, columns, rows, which=2, notes=notes)


def draw(analysis: Analysis, path: Path) -> None:
    """Draw both densities over the steps, one line per seed, the bracket of phi(g) shaded."""
    look = figures.styles(["gradient", "noise"])
    labels = {"gradient": "gradient $g$, one line per seed", "noise": "noise $\\sigma$"}
    heading = f"Gradient and noise of one batch, {title(analysis)}"
    with plot(path, 9, 5.4, heading) as (axes,):
        for position, run in enumerate(verdicts.by_seed(analysis.table("snapshots").rows)):
            hide, steps = "_" * bool(position), values(run, "step")  # one entry in the legend
            for field, label in labels.items():
                style = {**look[field], "lw": 1.6, "ms": 5}
                axes.plot(steps, values(run, field), **style, label=hide + label)
            bracket = values(run, "gradient_low"), values(run, "gradient_high")
            style = {"color": look["gradient"]["color"], "alpha": 0.15, "lw": 0}
            label = hide + "limits of $\\varphi(g)$"
            axes.fill_between(steps, *bracket, **style, label=label)
        axes.axhline(NORMAL, color="0.5", lw=1, ls=(0, (2, 2)), label="normal values, $2 / \\pi$")
        axes.set_ylim(0, 1)
        axes.set(xlabel="training step")
        axes.set_ylabel(r"density $\varphi(v) = \|v\|_1^2 \,/\, (d\,\|v\|_2^2)$")


if __name__ == "__main__":
    main()
