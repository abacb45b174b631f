"""What clipping and FFT sparsification do to real gradients, compared with two papers' claims.

A claim is tested by counting the layers and steps in which it holds:

* Wen et al., NeurIPS 2017 (TernGrad), section 3.3: clipping at 2.5 sigma shortens a gradient by 1.0
  to 1.5 % and turns it by 2 to 3 degrees; figure 4c: 71.32 % of the codes of AlexNet's first fully
  connected layer (fc6) are zero. Normal values give 1.13 %, 2.75 degrees and 68.2 %.
* Wang et al., HPDC 2020 (FFT sparsification): the largest bins of the whole gradient's spectrum
  reconstruct it better than its largest elements.

The gradients are those that `gcbench histogram` captures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from _paper import Distinct, Trained, main, measured, plot, title
from pydantic import Field
from torch import Tensor

from gcbench.core import codec, purposes, registry
from gcbench.core.compressor import Compressor, Context, Key, Segments
from gcbench.core.progress import Observer
from gcbench.core.values import finite
from gcbench.profile.histogram.picture import empty
from gcbench.profile.histogram.reconstruction import ALL, Gradients, Sums, averages
from gcbench.profile.histogram.tables import frame_of
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Table, shown
from gcbench.report.rendering import records
from gcbench.stats.confidence import interval
from gcbench.training.captures import Layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KIND = "gradient-claims"
WEIGHTS = ("convolution", "fully connected")
LEAST = 1000
"""Claims about clipping are tested on layers of at least this many elements."""
CLIP, LENGTH, ANGLE, ZEROS = 2.5, (0.010, 0.015), (2.0, 3.0), 0.7132
"""TernGrad's clipping in standard deviations; claimed shortening, degrees, zeros (fc6)."""
Rows = Mapping[str, list[Row]]


class Settings(Trained):
    """The settings that decide the result."""

    clip: Annotated[list[Annotated[float, Field(gt=0, allow_inf_nan=False)]], Distinct] = Field(
        default=[CLIP], description="TernGrad's clipping factors, in standard deviations."
    )
    shares: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Distinct] = Field(
        default=[0.15, 0.01], description="Shares of elements at which FFT and top-k are compared."
    )


def run(
    settings: Settings,
    command: str,
    observer: Observer,
    ledger: Ledger,
    data_dir: Path | None = None,
) -> Analysis:
    """Measure clipping and spectra on every captured gradient.

    Raises:
        UsageError, GcbenchError: see `_paper.measured`.
    """

    def each(gradients: Gradients) -> list[Row]:
        cut = [row for c in settings.clip for row in clipping(gradients, c)]
        energies = [row for share in settings.shares for row in spectra(gradients, share)]
        return [{"of": "clipping", **r} for r in cut] + [{"of": "spectra", **r} for r in energies]

    rows: dict[str, list[Row]] = {"clipping": [], "spectra": []}
    for row in measured(each, settings, observer, ledger, data_dir):
        rows[str(row.pop("of"))].append(row)
    claims, conclusions = judge(rows)
    tables = [
        claims,
        clipping_table(rows["clipping"]),
        spectra_table(rows["spectra"]),
        Table(name="clipping_layers", title="Clipping by layer", rows=rows["clipping"]),
        Table(name="spectra_layers", title="FFT and top-k by layer", rows=rows["spectra"]),
    ]
    return Analysis.of(KIND, settings, command, conclusions=conclusions, tables=tables)


def _coded(
    method: Compressor, gradients: Gradients
) -> Iterator[tuple[Tensor, Context, int, Tensor]]:
    """Yield each worker's gradient, its context, the bytes of its payload, and its decoding.

    Gradient and decoding: float32, (n,). All workers share one statistic, as in training; in
    `_paper.coded` each worker has its own.
    """
    segments = gradients.segments(method)
    key = Key(gradients.seed, gradients.step, 0, 0, purposes.ENCODE)
    shared, _ = codec.agree(method, gradients.buckets, Context(segments, key=key))
    context = Context(segments, shared)
    for rank, bucket in enumerate(gradients.buckets):
        payload = codec.encode(method, bucket, context._replace(key=key._replace(rank=rank)))
        yield bucket, context, payload.nbytes, codec.decode(method, payload, context)


# ---- clipping, and the zeros of ternary codes ----------------------------------------------------


class Clipping(NamedTuple):
    """The effect of clipping a vector g at c standard deviations to f(g)."""

    length_change: float
    """||f(g)|| / ||g|| - 1."""
    angle: float
    """Between g and f(g), in degrees."""
    clipped: float
    """Share of the elements that are clipped."""
    zeros: float
    """Expected share of zeros in ternary codes of the clipped values at the scale c sigma."""


def gaussian_clipping(c: float) -> Clipping:
    """Return the effect of clipping at c sigma on a long vector of independent normal values.

    With P = 1 - 2 Q(c): ||f||^2 / ||g||^2 = P - 2 c phi(c) + 2 c^2 Q(c), g . f / ||g||^2 = P, and
    E|f| = 2 (phi(0) - phi(c)) + 2 c Q(c).
    """
    normal = NormalDist()
    tail = normal.cdf(-c)
    inside = 1 - 2 * tail
    length = math.sqrt(inside - 2 * c * normal.pdf(c) + 2 * c * c * tail)
    size = 2 * (normal.pdf(0) - normal.pdf(c)) + 2 * c * tail
    angle = math.degrees(math.acos(min(1.0, inside / length)))
    return Clipping(length - 1, angle, 2 * tail, 1 - size / c)


def clipping(gradients: Gradients, c: float) -> list[Row]:
    """Return, for each layer, the effect of TernGrad's clipping at `c`, and its codes' zeros."""
    method = registry.compressor("terngrad", clip=c)
    per_worker = []
    for bucket, context, _, coded in _coded(method, gradients):
        target = method.claims.target(bucket, context)
        cut = Sums.of(gradients, bucket, target)
        sent = gradients.sums((coded == 0).double())
        before = gradients.sums((bucket == 0).double())
        clipped = gradients.sums((bucket != target).double())
        per_worker.append((cut, sent, before, clipped))
    rows: list[Row] = []
    for i, layer in enumerate(gradients.layers):
        which, n = torch.tensor([i]), layer.numel
        figures = []
        for cut, sent, before, clipped in per_worker:
            change = cut.over(which)
            ratio, cosine = change["norm_ratio"], change["cosine"]
            figures.append(
                {
                    "length_change": None if ratio is None else ratio - 1,
                    "angle": None if cosine is None else math.degrees(math.acos(cosine)),
                    "clipped": float(clipped[i]) / n if n else None,
                    "zeros_sent": float(sent[i]) / n if n else None,
                    "zeros_gradient": float(before[i]) / n if n else None,
                }
            )
        rows.append({**_named(layer), "clip": c, **averages(figures), **_shape(gradients, i)})
    return rows


def _named(layer: Layer) -> Row:
    return {"layer": layer.name, "kind": layer.kind, "elements": layer.numel}


def _shape(gradients: Gradients, layer: int) -> Row:
    """Return statistics of a layer's gradients, means over workers.

    `peak`: largest magnitude / root mean square; `kurtosis` (3 for normal values); `neighbours`:
    correlation, about zero, of neighbours in the order of the bucket.
    """
    where, per_worker = gradients.place(layer), []
    for bucket in gradients.buckets:
        x = bucket[where].double()
        square = float(x.square().sum())
        n = len(x)
        nonzero = square > 0
        per_worker.append(
            {
                "rms": math.sqrt(square / n) if n else None,
                "peak": float(x.abs().max()) / math.sqrt(square / n) if nonzero else None,
                "kurtosis": float(x.pow(4).sum()) * n / square**2 if nonzero else None,
                "neighbours": float((x[:-1] * x[1:]).sum()) / square if nonzero else None,
            }
        )
    return dict(averages(per_worker))


# ---- spectra against top-k -----------------------------------------------------------------------

GRANULARITIES = ("tensor", "model")
RIVALS = ("equal share", "equal bits")


def rivals(
    share: float, granularity: str, layers: Sequence[Layer]
) -> dict[str, tuple[Compressor, float]]:
    """Return FFT sparsification and the two forms of top-k it is compared with; shares kept.

    FFT keeps a share of the bins. Top-k codes values in 10 bits too; it keeps an equal share of
    elements, or the largest share whose payload is not larger.
    """
    fft = registry.compressor("fft", theta=1 - share, granularity=granularity)

    def topk(ratio: float) -> Compressor:
        return registry.compressor("topk", ratio=ratio, values="range", granularity=granularity)

    segments = Segments.of([layer.shape for layer in layers], granularity)
    budget = codec.bits(fft, segments) or 0
    ratio = _largest(lambda share: (codec.bits(topk(share), segments) or 0) <= budget, 1.0)
    return {"fft": (fft, share), RIVALS[0]: (topk(share), share), RIVALS[1]: (topk(ratio), ratio)}


def _largest(holds: Callable[[float], bool], high: float, digits: int = 20) -> float:
    """Return the largest number in [2^-digits, high] for which `holds`, by bisection."""
    if holds(high):
        return high
    low = 2.0**-digits
    for _ in range(digits):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def spectra(gradients: Gradients, share: float) -> list[Row]:
    """Return the energy that FFT and top-k keep, per layer and in all, mean over workers."""
    rows: list[Row] = []
    everything = torch.arange(len(gradients.layers))
    names: list[Row] = [*map(_named, gradients.layers)]
    names.append({"layer": ALL, "kind": ALL, "elements": int(gradients.lengths.sum())})
    for i, named in enumerate(names[:-1]):
        named["neighbours"] = _shape(gradients, i)["neighbours"]
    for granularity in GRANULARITIES:
        methods = rivals(share, granularity, gradients.layers)
        energy: dict[str, list[list[float | None]]] = {name: [] for name in methods}
        bits: dict[str, float] = {}
        for name, (method, _) in methods.items():
            for bucket, context, nbytes, coded in _coded(method, gradients):
                bits[name] = 8 * nbytes / context.segments.numel
                decoded = Sums.of(gradients, bucket, coded)
                lost = [decoded.over(which)["relative_error"] for which in (*everything[:, None],)]
                lost.append(decoded.over(everything)["relative_error"])
                energy[name].append([None if e is None else 1 - e * e for e in lost])
        for rival in RIVALS:
            for i, named in enumerate(names):
                both = zip(energy["fft"], energy[rival], strict=True)
                pairs = [{"energy_fft": a[i], "energy_topk": b[i]} for a, b in both]
                rows.append(
                    {
                        **named,
                        "kept": share,
                        "scales": granularity,
                        "rival": rival,
                        **averages(pairs),
                        "bits_fft": bits["fft"],
                        "bits_topk": bits[rival],
                        "kept_topk": methods[rival][1],
                    }
                )
    return rows


def _values(rows: Sequence[Row], field: str) -> list[float]:
    return [value for row in rows if isinstance(value := row.get(field), int | float)]


# ---- tables --------------------------------------------------------------------------------------


def clipping_table(rows: Sequence[Row]) -> Table:
    """Return the effect of clipping by kind of layer, beside that on normal values."""
    ranged, plain = ["length_change", "angle"], ["clipped", "zeros_sent", "zeros_gradient"]
    numbers = [*ranged, *plain, "kurtosis"]
    groups = frame_of(rows, ["clip", "kind"], numbers).groupby(["clip", "kind"], sort=False)
    summary = groups.size().to_frame("n")
    for field in ranged:
        summary[field] = groups[field].mean()
        summary[f"{field}_low"], summary[f"{field}_high"] = groups[field].min(), groups[field].max()
    summary[numbers[2:]] = groups[numbers[2:]].mean()
    layers: list[Row] = records(summary.reset_index())
    result: list[Row] = []
    for clip in dict.fromkeys(row["clip"] for row in layers):
        assert isinstance(clip, float)
        normal = gaussian_clipping(clip)
        result.append(
            {
                "clip": clip,
                "kind": "normal values",
                "length_change": normal.length_change,
                "angle": normal.angle,
                "clipped": normal.clipped,
                "zeros_sent": normal.zeros,
                "kurtosis": 3.0,
            }
        )
        result += [row for row in layers if row["clip"] == clip]
    return Table(
        name="clipping",
        title="Clipping a tensor at standard deviations (TernGrad), and its codes",
        by="clip",
        shown=shown(
            {
                "kind": "layers",
                "length_change": ("length %\nmean", 100),
                "length_change_low": ("\nlowest", 100),
                "length_change_high": ("\nhighest", 100),
                "angle": "degrees\nmean",
                "angle_low": "\nlowest",
                "angle_high": "\nhighest",
                "clipped": ("clipped\n%", 100),
                "zeros_gradient": ("zeros %\nbefore", 100),
                "zeros_sent": ("\nin codes", 100),
                "kurtosis": "kur-\ntosis",
                "n": "n",
            }
        ),
        notes=[
            "The row of normal values is computed, not sampled. n: layers times steps; each value "
            "is the mean over workers. A tensor of equal values has a standard deviation of 0 and "
            "is clipped to zeros."
        ],
        rows=result,
    )


def wins(rows: Sequence[Row]) -> tuple[int, int]:
    """Return in how many rows FFT keeps more energy than top-k, and the number of rows."""
    measured_rows = [row for row in rows if row["energy_fft"] is not None]
    won = sum(row["energy_fft"] > row["energy_topk"] for row in measured_rows)  # type: ignore[operator]
    return won, len(measured_rows)


def spectra_table(rows: Sequence[Row]) -> Table:
    """Return the energies that FFT and top-k keep, by kind of layer."""
    which = ["kept", "scales", "rival", "kind"]
    medians = ["energy_fft", "energy_topk", "neighbours", "kept_topk"]
    means = ["bits_fft", "bits_topk"]
    ordered = sorted(rows, key=lambda row: row["kind"] != ALL)
    frame = frame_of(ordered, which, [*medians, *means])
    frame["setting"] = [f"{100 * share:g} % kept of a " for share in frame["kept"]] + frame[
        "scales"
    ]
    frame["won"] = frame["energy_fft"] > frame["energy_topk"]
    groups = frame.groupby([*which, "setting"], sort=False)
    summary = groups[medians].median()
    summary[means] = groups[means].mean()
    summary["won"], summary["n"] = groups["won"].sum(), groups["energy_fft"].count()
    summary["share"] = summary["won"] / summary["n"]
    result: list[Row] = records(summary.reset_index())
    order = [row["kind"] for row in result]
    result.sort(
        key=lambda r: (
            -float(r["kept"] or 0),
            r["scales"] != "tensor",
            RIVALS.index(str(r["rival"])),
            order.index(r["kind"]),
        )
    )
    return Table(
        name="spectra",
        title="FFT against top-k: energy kept, 1 - ||x - x'||^2 / ||x||^2",
        by="setting",
        which=2,
        shown=shown(
            {
                "rival": "top-k of",
                "kind": "layers",
                "energy_fft": ("FFT %", 100),
                "energy_topk": ("top-k %", 100),
                "won": "FFT\nwins",
                "n": "n",
                "neighbours": "neighbours'\ncorrelation",
                "kept_topk": ("top-k\nkeeps %", 100),
                "bits_fft": "bits\nFFT",
                "bits_topk": "bits\ntop-k",
            }
        ),
        notes=[
            "Both methods code values in 10 bits and take the largest from one tensor or from the "
            "whole model, as the title states. Energies: medians over layers and steps of the mean "
            "over workers; negative if the error exceeds the gradient.",
            "n: layers times steps (for all layers: steps). Layers with a zero gradient are not "
            "counted.",
        ],
        rows=result,
    )


# ---- claims --------------------------------------------------------------------------------------


def judge(rows: Rows) -> tuple[Table, list[str]]:
    """Return the table of the claims, and a sentence for each."""
    verdict_rows = [row for claim in CLAIMS if (row := claim(rows)) is not None]
    sentences = [str(row.pop("text")) for row in verdict_rows]
    if sentence := _by_kind(rows["spectra"]):
        sentences.append(sentence)
    table = Table(
        name="claims",
        title="The papers' claims about such gradients",
        shown=shown(
            {
                "claim": "claim",
                "published": "pub-\nlished",
                "normal": "normal\nvalues",
                "mean": "here\nmean",
                "low": "\nlowest",
                "high": "\nhighest",
                "inside": "holds\nin",
                "n": "\nof",
            }
        ),
        notes=[
            f"One value per layer and step, for weights with at least {LEAST:,} elements; for FFT "
            "one per step, because it takes one spectrum of the whole model. normal values: the "
            "same measurement for a normal distribution."
        ],
        rows=verdict_rows,
    )
    return table, sentences


def _large_layers(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of clipping at TernGrad's 2.5 sigma, of large enough weights."""
    return [
        row
        for row in rows
        if row["clip"] == CLIP and row["kind"] in WEIGHTS and int(row["elements"] or 0) >= LEAST
    ]


def _claim(
    claim: str,
    source: str,
    published: str,
    normal: float | None,
    rows: Sequence[Row],
    values: Sequence[float],
) -> Row:
    """Return the row of a claim; `values`: one for each of `rows`, which have seeds.

    `seed_low` and `seed_high` are the 95 % limits of the mean over `seeds` independent trainings,
    infinite for one; `low` and `high` are the extremes of all values.
    """
    runs: dict[object, list[float]] = {}
    for row, value in zip(rows, values, strict=True):
        runs.setdefault(row["seed"], []).append(value)
    over = interval([statistics.fmean(run) for run in runs.values()], "seeds")
    return {
        "claim": claim,
        "source": source,
        "published": published,
        "normal": normal,
        "mean": statistics.fmean(values),
        "low": min(values),
        "high": max(values),
        "n": len(values),
        "seed_low": finite(over.low),
        "seed_high": finite(over.high),
        "seeds": over.n,
    }


def _range_text(row: Row) -> str:
    return f"{row['mean']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _clipped(
    field: str, bounds: tuple[float, float], scale: float, what: str, unit: str, rows: Rows
) -> Row | None:
    large = [row for row in _large_layers(rows["clipping"]) if row.get(field) is not None]
    values = [scale * value for value in _values(large, field)]
    if not values:
        return None
    low, high = bounds
    normal = scale * getattr(gaussian_clipping(CLIP), field)
    claim = f"{what} by clipping at {CLIP} sigma, {unit} (TernGrad, 3.3)"
    row = _claim(claim, "Wen et al. 2017, 3.3", f"{low:g} to {high:g}", normal, large, values)
    row["inside"] = sum(low <= value <= high for value in values)
    row["text"] = (
        f"Clipping at {CLIP} sigma: {what} {_range_text(row)} {unit} over {len(values)} layers and "
        f"steps; within the published {low:g} to {high:g} in {row['inside']} of them."
    )
    return row


def _zeros(rows: Rows) -> Row | None:
    large = [
        row
        for row in _large_layers(rows["clipping"])
        if row["kind"] == "fully connected" and row.get("zeros_sent") is not None
    ]
    values = [100 * value for value in _values(large, "zeros_sent")]
    if not values:
        return None
    before = 100 * statistics.fmean(_values(large, "zeros_gradient"))
    normal = 100 * gaussian_clipping(CLIP).zeros
    claim = "zeros in codes of fully connected layers, % (TernGrad, fig. 4c: AlexNet's fc6)"
    published = f"{100 * ZEROS:.2f}"
    row = _claim(claim, "Wen et al. 2017, fig. 4c", published, normal, large, values)
    row["inside"] = None
    row["text"] = (
        f"TernGrad's codes of fully connected layers: {_range_text(row)} % zeros over "
        f"{len(values)} layers and steps, {published} % in the paper, {normal:.1f} % for normal "
        f"values; {before:.1f} % of the gradients are zero before."
    )
    return row


def _better(rows: Rows) -> Row | None:
    whole = [row for row in rows["spectra"] if row["kind"] == ALL and row["scales"] == "model"]
    if not whole:
        return None
    share = float(whole[0]["kept"] or 0)
    alike = [row for row in whole if row["kept"] == share and row["rival"] == RIVALS[0]]
    measured_rows = [row for row in alike if row["energy_fft"] is not None]
    if not measured_rows:
        return None
    values = [100 * (r["energy_fft"] - r["energy_topk"]) for r in measured_rows]  # type: ignore[operator]
    lost = [
        registry.compressor("fft", theta=1 - share).claims.gaussian_error,
        registry.compressor("topk", ratio=share).claims.gaussian_error,
    ]
    normal = None if None in lost else 100 * (lost[1] - lost[0])  # type: ignore[operator]
    claim = f"energy kept by FFT beyond top-k's, {100 * share:g} % kept, points (Wang et al.)"
    row = _claim(claim, "Wang et al. 2020", "above 0", normal, measured_rows, values)
    won, n = wins(alike)
    bits, m = wins([r for r in whole if r["kept"] == share and r["rival"] == RIVALS[1]])
    row["inside"] = won
    ours, theirs = (
        statistics.median(_values(measured_rows, field)) for field in ("energy_fft", "energy_topk")
    )
    parts = [r for r in rows["spectra"] if r["scales"] == "model" and r["kind"] != ALL]
    parts = [r for r in parts if r["kept"] == share and r["rival"] == RIVALS[0]]
    energies = _values(parts, "energy_fft")
    row["text"] = (
        f"With {100 * share:g} % kept over the whole model, FFT keeps {100 * ours:.1f} % of the "
        f"energy and top-k {100 * theirs:.1f} % (medians): FFT wins in {won} of {n} steps, and in "
        f"{bits} of {m} against top-k of equal bits. Its error is larger than the gradient in "
        f"{sum(energy < 0 for energy in energies)} of {len(energies)} layers and steps."
    )
    return row


CLAIMS: tuple[Callable[[Rows], Row | None], ...] = (
    partial(
        _clipped, "length_change", (100 * LENGTH[0], 100 * LENGTH[1]), -100, "length lost", "%"
    ),
    partial(_clipped, "angle", ANGLE, 1, "direction changed", "degrees"),
    _zeros,
    _better,
)


def _by_kind(rows: Sequence[Row]) -> str | None:
    """Return a sentence on where FFT beats top-k tensor by tensor, for each kind of layer."""
    tensors = [row for row in rows if row["scales"] == "tensor" and row["kind"] != ALL]
    if not tensors:
        return None
    share = tensors[0]["kept"]
    parts = []
    tensors = [row for row in tensors if row["kept"] == share]
    for kind in dict.fromkeys(row["kind"] for row in tensors):
        alike = [row for row in tensors if row["kind"] == kind]
        counts = [wins([row for row in alike if row["rival"] == rival]) for rival in RIVALS]
        (equal_share, n), (equal_bits, _) = counts
        parts.append(f"{kind} {equal_share} and {equal_bits} of {n}")
    return (
        f"Tensor by tensor, {100 * float(share or 0):g} % kept, FFT beats top-k at equal share and "
        f"at equal bits for these layers and steps: {'; '.join(parts)}."
    )


# ---- picture -------------------------------------------------------------------------------------


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the energy that FFT and top-k keep per layer, and the effect of clipping per layer."""
    with plot(path, 11, 5.6, f"The papers' claims: {title(analysis)}", panels=3) as axes:
        _draw(axes, analysis)


def _draw(grid: Sequence[Axes], analysis: Analysis) -> None:
    spectra = analysis.table("spectra_layers").rows
    kinds = list(dict.fromkeys(str(row["kind"]) for row in spectra if row["kind"] != ALL))
    looks = figures.styles(kinds)
    share = spectra[0]["kept"] if spectra else None
    for axes, rival in zip(grid, RIVALS, strict=False):
        rows = [
            row
            for row in spectra
            if (row["kept"], row["scales"], row["rival"]) == (share, "tensor", rival)
            and row["kind"] != ALL
            and row["energy_fft"] is not None
        ]
        for kind in kinds:
            mine = [row for row in rows if row["kind"] == kind]
            xs = [100 * float(row["energy_topk"] or 0) for row in mine]
            ys = [100 * float(row["energy_fft"] or 0) for row in mine]
            _dots(axes, xs, ys, kind, looks)
        axes.plot([0, 100], [0, 100], color="0.4", lw=1)
        axes.set_xlim(0, 102)
        axes.set_ylim(0, 102)
        won = sum(float(r["energy_fft"] or 0) > float(r["energy_topk"] or 0) for r in rows)
        axes.text(3, 101, "FFT keeps more", va="top", color="0.3", fontsize="small")
        axes.set_xlabel("energy that top-k keeps (%)")
        axes.set_ylabel("energy that FFT keeps (%)")
        if rows:
            heading = f"{100 * float(share or 0):g} % kept, {rival}:\nFFT in {won} of {len(rows)}"
        else:
            heading = f"FFT against top-k,\n{rival}"
            empty(axes, "not compared:\nno tensor for both")
        axes.set_title(heading, loc="left", fontsize="medium")
    axes = grid[-1]
    rows = [row for row in analysis.table("clipping_layers").rows if row["clip"] == CLIP]
    for kind in kinds:
        mine = [
            row
            for row in rows
            if row["kind"] == kind and None not in (row["length_change"], row["angle"])
        ]
        xs = [-100 * float(row["length_change"] or 0) for row in mine]
        _dots(axes, xs, [float(row["angle"] or 0) for row in mine], kind, looks)
    if not rows:
        empty(axes, "no layer was clipped here")
    normal = gaussian_clipping(CLIP)
    axes.plot(
        -100 * normal.length_change,
        normal.angle,
        ls="",
        marker="P",
        color="black",
        mec="white",
        ms=11,
        label="normal values",
        zorder=6,
    )
    axes.fill_between(
        [100 * bound for bound in LENGTH],
        [ANGLE[0]] * 2,
        [ANGLE[1]] * 2,
        facecolor="none",
        edgecolor="black",
        lw=2,
        zorder=5,
        label="the paper's range",
    )
    axes.set_xlabel("length lost (%)")
    axes.set_ylabel("angle (degrees)")
    axes.set_title(f"Clipping\nat {CLIP} sigma", loc="left", fontsize="medium")


def _dots(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], kind: str, looks: dict[str, Any]
) -> None:
    style = {"color": looks[kind]["color"], "marker": looks[kind]["marker"]}
    axes.plot(xs, ys, ls="", ms=6, mec="white", mew=0.5, alpha=0.8, label=kind, **style)


if __name__ == "__main__":
    main()
