"""The noise that ternary codes add to gradients, compared with TernGrad's analysis (equation 20).

The convergence proof of SGD bounds E||g||^2. If noise of mean 0 and total variance sigma_b^2 is
added to g, the bound must hold for E||g||^2 + sigma_b^2, whatever the distribution of the noise:
E||g||^2 <= A + B ||w - w*||^2 - sigma_b^2. Ternary codes t of g with the scale s = max |g| have
E||t||^2 = s ||g||_1, so they add noise with sigma_b^2 = s ||g||_1 - ||g||^2.

For the codes of each worker's real gradient this script asks: does the codec add noise of that
size? Is the noise uncorrelated with the gradient? And, not in the paper: is its variance at most
that of the gradient itself, of one worker's batch about the workers' mean? The scales are those of
the method: one per tensor, or with `granularity=model` the single one of the theorem.
Source: Wen et al., NeurIPS 2017, arXiv:1705.07878, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

from _paper import Trained, main, measured, number, plot, result, table, title, values
from pydantic import Field
from torch import Tensor

from gcbench import ops
from gcbench.checks import calls
from gcbench.checks.oracle import energy
from gcbench.core import codec, purposes
from gcbench.core.compressor import Compressor, Context, Key, Segments
from gcbench.core.errors import UsageError
from gcbench.core.progress import Observer
from gcbench.core.values import finite
from gcbench.profile.histogram.reconstruction import Gradients
from gcbench.report import figures, verdicts
from gcbench.report.analysis import Analysis, Ledger, Row
from gcbench.report.verdicts import Claim
from gcbench.training import methods

KIND = "ternary-noise"
SOURCE = "Wen et al. 2017, equation (20)"
TOLERANCE = 0.01
"""Relative deviations up to this count as none."""

SIZE = Claim("E||x' - x||^2 / (s ||x||_1 - ||x||^2), distance from 1", SOURCE, TOLERANCE, False)
UNBIASED = Claim("E<x', x> / ||x||^2, distance from 1", SOURCE, TOLERANCE, False)
NO_MORE = Claim("noise of the codes / noise of one worker's batch, in variance", SOURCE, 1.0, False)


class Settings(Trained):
    """The settings that decide the result."""

    method: list[str] = Field(
        default=["terngrad:clip=0", "terngrad:clip=2.5"],
        min_length=1,
        description="Configurations of TernGrad, e.g. terngrad:clip=2.5:granularity=model.",
    )
    draws: Annotated[int, Field(ge=1)] = Field(
        default=16, description="Encodings of each worker's gradient."
    )

    def chosen(self) -> dict[str, Compressor]:
        """Return the methods by their specs.

        Raises:
            UsageError: see `methods.all_of`, or a method whose codes are not ternary.
        """
        chosen = methods.all_of(",".join(self.method))
        for spec, method in chosen.items():
            if not hasattr(method, "clip"):
                raise UsageError(f"--method {spec}: not a configuration of terngrad")
        return chosen


def measure(method: Compressor, gradients: Gradients, draws: int) -> Row:
    """Return the energies at one step: sums over all elements, means over workers and draws.

    x is a worker's gradient, clipped where the method clips, and x' its decoding. `signal`:
    ||x||^2; `expected`: sum over segments of s ||x||_1 - ||x||^2; `added`: ||x' - x||^2; `inner`:
    <x', x>; `own`: variance of a worker's gradient about the workers' mean, with N - 1 degrees of
    freedom, None for one worker.
    """
    segments = gradients.segments(method)
    key = Key(gradients.seed, gradients.step, 0, 0, purposes.ENCODE)
    workers = len(gradients.buckets)
    rows = []
    for rank, bucket in enumerate(gradients.buckets):
        shared = calls.agree(method, [bucket], segments, key)
        context = Context(segments, shared)
        x = method.claims.target(bucket, context).double()
        added = inner = 0.0
        for draw in range(draws):
            drawn = Context(segments, shared, key._replace(rank=rank + workers * draw))
            decoded = codec.decode(method, codec.encode(method, bucket, drawn), context).double()
            added += energy(decoded - x) / draws
            inner += float(decoded @ x) / draws
        rows.append((energy(x), _expected(x, segments), added, inner))
    names = ("signal", "expected", "added", "inner")
    means = (finite(fmean(column)) for column in zip(*rows, strict=True))
    spread = sum(energy(bucket.double() - gradients.mean) for bucket in gradients.buckets)
    of_batch = finite(spread / (workers - 1)) if workers > 1 else None
    return {**dict(zip(names, means, strict=True)), "own": of_batch}


def _expected(x: Tensor, segments: Segments) -> float:
    """Return the sum over segments of ||x||_inf ||x||_1 - ||x||^2; x is float64, shape (n,)."""
    peaks = ops.statistics.absmax(x.float(), segments).double()
    total = 0.0
    for which, rows in segments.views(x):
        total += float((peaks[which] * rows.abs().sum(1)).sum() - rows.square().sum())
    return total


def _ratio(rows: Sequence[Row], above: str, below: str) -> float:
    """Return the mean of `above` / `below` over the rows; NaN if a row lacks one of them.

    A mean of ratios weighs all steps alike, although energies fall by an order of magnitude.
    """
    pairs = [(number(row[above]), number(row[below])) for row in rows]
    return fmean(top / bottom if bottom > 0 else math.nan for top, bottom in pairs)


def run(
    settings: Settings,
    command: str,
    observer: Observer,
    ledger: Ledger,
    data_dir: Path | None = None,
) -> Analysis:
    """Measure the noise of every configuration on every captured gradient.

    Raises:
        UsageError, GcbenchError: see `Settings.chosen` and `_paper.measured`.
    """
    chosen = settings.chosen()

    def each(gradients: Gradients) -> Iterator[Row]:
        for spec, method in chosen.items():
            yield {"method": spec, **measure(method, gradients, settings.draws)}

    rows = measured(each, settings, observer, ledger, data_dir)
    for row in rows:
        row["as_expected"] = finite(_ratio([row], "added", "expected"))
        row["blow_up"] = finite(_ratio([row], "added", "signal"))
        row["against_own"] = finite(_ratio([row], "added", "own"))
    columns = {
        "seed": "seed",
        "step": "step",
        "signal": "||x||^2",
        "expected": "s ||x||_1\n- ||x||^2",
        "added": "noise of\nthe codes",
        "as_expected": "/ expected",
        "blow_up": "/ ||x||^2",
        "own": "noise of\na batch",
        "against_own": "codes\n/ batch",
    }
    notes = [
        f"{settings.where()}, {settings.draws} encodings. x: a worker's gradient, after clipping. "
        "noise of a batch: variance of one worker's gradient about the workers' mean."
    ]
    heading = "Noise of ternary codes, summed over all elements"
    steps = table("steps", heading, columns, rows, by="method", which=2, notes=notes)
    means = ["One value per seed: the mean over its steps."]
    return result(KIND, settings, command, judge(rows), steps, of="method", notes=means)


def judge(rows: Sequence[Row]) -> list[Row]:
    """Return the verdicts for each method."""
    judged = []
    for spec in dict.fromkeys(str(row["method"]) for row in rows):
        runs = verdicts.by_seed([row for row in rows if row["method"] == spec])
        size = verdicts.over_seeds([_ratio(run, "added", "expected") for run in runs])
        inner = verdicts.over_seeds([_ratio(run, "inner", "signal") for run in runs])
        noise = verdicts.over_seeds([_ratio(run, "added", "own") for run in runs])
        judged += [
            verdicts.row(SIZE, size.distance(1.0), method=spec),
            verdicts.row(UNBIASED, inner.distance(1.0), method=spec),
            verdicts.row(NO_MORE, noise, method=spec),
        ]
    return judged


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the ratio of both noises by step: one point per seed, and a line through the means."""
    rows = [row for row in analysis.table("steps").rows if row["against_own"] is not None]
    specs = list(dict.fromkeys(str(row["method"]) for row in rows))
    look = figures.styles(specs)
    heading = f"Noise of ternary codes and of the gradient itself, {title(analysis)}"
    with plot(path, 8.5, 5, heading) as (axes,):
        for spec in specs:
            points = [row for row in rows if row["method"] == spec]
            steps = sorted({number(row["step"]) for row in points})
            means = [
                fmean(values([r for r in points if r["step"] == step], "against_own"))
                for step in steps
            ]
            axes.plot(steps, means, **{**look[spec], "marker": ""}, lw=1.6, label=spec)
            style = {**look[spec], "ls": "", "ms": 6, "alpha": 0.7}
            style.pop("linestyle", None)
            axes.plot(values(points, "step"), values(points, "against_own"), **style)
        axes.axhline(1, color="0.5", lw=1, ls=(0, (2, 2)))
        axes.set_ylim(bottom=0)
        axes.set(xlabel="training step", ylabel="variance of the codes / of one batch")


if __name__ == "__main__":
    main()
