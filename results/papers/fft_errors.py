"""Errors of FFT sparsification on gradients, beside those of other codecs (FFT, figure 15).

Each worker's gradient is encoded once, without memory. The error of a decoding x' of x is
||x - x'|| / ||x||; the picture has the distribution of (x' - x) / rms(x) over the elements, the
mean over workers, steps and seeds. The paper compares theta = .85 with QSGD at 3 bits; theta = .745
has as many bits as QSGD.
Source: Wang et al., HPDC 2020, arXiv:1811.08596, figure 15.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from _paper import Trained, coded, main, measured, number, plot, result, table, title, values
from pydantic import Field
from torch import Tensor

from gcbench.core.compressor import Compressor
from gcbench.core.progress import Observer
from gcbench.profile.histogram.reconstruction import Gradients
from gcbench.report import figures, verdicts
from gcbench.report.analysis import Analysis, Ledger, Row, Table
from gcbench.report.verdicts import Claim
from gcbench.training import methods

KIND = "fft-errors"
SOURCE = "Wang et al. 2020, figure 15"
MOST, BINS = 4.0, 80
"""The picture's largest |x' - x| / rms(x), and its number of bins."""


class Settings(Trained):
    """The settings that decide the result."""

    ours: list[str] = Field(
        default=["fft", "fft:theta=0.745"], min_length=1, description="Codecs that are judged."
    )
    rival: list[str] = Field(
        default=["qsgd:levels=3", "terngrad", "topk:ratio=0.15:values=range"],
        min_length=1,
        description="Codecs that they are compared with.",
    )


def error(x: Tensor, decoded: Tensor) -> float:
    """Return ||x - x'|| / ||x|| in float64; NaN for x = 0."""
    norm = float(x.double().norm())
    return float((x.double() - decoded.double()).norm()) / norm if norm else math.nan


def distribution(x: Tensor, decoded: Tensor) -> Tensor:
    """Return the share of the elements in each bin of (x' - x) / rms(x), float64, (BINS,).

    The first and last bin also count what lies beyond them.
    """
    rms = float(x.double().square().mean().sqrt())
    off = (decoded.double() - x.double()) / (rms or 1.0)
    counts = torch.histc(off.clamp_(-MOST, MOST), BINS, -MOST, MOST)
    return counts / len(x)


def run(
    settings: Settings,
    command: str,
    observer: Observer,
    ledger: Ledger,
    data_dir: Path | None = None,
) -> Analysis:
    """Measure the errors on every captured gradient.

    Raises:
        UsageError, GcbenchError: see `methods.all_of` and `_paper.measured`.
    """
    chosen = methods.all_of(",".join([*settings.ours, *settings.rival]))
    shares = {spec: torch.zeros(BINS, dtype=torch.float64) for spec in chosen}
    counts = dict.fromkeys(chosen, 0)

    def each(gradients: Gradients) -> Iterator[Row]:
        for spec, method in chosen.items():
            errors, sizes = [], []
            for x, decoded, nbytes in coded(method, gradients):
                errors.append(error(x, decoded))
                sizes.append(8 * nbytes / len(x))
                shares[spec] += distribution(x, decoded)
                counts[spec] += 1
            yield {"method": spec, "error": fmean(errors), "bits": fmean(sizes)}

    rows = measured(each, settings, observer, ledger, data_dir)
    return result(
        KIND,
        settings,
        command,
        judge(rows, settings),
        errors_table(rows, chosen, settings),
        Table(
            name="distribution",
            title="Distribution of (x' - x) / rms(x): share of the elements per bin",
            rows=[
                {"method": spec, "bin": i, "share": share}
                for spec, total in shares.items()
                for i, share in enumerate((total / counts[spec]).tolist())
            ],
        ),
        of="method",
        notes=["Measured: the geometric mean of the ratio of errors, one value per seed."],
    )


def judge(rows: Sequence[Row], settings: Settings) -> list[Row]:
    """Return the verdicts: the ratio of a codec's error to that of each rival is at most 1."""
    runs = verdicts.by_seed(rows)
    judged: list[Row] = []
    for ours, rival in product(settings.ours, settings.rival):
        logs = []
        for run in runs:
            errors = {(row["method"], row["step"]): number(row["error"]) for row in run}
            steps = dict.fromkeys(row["step"] for row in run)
            logs.append(fmean(math.log(errors[ours, k] / errors[rival, k]) for k in steps))
        claim = Claim(f"error / that of {rival}", SOURCE, 1.0, above=False)
        judged.append(verdicts.row(claim, verdicts.geometric(logs), method=ours, rival=rival))
    return judged


def errors_table(
    rows: Sequence[Row], chosen: Mapping[str, Compressor], settings: Settings
) -> Table:
    """Return bits and errors of each codec, over all steps and seeds."""
    summary: list[Row] = []
    for spec in chosen:
        mine = [row for row in rows if row["method"] == spec]
        errors = [number(row["error"]) for row in mine]
        bits = fmean(number(row["bits"]) for row in mine)
        ends = {"low": min(errors), "high": max(errors), "n": len(errors)}
        summary.append({"method": spec, "bits": bits, "error": fmean(errors), **ends})
    columns = {
        "method": "codec",
        "bits": "bits per\nelement",
        "error": "error\nmean",
        "low": "\nleast",
        "high": "\nlargest",
        "n": "n",
    }
    notes = [f"{settings.where()}. n: steps times seeds; each value is the mean over workers."]
    return table("errors", "Error ||x - x'|| / ||x||", columns, summary, notes=notes)


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the distribution of the errors of each codec."""
    rows = analysis.table("distribution").rows
    edges = torch.linspace(-MOST, MOST, BINS + 1).tolist()
    bits = {str(row["method"]): number(row["bits"]) for row in analysis.table("errors").rows}
    look = figures.styles(bits)
    heading = f"Errors of decoded gradients, {title(analysis)}"
    with plot(path, 7.5, 5, heading) as (axes,):
        for spec in bits:
            shares = values([row for row in rows if row["method"] == spec], "share")
            label = f"{spec}, {bits[spec]:.2f} bits"
            axes.stairs(shares, edges, color=look[spec]["color"], lw=1.5, label=label)
        axes.set(yscale="log", xlim=(-MOST, MOST), ylim=(1e-5, 20))  # room for the legend
        axes.set_ylabel("share of the elements per bin")
        axes.set_xlabel("error of an element: (x' - x) / rms of the gradient")


if __name__ == "__main__":
    main()
