"""Number formats of equal bits on gradients: range float, uniform, IEEE-like (FFT, figures 7, 9).

Each format has at most 2^N values for one group of numbers; each number is rounded to the nearest:

range float  that of Wang et al. (`gcbench.ops.rangefloat`, packed and unpacked), in the group's
             range, with `--mantissa` of the N bits for the mantissa.
best range   the same with the mantissa whose error is least, found by trying all, as a sender
             could.
uniform      2^N evenly spaced values from the least to the largest number.
ieee         a sign, 5 bits of exponent (4 if N is 8 or less), and the rest for the mantissa, as in
             IEEE 754 with denormals; numbers beyond the largest finite value become that value.
ieee scaled  the same, of the numbers times the power of two that brings the largest of them to the
             format's top octave.

There are three groups of a worker's gradient: all its elements; the share `--kept` of them that is
largest in magnitude; and the real and imaginary parts of the largest bins of its spectrum, an equal
share, which is what FFT sparsification sends. The error is ||x - x'|| / ||x|| of a group.
Source: Wang et al., HPDC 2020, arXiv:1811.08596, figures 7 and 9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
from _script import main
from _trained import Trained, gradients, title
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from gcbench import ops
from gcbench.core.compressor import Segments
from gcbench.core.progress import Observer
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table, Value
from gcbench.report.rendering import records
from gcbench.studies import verdicts
from gcbench.studies.histogram.reconstruction import Gradients
from gcbench.studies.verdicts import Claim

KIND = "number-formats"
SOURCE = "Wang et al. 2020, figures 7 and 9"
RANGE, BEST = "range float", "best range"
JUDGED = ("all elements", "largest bins")
"""The groups that have verdicts: that of the paper's figures, and that which the method sends."""
RIVALS = ("uniform", "ieee scaled")
"""The formats with which range floats are compared; "ieee" is not, as it loses small numbers."""


class Settings(Trained):
    """The settings that decide the result."""

    bits: list[Annotated[int, Field(ge=6, le=16)]] = Field(
        default=[8, 10, 12], min_length=1, description="N, bits of a number."
    )
    mantissa: list[Annotated[int, Field(ge=0)]] = Field(
        default=[3, 5, 7],
        min_length=1,
        description="Bits of the range float's mantissa, for each N.",
    )
    kept: float = Field(default=0.15, gt=0, lt=1, description="Share of elements and bins kept.")

    @field_validator("mantissa")
    @classmethod
    def _pairs(cls, given: list[int], info: ValidationInfo) -> list[int]:
        widths = info.data.get("bits", [])
        if len(given) != len(widths) or len({*widths}) < len(widths):
            raise ValueError(f"{given} for bits {widths}: different bits, a mantissa for each")
        for bits, mantissa in zip(widths, given, strict=True):
            ops.rangefloat.check(bits, mantissa)
        return given


# ---- formats -------------------------------------------------------------------------------------


def range_float(x: Tensor, bits: int, mantissa: int) -> Tensor:
    """Return `x`, float32, shape (n,), rounded to range floats in the range of x."""
    words, grids = ops.rangefloat.pack(x, [(1, len(x))], bits, mantissa)
    return ops.rangefloat.unpack(words, grids, [(1, len(x))], bits, mantissa, RANGE)


def best_range(x: Tensor, bits: int, mantissa: int = 0) -> Tensor:
    """Return `range_float` with the mantissa, of all that are possible, whose error is least."""
    allowed = range(min(bits, ops.rangefloat.WIRE - bits + 1))
    return min((range_float(x, bits, m) for m in allowed), key=lambda arrived: error(x, arrived))


def uniform(x: Tensor, bits: int, mantissa: int = 0) -> Tensor:
    """Return `x` rounded to 2^bits evenly spaced values from min x to max x, float64."""
    low, high = x.amin().double(), x.amax().double()
    step = (high - low) / ((1 << bits) - 1)
    if not bool(step):
        return x.double()
    return ((x.double() - low) / step).round_().mul_(step).add_(low)


def _ieee(x: Tensor, bits: int) -> Tensor:
    exponent = 4 if bits <= 8 else 5
    fraction = bits - 1 - exponent
    bias = 2 ** (exponent - 1) - 1
    top = 2.0 ** (2**exponent - 2 - bias) * (2 - 2.0**-fraction)
    _, power = torch.frexp(x.abs())  # x = m 2^power, 1/2 <= m < 1
    step = torch.exp2((power - 1).clamp(min=1 - bias).double() - fraction)
    return ((x / step).round() * step).clamp(-top, top)


def ieee(x: Tensor, bits: int, mantissa: int = 0) -> Tensor:
    """Return `x` rounded to an IEEE-like float of so many bits, float64, saturating."""
    return _ieee(x.double(), bits)


def ieee_scaled(x: Tensor, bits: int, mantissa: int = 0) -> Tensor:
    """Return `ieee` of x times a power of two, divided by it: the largest is in the top octave."""
    exponent = 4 if bits <= 8 else 5
    peak = float(x.abs().amax())
    if not peak:
        return x.double()
    octave = 2**exponent - 2 - (2 ** (exponent - 1) - 1)
    scale = math.ldexp(1.0, octave - math.floor(math.log2(peak)))
    return _ieee(x.double() * scale, bits) / scale


FORMATS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    RANGE: range_float,
    BEST: best_range,
    "uniform": uniform,
    "ieee": ieee,
    "ieee scaled": ieee_scaled,
}


def groups(bucket: Tensor, kept: float) -> dict[str, Tensor]:
    """Return the groups of numbers of a gradient, float32, shape (n,), by name."""
    k = max(1, math.ceil(kept * len(bucket)))
    segments = Segments.of([(len(bucket),)], "model")
    runs = ops.spectrum.runs_of(segments, 1 - kept)
    bins, energy = ops.spectrum.forward(bucket, segments, half=False)
    spectrum = bins.view(-1, 2)[ops.spectrum.largest(energy, runs)]
    return {
        "all elements": bucket,
        "largest elements": bucket[bucket.abs().topk(k).indices],
        "largest bins": spectrum.reshape(-1).contiguous(),
    }


def error(x: Tensor, arrived: Tensor) -> float:
    """Return ||x - x'|| / ||x||; NaN if x is zero, and infinity if x' is not finite."""
    if not bool(arrived.isfinite().all()):
        return math.inf
    whole = float(x.double().norm())
    return float((x.double() - arrived.double()).norm()) / whole if whole else math.nan


def measure(found: Gradients, settings: Settings) -> list[Row]:
    """Return the errors at one step, means over the workers, by group, bits and format."""
    per_worker = [groups(bucket, settings.kept) for bucket in found.buckets]
    rows: list[Row] = []
    for values in per_worker[0]:
        for bits, mantissa in zip(settings.bits, settings.mantissa, strict=True):
            for name, coded in FORMATS.items():
                errors = [
                    error(one[values], coded(one[values], bits, mantissa)) for one in per_worker
                ]
                rows.append(
                    {"values": values, "bits": bits, "format": name, "error": fmean(errors)}
                )
    return rows


# ---- the analysis --------------------------------------------------------------------------------


def run(
    settings: Settings,
    command: str,
    observer: Observer,
    ledger: Ledger,
    data_dir: Path | None = None,
) -> Analysis:
    """Measure every format on every captured gradient.

    Raises:
        UsageError, GcbenchError: see `trained.gradients`.
    """
    rows: list[Row] = []
    for found in gradients(settings, ledger, data_dir):
        observer.step(0, f"seed {found.seed}, step {found.step}")
        rows += [
            {"seed": found.seed, "step": found.step, **one} for one in measure(found, settings)
        ]
    observer.step(1, "done")
    judged = judge(rows)
    return Analysis.of(
        KIND,
        settings,
        command,
        conclusions=conclude(judged),
        tables=[
            verdicts.table(
                judged,
                of="values",
                notes=["Measured: the geometric mean of the ratio of errors, a value a seed."],
            ),
            _summary(rows, settings),
            Table(name="steps", title="Errors by step and seed", rows=rows),
        ],
    )


def judge(rows: Sequence[Row]) -> list[Row]:
    """Return the verdicts on range floats: the claim is that error / the rival's is at most 1."""
    errors = {
        (row["seed"], row["step"], row["values"], row["bits"], row["format"]): row["error"]
        for row in rows
    }
    places = [(row["seed"], row["step"]) for row in rows]
    runs = {seed: list(dict.fromkeys(s for r, s in places if r == seed)) for seed, _ in places}
    judged: list[Row] = []
    for values, bits, rival, ours in product(
        JUDGED, dict.fromkeys(row["bits"] for row in rows), RIVALS, (RANGE, BEST)
    ):
        said = f"{bits} bits: error of {ours} / {rival}"
        logs = [
            fmean(
                _log_ratio(
                    errors[seed, step, values, bits, ours], errors[seed, step, values, bits, rival]
                )
                for step in steps
            )
            for seed, steps in runs.items()
        ]
        claim = Claim(said, SOURCE, 1.0, above=False)
        judged.append(verdicts.row(claim, verdicts.geometric(logs), values=values, rival=rival))
    return judged


def conclude(judged: Sequence[Row]) -> list[str]:
    """Return a sentence for each group and rival, with how often each verdict came."""
    said = []
    for values, rival in product(JUDGED, RIVALS):
        own = [row for row in judged if (row["values"], row["rival"]) == (values, rival)]
        counts = [
            f"{verdict} in {sum(row['verdict'] == verdict for row in own)}"
            for verdict in verdicts.VERDICTS
        ]
        said.append(
            f"Range floats have less error than {rival}, {values}: {', '.join(counts)} of "
            f"{len(own)} comparisons (bits, and the mantissa given or best)."
        )
    return said


def _log_ratio(ours: Value, theirs: Value) -> float:
    a, b = (math.nan if one is None else float(one) for one in (ours, theirs))
    return math.log(a / b) if 0 < a < math.inf and 0 < b < math.inf else math.nan


def _summary(rows: Sequence[Row], settings: Settings) -> Table:
    import pandas as pd

    found = pd.DataFrame([*rows]).astype({"error": float})
    errors = found.groupby(["values", "bits", "format"], sort=False)["error"]
    made = errors.agg(error="mean", low="min", high="max", n="count").reset_index()
    used = ", ".join(f"{m} of {n}" for n, m in zip(settings.bits, settings.mantissa, strict=True))
    return Table(
        name="errors",
        title="Error ||x - x'|| / ||x|| by format",
        by="values",
        which=2,
        shown=[
            Shown(field="bits", heading="bits"),
            Shown(field="format", heading="format"),
            Shown(field="error", heading="error %\nmean", scale=100),
            Shown(field="low", heading="\nleast", scale=100),
            Shown(field="high", heading="\nlargest", scale=100),
            Shown(field="n", heading="n"),
        ],
        notes=[
            f"{settings.named()}, {settings.workers} workers, {settings.steps} steps. n is the "
            "number of steps times that of seeds; each value is the mean over workers. The largest "
            f"elements, and bins, are {100 * settings.kept:g} % of a worker's whole gradient, and "
            f"of its spectrum. The range float has {used} bits of mantissa; the one of the best "
            "range has as many as give the least error."
        ],
        rows=records(made),
    )


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the errors over the bits, a panel for each kind of numbers.

    Raises:
        UsageError: an ending that is no picture's.
        GcbenchError: `path` cannot be written.
    """
    path = figures.check(path)
    rows = analysis.table("errors").rows
    kinds = list(dict.fromkeys(str(row["values"]) for row in rows))
    look = figures.styles(FORMATS)
    with figures.canvas(4.4 * len(kinds), 5) as figure:
        grid = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
        for axes, kind in zip(grid, kinds, strict=True):
            for name in FORMATS:
                own = [r for r in rows if (r["values"], r["format"]) == (kind, name)]
                own = sorted((r for r in own if r["error"]), key=lambda r: float(r["bits"] or 0))
                at = [float(r["bits"] or 0) for r in own]
                middle = [100 * float(r["error"] or 0) for r in own]
                axes.plot(at, middle, **look[name], lw=1.6, ms=6, label=name)
            axes.set_yscale("log")
            axes.set_xticks(sorted({float(r["bits"] or 0) for r in rows}))
            axes.set_title(kind, fontsize="medium")
            axes.set_xlabel("bits of a number")
        grid[0].set_ylabel("error $\\|x - x'\\| / \\|x\\|$, %")
        grid[-1].legend(frameon=False, fontsize="small")
        seeds = len(analysis.settings["seed"])
        told = f"Number formats on gradients of {title(analysis)}, {seeds} seeds"
        figure.suptitle(told, fontsize="medium")
        figures.save(figure, path)


if __name__ == "__main__":
    main()
