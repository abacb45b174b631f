"""Number formats of equal bits on gradients: range float, uniform, IEEE-like (FFT, figures 7, 9).

Each format has at most 2^N values for one group of numbers; each number is rounded to the nearest:

range float  the format of Wang et al. (`gcbench.ops.rangefloat`, packed and unpacked), in the
             group's range, with `--mantissa` of the N bits for the mantissa.
best range   the same with the mantissa that has the least error, found by trying all.
uniform      2^N evenly spaced values from the smallest to the largest number.
ieee         a sign, 5 exponent bits (4 if N is 8 or less), and the rest for the mantissa, as in
             IEEE 754 with denormals; larger numbers become the largest finite value.
ieee scaled  the same, after scaling by the power of two that moves the largest number to the
             format's top octave.

A worker's gradient has three groups of numbers: all elements; the share `--share` of largest
magnitude; and the real and imaginary parts of an equal share of the largest bins of its spectrum,
which is what FFT sparsification sends. The error is ||x - x'|| / ||x|| of a group.
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
from _paper import (
    Columns,
    Trained,
    error,
    log_ratio,
    main,
    measured,
    number,
    plot,
    result,
    table,
    title,
    values,
)
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from gcbench import ops
from gcbench.core.compressor import Segments
from gcbench.core.progress import Observer
from gcbench.profile.histogram.reconstruction import Gradients
from gcbench.report import figures, verdicts
from gcbench.report.analysis import Analysis, Ledger, Row, Table
from gcbench.report.rendering import records
from gcbench.report.verdicts import Claim

KIND = "number-formats"
SOURCE = "Wang et al. 2020, figures 7 and 9"
RANGE, BEST = "range float", "best range"
JUDGED = ("all elements", "largest bins")
"""The groups that are judged: the one in the paper's figures, and the one that is sent."""
RIVALS = ("uniform", "ieee scaled")
"""Formats compared with range floats, except "ieee", which loses small numbers."""


class Settings(Trained):
    """The settings that decide the result."""

    bits: list[Annotated[int, Field(ge=6, le=16)]] = Field(
        default=[8, 10, 12], min_length=1, description="N, bits per number."
    )
    mantissa: list[Annotated[int, Field(ge=0)]] = Field(
        default=[3, 5, 7],
        min_length=1,
        description="Bits of the range float's mantissa, for each N.",
    )
    share: float = Field(default=0.15, gt=0, lt=1, description="Share of elements and bins kept.")

    @field_validator("mantissa")
    @classmethod
    def _pairs(cls, mantissas: list[int], info: ValidationInfo) -> list[int]:
        widths = info.data.get("bits", [])
        if len(mantissas) != len(widths) or len({*widths}) < len(widths):
            raise ValueError(
                f"{mantissas} for bits {widths}; give distinct bits and one mantissa each"
            )
        for bits, mantissa in zip(widths, mantissas, strict=True):
            ops.rangefloat.check(bits, mantissa)
        return mantissas


# ---- formats -------------------------------------------------------------------------------------


def range_float(x: Tensor, bits: int, mantissa: int) -> Tensor:
    """Return `x`, float32, shape (n,), rounded to range floats in the range of x."""
    packed, grids = ops.rangefloat.pack(x, [(1, len(x))], bits, mantissa)
    return ops.rangefloat.unpack(packed, grids, [(1, len(x))], bits, mantissa, RANGE)


def best_range(x: Tensor, bits: int, mantissa: int = 0) -> Tensor:
    """Return `range_float` with the mantissa that has the least error."""
    allowed = range(min(bits, ops.rangefloat.WIRE - bits + 1))
    return min((range_float(x, bits, m) for m in allowed), key=lambda decoded: error(x, decoded))


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
    """Return `x` rounded to an IEEE-like float of `bits` bits, float64, saturating."""
    return _ieee(x.double(), bits)


def ieee_scaled(x: Tensor, bits: int, mantissa: int = 0) -> Tensor:
    """Return `ieee` of x scaled by the power of two that fills the top octave, scaled back."""
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


def groups(bucket: Tensor, share: float) -> dict[str, Tensor]:
    """Return the groups of numbers of a gradient, float32, shape (n,), by name."""
    k = max(1, math.ceil(share * len(bucket)))
    segments = Segments.of([(len(bucket),)], "model")
    runs = ops.spectrum.runs_of(segments, 1 - share)
    bins, energy = ops.spectrum.forward(bucket, segments, half=False)
    spectrum = bins.view(-1, 2)[ops.spectrum.largest(energy, runs)]
    return {
        "all elements": bucket,
        "largest elements": bucket[bucket.abs().topk(k).indices],
        "largest bins": spectrum.reshape(-1).contiguous(),
    }


def measure(gradients: Gradients, settings: Settings) -> list[Row]:
    """Return the errors at one step, means over the workers, by group, bits and format."""
    per_worker = [groups(bucket, settings.share) for bucket in gradients.buckets]
    rows: list[Row] = []
    for group in per_worker[0]:
        for bits, mantissa in zip(settings.bits, settings.mantissa, strict=True):
            for name, coded in FORMATS.items():
                errors = [
                    error(one[group], coded(one[group], bits, mantissa)) for one in per_worker
                ]
                rows.append({"values": group, "bits": bits, "format": name, "error": fmean(errors)})
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
        UsageError, GcbenchError: see `_paper.measured`.
    """
    rows = measured(
        lambda gradients: measure(gradients, settings), settings, observer, ledger, data_dir
    )
    judged = judge(rows)
    return result(
        KIND,
        settings,
        command,
        judged,
        _summary(rows, settings),
        Table(name="steps", title="Errors by step and seed", rows=rows),
        of="values",
        notes=["Measured: the geometric mean of the ratio of errors, one value per seed."],
        conclusions=conclude(judged),
    )


def judge(rows: Sequence[Row]) -> list[Row]:
    """Return the verdicts on range floats: the ratio of errors to a rival's is at most 1."""
    errors = {
        (row["seed"], row["step"], row["values"], row["bits"], row["format"]): row["error"]
        for row in rows
    }
    places = [(row["seed"], row["step"]) for row in rows]
    runs = {seed: list(dict.fromkeys(s for r, s in places if r == seed)) for seed, _ in places}
    judged: list[Row] = []
    for group, bits, rival, ours in product(
        JUDGED, dict.fromkeys(row["bits"] for row in rows), RIVALS, (RANGE, BEST)
    ):
        logs = [
            fmean(
                log_ratio(
                    errors[seed, step, group, bits, ours], errors[seed, step, group, bits, rival]
                )
                for step in steps
            )
            for seed, steps in runs.items()
        ]
        claim = Claim(f"{bits} bits: error of {ours} / {rival}", SOURCE, 1.0, above=False)
        judged.append(verdicts.row(claim, verdicts.geometric(logs), values=group, rival=rival))
    return judged


def conclude(judged: Sequence[Row]) -> list[str]:
    """Return a sentence per group and rival, with the count of each verdict."""
    sentences = []
    for group, rival in product(JUDGED, RIVALS):
        rows = [row for row in judged if (row["values"], row["rival"]) == (group, rival)]
        counts = [
            f"{verdict} in {sum(row['verdict'] == verdict for row in rows)}"
            for verdict in verdicts.VERDICTS
        ]
        sentences.append(
            f"Range floats have less error than {rival}, {group}: {', '.join(counts)} of "
            f"{len(rows)} comparisons (by bits, with the given and the best mantissa)."
        )
    return sentences


def _summary(rows: Sequence[Row], settings: Settings) -> Table:
    import pandas as pd

    frame = pd.DataFrame([*rows]).astype({"error": float})
    errors = frame.groupby(["values", "bits", "format"], sort=False)["error"]
    summary = errors.agg(error="mean", low="min", high="max", n="count").reset_index()
    used = ", ".join(f"{m} of {n}" for n, m in zip(settings.bits, settings.mantissa, strict=True))
    columns: Columns = {
        "bits": "bits",
        "format": "format",
        "error": ("error %\nmean", 100.0),
        "low": ("\nleast", 100.0),
        "high": ("\nlargest", 100.0),
        "n": "n",
    }
    notes = [
        f"{settings.where()}. n: steps times seeds; each value is the mean over workers. Largest "
        f"elements and bins: {100 * settings.share:g} % of a worker's gradient or spectrum. "
        f"Mantissa of the range float: {used} bits."
    ]
    rows_of = records(summary)
    heading = "Error ||x - x'|| / ||x|| by format"
    return table("errors", heading, columns, rows_of, by="values", which=2, notes=notes)


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the errors over the bits, one panel per group of numbers."""
    rows = [row for row in analysis.table("errors").rows if row["error"]]
    groups = list(dict.fromkeys(str(row["values"]) for row in rows))
    look = figures.styles(FORMATS)
    heading = f"Number formats on gradients of {title(analysis)}"
    with plot(path, 4.4 * len(groups), 5, heading, len(groups), sharey=True) as panels:
        for axes, group in zip(panels, groups, strict=True):
            for name in FORMATS:
                line = [r for r in rows if (r["values"], r["format"]) == (group, name)]
                line.sort(key=lambda row: number(row["bits"]))
                style = {**look[name], "lw": 1.6, "ms": 6}
                axes.plot(values(line, "bits"), values(line, "error", 100), **style, label=name)
            axes.set(yscale="log", xlabel="bits per number", title=group)
            axes.set_xticks(sorted({number(row["bits"]) for row in rows}))
        panels[0].set_ylabel("error $\\|x - x'\\| / \\|x\\|$, %")


if __name__ == "__main__":
    main()
