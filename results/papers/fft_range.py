"""The range of FFT sparsification's codes, estimated once from the first steps (Wang et al. 2020).

The paper estimates the range of its quantizer in the first iterations and keeps it; `fft` by
default takes the range of each payload. This analysis trains without compression. It takes the
least and the largest value that any worker keeps of its spectrum in steps 0 to `--first` - 1, times
`--margin`, and encodes gradients that are captured later with both ranges: how many values lie
outside, and what is the error ||x - x'|| / ||x||? A run takes the range that was found by
`--set low=.. --set high=..`.
Source: Wang et al., HPDC 2020, arXiv:1811.08596, its range-based quantizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from _script import main
from _trained import Trained, gradients, title
from number_formats import error
from pydantic import Field
from torch import Tensor

from gcbench import ops
from gcbench.core import registry
from gcbench.core.compressor import Compressor, Key, Segments
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.core.progress import Observer
from gcbench.core.values import finite
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table
from gcbench.studies import verdicts
from gcbench.studies.bounds.alone import passed
from gcbench.studies.histogram.reconstruction import Gradients
from gcbench.studies.verdicts import Claim

KIND = "fft-range"
LATER = Claim(
    "error with the range of the first steps / with each message's own",
    "Wang et al. 2020, range-based quantizer",
    1.01,
    above=False,
)
"""An error larger by up to one percent counts as the same: the paper does not say what its rule
costs."""
Range = tuple[float, float]


class Settings(Trained):
    """The settings that decide the result."""

    first: int = Field(
        default=10, ge=1, description="Number of first steps from which the range is estimated."
    )
    margin: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="Factor by which it is widened."
    )
    theta: float = Field(default=0.85, ge=0, lt=1, description="Share of the bins that is dropped.")
    bits: int = Field(default=10, ge=2, le=16, description="Bits of a code.")
    mantissa: int = Field(default=5, ge=0, description="Bits of its mantissa.")

    def method(self, found: Range | None = None) -> Compressor:
        """Return the method with the range of each payload, or with the range `found`.

        Raises:
            UsageError: fields out of range.
        """
        given: dict[str, Any] = {} if found is None else {"low": found[0], "high": found[1]}
        fields = {"theta": self.theta, "code_bits": self.bits, "mantissa": self.mantissa}
        return registry.compressor("fft", **fields, **given)


def kept_values(x: Tensor, segments: Segments, theta: float) -> Tensor:
    """Return the real and imaginary parts of the bins of x that are kept, float32, shape (K, 2)."""
    bins, energy = ops.spectrum.forward(x, segments, half=True)
    return bins.view(-1, 2)[ops.spectrum.largest(energy, ops.spectrum.runs_of(segments, theta))]


def estimate(steps: Sequence[Gradients], settings: Settings) -> Range:
    """Return the range of the values that all workers keep in these steps, times the margin.

    Raises:
        GcbenchError: no value is below or none above 0, so that there is no range.
    """
    method = settings.method()
    ends = [
        kept_values(bucket, found.segments(method), settings.theta).aminmax()
        for found in steps
        for bucket in found.buckets
    ]
    low = settings.margin * min(float(end.min) for end in ends)
    high = settings.margin * max(float(end.max) for end in ends)
    if not low < 0 < high:
        raise GcbenchError(f"the first steps keep values from {low:g} to {high:g}: no range to use")
    return low, high


def measure(found: Gradients, settings: Settings, given: Range) -> Row:
    """Return the errors with both ranges at one step, means over the workers.

    `given` is the estimated range; `outside` the share of kept values beyond it, `peak` the largest
    kept magnitude.
    """
    own, fixed = settings.method(), settings.method(given)
    segments = found.segments(own)
    rows = []
    for rank, bucket in enumerate(found.buckets):
        key = Key(found.seed, found.step, rank)
        values = kept_values(bucket, segments, settings.theta)
        outside = (values < given[0]) | (values > given[1])
        rows.append(
            (
                error(bucket, passed(own, bucket, segments, key)),
                error(bucket, passed(fixed, bucket, segments, key)),
                float(outside.double().mean()),
                float(values.abs().max()),
            )
        )
    ours, theirs, beyond, peak = (fmean(column) for column in zip(*rows, strict=True))
    return {
        "error_own": finite(ours),
        "error_given": finite(theirs),
        "outside": beyond,
        "peak": peak,
        "ratio": finite(theirs / ours) if ours > 0 else None,
    }


def run(
    settings: Settings,
    command: str,
    observer: Observer,
    ledger: Ledger,
    data_dir: Path | None = None,
) -> Analysis:
    """Estimate the range for each seed, and measure the errors with it at later steps.

    Raises:
        UsageError: no captured step is later than the first ones; see `trained.gradients`, too.
        GcbenchError: see `estimate` and `trained.gradients`.
    """
    if settings.capture and max(settings.capture) < settings.first:
        raise UsageError(
            f"--capture {settings.capture}: no step after the first {settings.first}, by which the "
            "range is judged; name later ones"
        )
    ops.rangefloat.check(settings.bits, settings.mantissa)
    early: list[Gradients] = []
    ranges: dict[int, Range] = {}
    rows: list[Row] = []
    for found in gradients(settings, ledger, data_dir, tuple(range(settings.first))):
        observer.step(0, f"seed {found.seed}, step {found.step}")
        if found.step < settings.first:
            early.append(found)
            continue
        if found.seed not in ranges:
            ranges[found.seed] = estimate(early, settings)
            early = []
        low, high = ranges[found.seed]
        row: Row = {"seed": found.seed, "step": found.step, "low": low, "high": high}
        rows.append({**row, **measure(found, settings, (low, high))})
    observer.step(1, "done")
    judged = judge(rows)
    low, high = (fmean(ends) for ends in zip(*ranges.values(), strict=True))
    return Analysis.of(
        KIND,
        settings,
        command,
        conclusions=[
            *verdicts.told(judged),
            f"Mean over the seeds: --set low={low:.4g} --set high={high:.4g}.",
        ],
        tables=[
            verdicts.table(judged, notes=["The geometric mean over later steps, a value a seed."]),
            Table(
                name="steps",
                title="Errors with the range of the first steps, and with each message's own",
                which=2,
                shown=[
                    Shown(field="seed", heading="seed"),
                    Shown(field="step", heading="step"),
                    Shown(field="low", heading="low"),
                    Shown(field="high", heading="high"),
                    Shown(field="peak", heading="largest\nnow"),
                    Shown(field="outside", heading="outside\n%", scale=100),
                    Shown(field="error_own", heading="error %\nown", scale=100),
                    Shown(field="error_given", heading="\nfirst", scale=100),
                    Shown(field="ratio", heading="ratio"),
                ],
                notes=[
                    f"{settings.named()}, {settings.workers} workers, {settings.steps} steps, "
                    f"theta = {settings.theta:g}, one spectrum of the model, codes of "
                    f"{settings.bits} bits of which {settings.mantissa} are mantissa. own: the "
                    "range is that of this step and worker. first: it is the one of the first "
                    f"{settings.first} steps times {settings.margin:g}, the same for all workers."
                ],
                rows=rows,
            ),
        ],
    )


def judge(rows: Sequence[Row]) -> list[Row]:
    """Return the verdict on the geometric mean of the ratio of errors, over later steps."""
    logs = []
    for run in verdicts.by_seed(rows):
        ratios = [row["ratio"] for row in run]
        known = [math.nan if ratio is None else math.log(float(ratio)) for ratio in ratios]
        logs.append(fmean(known))
    return [verdicts.row(LATER, verdicts.geometric(logs))]


def draw(analysis: Analysis, path: Path) -> None:
    """Draw both errors, and the share of values outside, over the steps; a line a seed.

    Raises:
        UsageError: an ending that is no picture's.
        GcbenchError: `path` cannot be written.
    """
    path = figures.check(path)
    rows = analysis.table("steps").rows
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    lines = {"error_own": "each message's own range", "error_given": "range of the first steps"}
    look = figures.styles(lines)
    with figures.canvas(11, 4.6) as figure:
        left, right = figure.subplots(1, 2)
        for seed in seeds:
            own = [row for row in rows if row["seed"] == seed]
            at = [float(row["step"] or 0) for row in own]
            for field, label in lines.items():
                values = [
                    math.nan if row[field] is None else 100 * float(row[field] or 0) for row in own
                ]
                left.plot(at, values, **look[field], label=label if seed == seeds[0] else None)
            outside = [100 * float(row["outside"] or 0) for row in own]
            right.plot(at, outside, **look["error_given"])
        left.set_ylabel("error $\\|x - x'\\| / \\|x\\|$, %")
        right.set_ylabel("kept values outside the range, %")
        right.set_ylim(bottom=0)
        left.legend(frameon=False, fontsize="small")
        for axes in (left, right):
            axes.set_xlabel("step of training")
        figure.suptitle(
            f"FFT's range of steps 0 to {analysis.settings['first'] - 1}, {title(analysis)}, "
            f"{len(seeds)} seeds",
            fontsize="medium",
        )
        figures.save(figure, path)


if __name__ == "__main__":
    main()
