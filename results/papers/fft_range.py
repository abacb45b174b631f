"""The range of FFT sparsification's codes, estimated once from the first steps (Wang et al. 2020).

The paper estimates the range of its quantizer in the first iterations and keeps it; `fft` by
default takes the range of each payload. This script trains without compression and takes the
smallest and the largest value that any worker keeps of its spectrum in steps 0 to `--first` - 1,
times `--margin`. It encodes later gradients with both ranges: how many values lie outside, and what
is the error ||x - x'|| / ||x||? A run uses the estimated range with `--set low=.. --set high=..`.
Source: Wang et al., HPDC 2020, arXiv:1811.08596, its range-based quantizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from _paper import Columns, Trained, error, main, measured, plot, result, table, title, values
from pydantic import Field
from torch import Tensor

from gcbench import ops
from gcbench.checks import calls
from gcbench.core import registry
from gcbench.core.compressor import Compressor, Key, Segments
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.core.progress import Observer
from gcbench.core.values import finite
from gcbench.profile.histogram.reconstruction import Gradients
from gcbench.report import figures, verdicts
from gcbench.report.analysis import Analysis, Ledger, Row
from gcbench.report.verdicts import Claim

KIND = "fft-range"
LATER = Claim(
    "error with the range of the first steps / with each payload's own",
    "Wang et al. 2020, range-based quantizer",
    1.01,
    above=False,
)
"""The paper does not say what its rule costs; here up to one percent more error is the same."""
Range = tuple[float, float]


class Settings(Trained):
    """The settings that decide the result."""

    first: int = Field(
        default=10, ge=1, description="Number of first steps from which the range is estimated."
    )
    margin: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="Factor by which it is widened."
    )
    theta: float = Field(default=0.85, ge=0, lt=1, description="Share of the bins to drop.")
    bits: int = Field(default=10, ge=2, le=16, description="Bits per code.")
    mantissa: int = Field(default=5, ge=0, description="Bits of its mantissa.")

    def method(self, fixed: Range | None = None) -> Compressor:
        """Return the method with the range of each payload, or with a fixed range.

        Raises:
            UsageError: fields out of range.
        """
        bounds: dict[str, Any] = {} if fixed is None else {"low": fixed[0], "high": fixed[1]}
        fields = {"theta": self.theta, "code_bits": self.bits, "mantissa": self.mantissa}
        return registry.compressor("fft", **fields, **bounds)


def kept_values(x: Tensor, segments: Segments, theta: float) -> Tensor:
    """Return the real and imaginary parts of the bins of x that are kept, float32, shape (K, 2)."""
    bins, energy = ops.spectrum.forward(x, segments, half=True)
    return bins.view(-1, 2)[ops.spectrum.largest(energy, ops.spectrum.runs_of(segments, theta))]


def estimate(steps: Sequence[Gradients], settings: Settings) -> Range:
    """Return the range of the values that the workers keep in these steps, times the margin.

    Raises:
        GcbenchError: all values are on one side of 0.
    """
    method = settings.method()
    ends = [
        kept_values(bucket, one.segments(method), settings.theta).aminmax()
        for one in steps
        for bucket in one.buckets
    ]
    low = settings.margin * min(float(end.min) for end in ends)
    high = settings.margin * max(float(end.max) for end in ends)
    if not low < 0 < high:
        raise GcbenchError(
            f"the first steps keep values from {low:g} to {high:g}, but a range must include 0"
        )
    return low, high


def measure(gradients: Gradients, settings: Settings, estimate: Range) -> Row:
    """Return the errors with both ranges at one step, means over the workers.

    `estimate`: the estimated range; `outside`: the share of kept values beyond it; `peak`: the
    largest kept magnitude.
    """
    per_payload, fixed = settings.method(), settings.method(estimate)
    segments = gradients.segments(per_payload)
    rows = []
    for rank, bucket in enumerate(gradients.buckets):
        key = Key(gradients.seed, gradients.step, rank)
        values = kept_values(bucket, segments, settings.theta)
        outside = (values < estimate[0]) | (values > estimate[1])
        rows.append(
            (
                error(bucket, calls.round_trip(per_payload, bucket, segments, key)),
                error(bucket, calls.round_trip(fixed, bucket, segments, key)),
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
        UsageError: no captured step follows the first ones; see also `_paper.measured`.
        GcbenchError: see `estimate` and `_paper.measured`.
    """
    if max(settings.capture, default=settings.steps - 1) < settings.first:
        what = f"--capture {settings.capture}" if settings.capture else f"--steps {settings.steps}"
        raise UsageError(
            f"{what} has no step after the first {settings.first}; add a later one, or use a "
            "smaller --first"
        )
    ops.rangefloat.check(settings.bits, settings.mantissa)
    early: list[Gradients] = []
    ranges: dict[int, Range] = {}

    def each(gradients: Gradients) -> Iterator[Row]:
        if gradients.step < settings.first:
            early.append(gradients)
            return
        if gradients.seed not in ranges:
            ranges[gradients.seed] = estimate(early, settings)
            early.clear()
        low, high = ranges[gradients.seed]
        yield {"low": low, "high": high, **measure(gradients, settings, (low, high))}

    first = tuple(range(settings.first))
    rows = measured(each, settings, observer, ledger, data_dir, first)
    judged = judge(rows)
    low, high = (fmean(ends) for ends in zip(*ranges.values(), strict=True))
    columns: Columns = {
        "seed": "seed",
        "step": "step",
        "low": "low",
        "high": "high",
        "peak": "largest\nvalue",
        "outside": ("outside\n%", 100.0),
        "error_own": ("error %\nown", 100.0),
        "error_given": ("\nfirst", 100.0),
        "ratio": "ratio",
    }
    notes = [
        f"{settings.where()}, theta = {settings.theta:g}, one spectrum per model, codes of "
        f"{settings.bits} bits with {settings.mantissa} bits of mantissa. own: the range of this "
        f"step and worker. first: the range of the first {settings.first} steps times "
        f"{settings.margin:g}."
    ]
    heading = "Errors with the range of the first steps, and with each payload's own"
    return result(
        KIND,
        settings,
        command,
        judged,
        table("steps", heading, columns, rows, which=2, notes=notes),
        notes=["The geometric mean over later steps, one value per seed."],
        conclusions=[
            *verdicts.sentences(judged),
            f"Mean over the seeds: --set low={low:.4g} --set high={high:.4g}.",
        ],
    )


def judge(rows: Sequence[Row]) -> list[Row]:
    """Return the verdict on the geometric mean of the ratio of errors, over later steps."""
    logs = []
    for run in verdicts.by_seed(rows):
        ratios = values(run, "ratio")
        logs.append(fmean(math.log(ratio) if ratio > 0 else math.nan for ratio in ratios))
    return [verdicts.row(LATER, verdicts.geometric(logs))]


def draw(analysis: Analysis, path: Path) -> None:
    """Draw both errors, and the share of values outside, over the steps; one line per seed."""
    rows = analysis.table("steps").rows
    lines = {"error_own": "each payload's own range", "error_given": "range of the first steps"}
    look = figures.styles(lines)
    first = analysis.settings["first"]
    heading = f"FFT's range of steps 0 to {first - 1}, {title(analysis)}"
    with plot(path, 11, 4.6, heading, 2) as (left, right):
        for position, run in enumerate(verdicts.by_seed(rows)):
            steps = values(run, "step")
            for field, label in lines.items():
                label = "_" * bool(position) + label  # one entry in the legend
                left.plot(steps, values(run, field, 100), **look[field], label=label)
            right.plot(steps, values(run, "outside", 100), **look["error_given"])
        left.set(xlabel="training step", ylabel="error $\\|x - x'\\| / \\|x\\|$, %")
        right.set(xlabel="training step", ylabel="kept values outside the range, %")
        right.set_ylim(bottom=0)


if __name__ == "__main__":
    main()
