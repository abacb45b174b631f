"""Errors of FFT sparsification on gradients, beside those of other codecs (FFT, figure 15).

Each worker's gradient is encoded once, without memory. The error of a decoding x' of x is
||x - x'|| / ||x||; the picture has the distribution of (x' - x) / rms(x) over the elements, the
mean over workers, steps and seeds. The paper compares theta = .85 with QSGD at 3 bits. Only that is
judged; theta = .745 has as many bits as QSGD.
Source: Wang et al., HPDC 2020, arXiv:1811.08596, figure 15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

import torch
from _paper import (
    Trained,
    coded,
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
from pydantic import Field
from torch import Tensor

from gcbench.core.compressor import Compressor
from gcbench.core.progress import Observer
from gcbench.core.values import finite
from gcbench.profile.histogram.reconstruction import Gradients
from gcbench.report import figures, verdicts
from gcbench.report.analysis import Analysis, Ledger, Row, Table
from gcbench.report.verdicts import Claim
from gcbench.stats.confidence import Interval
from gcbench.training import methods

KIND = "fft-errors"
SOURCE = "Wang et al. 2020, figure 15"
MOST, BINS = 4.0, 80
"""The picture's largest |x' - x| / rms(x), and its number of bins."""


class Settings(Trained):
    """The settings that decide the result."""

    method: list[str] = Field(
        default=[
            *("fft", "qsgd:levels=3", "fft:theta=0.745"),
            *("terngrad", "topk:ratio=0.15:values=range"),
        ],
        min_length=2,
        description="Codecs; the error of the first is judged by that of the second.",
    )


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
    chosen = methods.all_of(",".join(settings.method))
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
        [judge(rows, settings)],
        errors_table(rows, chosen, settings),
        ratios_table(rows, settings),
        Table(
            name="distribution",
            title="Distribution of (x' - x) / rms(x): share of the elements per bin",
            rows=[
                {"method": spec, "bin": i, "share": share}
                for spec, total in shares.items()
                for i, share in enumerate((total / counts[spec]).tolist())
            ],
        ),
        notes=["Measured: the geometric mean of the ratio of errors, one value per seed."],
    )


def ratio(rows: Sequence[Row], ours: str, theirs: str) -> Interval:
    """Return the ratio of two codecs' errors: geometric means over steps, then over seeds."""
    logs = []
    for run in verdicts.by_seed(rows):
        errors = {(row["method"], row["step"]): row["error"] for row in run}
        steps = dict.fromkeys(row["step"] for row in run)
        logs.append(fmean(log_ratio(errors[ours, k], errors[theirs, k]) for k in steps))
    return verdicts.geometric(logs)


def judge(rows: Sequence[Row], settings: Settings) -> Row:
    """Return the verdict: the first codec's error is at most that of the second."""
    ours, theirs = settings.method[:2]
    claim = Claim(f"error of {ours} / {theirs}", SOURCE, 1.0, above=False)
    return verdicts.row(claim, ratio(rows, ours, theirs))


def ratios_table(rows: Sequence[Row], settings: Settings) -> Table:
    """Return the ratios of the errors of all pairs. The paper claims only the first."""
    pairs: list[Row] = []
    for ours, theirs in combinations(settings.method, 2):
        one = ratio(rows, ours, theirs)
        limits = {"ratio": finite(one.mean), "low": finite(one.low), "high": finite(one.high)}
        pairs.append({"method": ours, "other": theirs, **limits})
    columns = {"method": "error of", "other": "divided by\nthat of", "ratio": "ratio", "low": "low"}
    return table("ratios", "Ratios of errors", {**columns, "high": "high"}, pairs, which=2)


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
