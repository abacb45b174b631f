"""The noise that ternary codes add to gradients, compared with TernGrad's analysis (equation 20).

The convergence proof of SGD bounds E||g||^2. If noise of mean 0 and total variance sigma_b^2 is
added to g, the bound has to hold for E||g||^2 + sigma_b^2, whatever the noise's distribution:
E||g||^2 <= A + B ||w - w*||^2 - sigma_b^2. Ternary codes t of g with the scale s = max |g| have
E||t||^2 = s ||g||_1, so they add noise with sigma_b^2 = s ||g||_1 - ||g||^2.

Three questions are asked of real gradients, each worker's codes taken alone. Does the codec add
noise of that size? Is the noise uncorrelated with the gradient? And, a question of ours: is its
variance at most that of the gradient's own noise, of one worker's batch about the workers' mean?
The scales are those of the method: one for each tensor, or, with `granularity=model`, the
theorem's single one.
Source: Wen et al., NeurIPS 2017, arXiv:1705.07878, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

from _script import main
from _trained import Trained, gradients, title
from pydantic import Field
from torch import Tensor

from gcbench import ops
from gcbench.core import codec, purposes
from gcbench.core.compressor import Compressor, Context, Key, Segments
from gcbench.core.errors import UsageError
from gcbench.core.progress import Observer
from gcbench.core.values import finite
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table
from gcbench.studies import methods, verdicts
from gcbench.studies.bounds.alone import agreed, energy
from gcbench.studies.histogram.reconstruction import Gradients
from gcbench.studies.verdicts import Claim

KIND = "ternary-noise"
SOURCE = "Wen et al. 2017, equation (20)"
TOLERANCE = 0.01
"""A relative deviation up to this, of a sum over all elements and draws, counts as none."""

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
        default=16, description="How often each worker's gradient is encoded."
    )

    def chosen(self) -> dict[str, Compressor]:
        """Return the methods by their words.

        Raises:
            UsageError: see `methods.all_of`, or a method whose codes are not ternary.
        """
        found = methods.all_of(",".join(self.method))
        for word, method in found.items():
            if not hasattr(method, "clip"):
                raise UsageError(f"--method {word}: a form of terngrad expected")
        return found


def measure(method: Compressor, found: Gradients, draws: int) -> Row:
    """Return the energies at one step: sums over all elements, means over workers and draws.

    `signal` = ||x||^2, x being a worker's gradient, clipped where the method clips; `expected` =
    sum over the segments of s ||x||_1 - ||x||^2; `added` = ||x' - x||^2, x' being the decoding;
    `inner` = <x', x>; `own` = variance of a worker's gradient about the workers' mean, with N - 1
    degrees of freedom; None for one worker.
    """
    segments = found.segments(method)
    key = Key(found.seed, found.step, 0, 0, purposes.ENCODE)
    rows = []
    for rank, bucket in enumerate(found.buckets):
        shared = agreed(method, bucket, segments, key)
        x = method.claims.target(bucket, Context(segments, shared)).double()
        expected = _expected(x, segments)
        added = inner = 0.0
        for draw in range(draws):
            own = key._replace(rank=rank + len(found.buckets) * draw)
            arrived = codec.decode(
                method,
                codec.encode(method, bucket, Context(segments, shared, own)),
                Context(segments, shared),
            )
            added += energy(arrived.double() - x) / draws
            inner += float(arrived.double() @ x) / draws
        rows.append((energy(x), expected, added, inner))
    signal, expected, added, inner = (fmean(values) for values in zip(*rows, strict=True))
    workers = len(found.buckets)
    mean = found.mean
    spread = sum(energy(bucket.double() - mean) for bucket in found.buckets)
    return {
        "signal": finite(signal),
        "expected": finite(expected),
        "added": finite(added),
        "inner": finite(inner),
        "own": finite(spread / (workers - 1)) if workers > 1 else None,
    }


def _expected(x: Tensor, segments: Segments) -> float:
    """Return the sum over segments of ||x||_inf ||x||_1 - ||x||^2; x is float64, shape (n,)."""
    peaks = ops.statistics.absmax(x.float(), segments).double()
    total = 0.0
    for which, rows in segments.views(x):
        total += float((peaks[which] * rows.abs().sum(1)).sum() - rows.square().sum())
    return total


def run(
    settings: Settings,
    command: str,
    observer: Observer,
    ledger: Ledger,
    data_dir: Path | None = None,
) -> Analysis:
    """Measure the noise of every configuration on every captured gradient.

    Raises:
        UsageError, GcbenchError: see `Settings.chosen` and `trained.gradients`.
    """
    chosen = settings.chosen()
    rows: list[Row] = []
    for found in gradients(settings, ledger, data_dir):
        observer.step(0, f"seed {found.seed}, step {found.step}")
        for word, method in chosen.items():
            one = measure(method, found, settings.draws)
            rows.append({"method": word, "seed": found.seed, "step": found.step, **one})
    observer.step(1, "done")
    judged = judge(rows)
    return Analysis.of(
        KIND,
        settings,
        command,
        conclusions=verdicts.told(judged),
        tables=[
            verdicts.table(judged, of="method", notes=["A value a seed: the mean over its steps."]),
            _summary(rows, settings),
        ],
    )


def _ratio(rows: Sequence[Row], above: str, below: str) -> float:
    """Return the mean of `above` / `below` over the rows; NaN if a row lacks one of them.

    The mean of ratios, not the ratio of means, so that all steps weigh alike: energies fall by an
    order of magnitude after the first steps.
    """
    ratios = []
    for row in rows:
        top, bottom = row[above], row[below]
        known = top is not None and bottom is not None and float(bottom) > 0
        ratios.append(float(top or 0) / float(bottom or 1) if known else math.nan)
    return fmean(ratios) if ratios else math.nan


def judge(rows: Sequence[Row]) -> list[Row]:
    """Return the verdicts for each method."""
    judged = []
    for word in dict.fromkeys(str(row["method"]) for row in rows):
        runs = verdicts.by_seed([row for row in rows if row["method"] == word])
        size = verdicts.over_seeds([_ratio(run, "added", "expected") for run in runs])
        inner = verdicts.over_seeds([_ratio(run, "inner", "signal") for run in runs])
        noise = verdicts.over_seeds([_ratio(run, "added", "own") for run in runs])
        judged += [
            verdicts.row(SIZE, size.distance(1.0), method=word),
            verdicts.row(UNBIASED, inner.distance(1.0), method=word),
            verdicts.row(NO_MORE, noise, method=word),
        ]
    return judged


def _summary(rows: Sequence[Row], settings: Settings) -> Table:
    for row in rows:
        row["blow_up"] = finite(_ratio([row], "added", "signal"))
        row["against_own"] = finite(_ratio([row], "added", "own"))
        row["as_expected"] = finite(_ratio([row], "added", "expected"))
    return Table(
        name="steps",
        title="Noise of ternary codes, in units of energy summed over all elements",
        by="method",
        which=2,
        shown=[
            Shown(field="seed", heading="seed"),
            Shown(field="step", heading="step"),
            Shown(field="signal", heading="||x||^2"),
            Shown(field="expected", heading="s ||x||_1\n- ||x||^2"),
            Shown(field="added", heading="noise of\nthe codes"),
            Shown(field="as_expected", heading="/ that"),
            Shown(field="blow_up", heading="/ ||x||^2"),
            Shown(field="own", heading="noise of\na batch"),
            Shown(field="against_own", heading="codes\n/ batch"),
        ],
        notes=[
            f"{settings.named()}, {settings.workers} workers, {settings.steps} steps, "
            f"{settings.draws} draws of the codes. x is a worker's gradient, after clipping where "
            "the method clips. The noise of a batch is the variance of one worker's gradient about "
            "the mean of the workers' gradients."
        ],
        rows=[*rows],
    )


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the ratio of both noises by step: a point for each seed, a line through the means.

    Raises:
        UsageError: an ending that is no picture's.
        GcbenchError: `path` cannot be written.
    """
    path = figures.check(path)
    rows = analysis.table("steps").rows
    words = list(dict.fromkeys(str(row["method"]) for row in rows))
    look = figures.styles(words)
    with figures.canvas(8.5, 5) as figure:
        axes = figure.subplots()
        for word in words:
            own = [r for r in rows if r["method"] == word and r["against_own"] is not None]
            steps = sorted({float(r["step"] or 0) for r in own})
            means = [
                fmean(float(r["against_own"] or 0) for r in own if r["step"] == s) for s in steps
            ]
            axes.plot(steps, means, **{**look[word], "marker": ""}, lw=1.6, label=word)
            at = [float(r["step"] or 0) for r in own]
            axes.plot(
                at,
                [float(r["against_own"] or 0) for r in own],
                ls="",
                marker=look[word]["marker"],
                color=look[word]["color"],
                ms=6,
                alpha=0.7,
            )
        axes.axhline(1, color="0.5", lw=1, ls=(0, (2, 2)))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step of training")
        axes.set_ylabel("variance of the codes / of one batch")
        axes.set_title(f"Noise of ternary codes against the gradient's own, {title(analysis)}")
        axes.legend(frameon=False, fontsize="small")
        figures.save(figure, path)


if __name__ == "__main__":
    main()
