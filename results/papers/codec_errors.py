"""Which codec at how many bits: the error of each on normal, Laplace and real gradients.

For a tensor x and its decoding x', the error is ||x - x'||^2 / ||x||^2. Real gradients are those of
each worker at the captured steps, normal and Laplace ones 2^18 independent values. If N workers
send the same normal tensor, the error of the decoded mean shows whether their errors average out:
independent unbiased errors give 1 / N of one worker's, equal errors all of it.
Memories are left out: this is one encoding, not training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
from _paper import Trained, coded, main, measured, number, plot, table, title, values
from pydantic import Field
from torch import Tensor

from gcbench.core import codec
from gcbench.core.compressor import Compressor, Context, Key, MultiRoundCompressor, Segments
from gcbench.core.errors import UsageError
from gcbench.core.progress import Observer
from gcbench.profile.histogram.reconstruction import Gradients
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row
from gcbench.training import methods

KIND = "codec-errors"
N = 1 << 18
WORKERS = (4, 16)


class Settings(Trained):
    """The settings that decide the result."""

    method: list[str] = Field(
        default=[
            *("bf16", "lossless", "natural", "mxfp8", "fp8", "int8", "u8bit", "eden:bits=5"),
            *("nvfp4", "mxfp4", "hadamard4", "qsgd", "eden", "eden:bits=3", "qsgd:levels=3", "fft"),
            *("eden:bits=2", "terngrad", "qsgd:levels=1", "topk:ratio=0.137:values=range"),
            *("onebit", "efsignsgd", "eden:bits=1", "eden:bits=1:scale=least", "topk"),
        ],
        min_length=1,
        description="Codecs, e.g. eden:bits=2.",
    )

    def chosen(self) -> dict[str, Compressor]:
        """Return the methods by their specs.

        Raises:
            UsageError: see `methods.all_of`, or a method in rounds of all-reduce.
        """
        chosen = methods.all_of(",".join(self.method))
        for spec, method in chosen.items():
            if isinstance(method, MultiRoundCompressor):
                raise UsageError(f"--method {spec}: a method in rounds has no decoding of its own")
        return chosen


def error(decoded: Tensor, x: Tensor) -> float:
    """Return ||x - x'||^2 / ||x||^2 in float64; 0 for x = 0."""
    energy = float(x.double().square().sum())
    return float((decoded.double() - x.double()).square().sum()) / energy if energy else 0.0


def aggregated(method: Compressor, xs: Sequence[Tensor], segments: Segments, key: Key) -> Tensor:
    """Return the decoded mean of several workers, each of which sends one payload."""
    ctx = Context(segments, key=key, workers=len(xs))
    shared, prepared = codec.agree(method, xs, ctx)
    payloads = []
    for rank, (x, ready) in enumerate(zip(xs, prepared, strict=True)):
        context = ctx._replace(shared=shared, prepared=ready, key=key._replace(rank=rank))
        payloads.append(codec.encode(method, x, context))
    return codec.mean(method, payloads, ctx._replace(shared=shared))


def synthetic(method: Compressor) -> Row:
    """Return the errors on normal and Laplace values, and of the mean of equal normal tensors."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(N, generator=generator)
    uniform = torch.rand(N, generator=generator).clamp_(1e-7, 1 - 1e-7) - 0.5
    laplace = uniform.sign() * torch.log1p(-2 * uniform.abs())
    segments, key = Segments.of([(N,)], method.granularity), Key(0, 0, 0)
    row: Row = {
        "normal": error(aggregated(method, [normal], segments, key), normal),
        "laplace": error(aggregated(method, [laplace], segments, key), laplace),
    }
    for workers in WORKERS:
        mean = aggregated(method, [normal] * workers, segments, key)
        row[f"mean_{workers}"] = error(mean, normal)
    return row


def real(method: Compressor, gradients: Gradients) -> Row:
    """Return the mean error and bits per element over the workers at one step."""
    errors, sizes = [], []
    for x, decoded, nbytes in coded(method, gradients):
        errors.append(error(decoded, x))
        sizes.append(8 * nbytes / x.numel())
    return {"error": fmean(errors), "bits": fmean(sizes)}


def run(
    settings: Settings,
    command: str,
    observer: Observer,
    ledger: Ledger,
    data_dir: Path | None = None,
) -> Analysis:
    """Measure every codec on the captured gradients and on synthetic ones.

    Raises:
        UsageError, GcbenchError: see `Settings.chosen` and `_paper.measured`.
    """
    chosen = settings.chosen()

    def each(gradients: Gradients) -> Iterator[Row]:
        for spec, method in chosen.items():
            yield {"method": spec, **real(method, gradients)}

    steps = measured(each, settings, observer, ledger, data_dir)
    rows: list[Row] = []
    for spec, method in chosen.items():
        of_method = [row for row in steps if row["method"] == spec]
        row: Row = {"method": spec, "bits": fmean(values(of_method, "bits"))}
        row |= {"real": fmean(values(of_method, "error")), **synthetic(method)}
        row["unbiased"] = method.claims.unbiased
        rows.append(row)
    rows.sort(key=lambda row: (-number(row["bits"]), number(row["real"])))
    columns = {
        "method": "codec",
        "bits": "bits per\nelement",
        "real": "error,\nreal",
        "normal": "error,\nnormal",
        "laplace": "error,\nLaplace",
        "mean_4": "mean of\n4",
        "mean_16": "mean of\n16",
        "unbiased": "unbiased",
    }
    notes = [f"real: gradients of {settings.where()}; mean of N: of equal normal tensors."]
    heading = "Errors of codecs, relative to the energy of what they encode"
    errors = table("errors", heading, columns, rows, notes=notes)
    return Analysis.of(KIND, settings, command, conclusions=[conclusion(rows)], tables=[errors])


def conclusion(rows: Sequence[Row]) -> str:
    """Return the codecs that no other beats in both bits and error on real gradients."""
    front: list[str] = []
    for row in rows:
        bits, lost = number(row["bits"]), number(row["real"])
        better = (
            number(o["bits"]) <= bits and number(o["real"]) <= lost and o is not row for o in rows
        )
        if not any(better):
            front.append(f"{row['method']} ({bits:.2f})")
    return "Least error on real gradients at its bits or fewer: " + ", ".join(front) + "."


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the error on real gradients against bits."""
    rows = analysis.table("errors").rows
    heading = f"Error against bits, {title(analysis)}"
    with plot(path, 7.5, 5, heading) as (axes,):
        marks = []
        for row in rows:
            bits, lost = number(row["bits"]), number(row["real"])
            colour = "C0" if row["unbiased"] else "C1"
            axes.plot([bits], [lost], "o", color=colour, ms=5)
            marks.append(figures.Mark(bits, lost, 0.0, str(row["method"]), colour))
        axes.plot([], [], "o", color="C0", label="unbiased")
        axes.plot([], [], "o", color="C1", label="biased")
        axes.set(xscale="log", yscale="log", xlabel="bits per element, measured")
        axes.set_ylabel("||x - x'||^2 / ||x||^2")
        axes.figure.canvas.draw()
        figures.write_labels(axes, marks)


if __name__ == "__main__":
    main()
