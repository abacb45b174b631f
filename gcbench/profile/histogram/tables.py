"""The tables of `gcbench histogram`, and its conclusions on the claims of two papers.

A claim is tested by counting the layers and steps in which it holds:

* Wen et al. 2017 (TernGrad), section 3.3: clipping at 2.5 sigma shortens a gradient by 1.0 to 1.5 %
  and turns it by 2 to 3 degrees; figure 4c: 71.32 % of the codes of AlexNet's first fully connected
  layer (fc6) are zero. Normal values give 1.13 %, 2.75 degrees and 68.2 %.
* Wang et al. 2020 (FFT sparsification): the largest bins of the whole gradient's spectrum
  reconstruct it better than its largest elements.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from gcbench.core import registry
from gcbench.core.values import finite
from gcbench.profile.histogram.reconstruction import ALL, RIVALS, gaussian_clipping
from gcbench.report.analysis import Row, Table, shown
from gcbench.report.rendering import records
from gcbench.studies import verdicts

if TYPE_CHECKING:
    from pandas import DataFrame

GRADIENT = "(gradient)"
"""Value of `method` in rows of the uncompressed gradient."""
FIGURES = ("relative_error", "cosine", "norm_ratio", "zeros")
WEIGHTS = ("convolution", "fully connected")
LEAST = 1000
"""Claims about clipping are tested on layers of at least this many elements."""
CLIP, LENGTH, ANGLE, ZEROS = 2.5, (0.010, 0.015), (2.0, 3.0), 0.7132
"""TernGrad's clipping in standard deviations; claimed shortening, degrees, zeros (fc6)."""

Rows = Mapping[str, list[Row]]


def of(rows: Rows, settings: Mapping[str, Any]) -> tuple[list[Table], list[str], list[str]]:
    """Return tables, answer and conclusions, from the rows of single steps, by table."""
    captures = settings["captures"]
    steps = sorted({one["step"] for one in captures})
    seeds = len({one["seed"] for one in captures})
    setting = (
        f"{captures[0]['task']}, {settings['workers']} workers, "
        f"{len(steps)} steps ({', '.join(map(str, steps))}), {seeds} seed{'s' * (seeds > 1)}"
    )
    claims, conclusions = _claims(rows)
    errors = _errors(rows["steps"], setting, settings["workers"])
    whole = [row for row in errors.rows if row["group"] == ALL and row["method"] != GRADIENT]
    tables = [
        errors,
        _ratios(rows["steps"]),
        _clipping(rows["clipping"]),
        _spectra(rows["spectra"]),
        claims,
        Table(name="steps", title="Errors by step", rows=rows["steps"]),
        Table(name="layers", title="Errors by layer and step", rows=rows["layers"]),
        Table(name="bins", title="Histograms", rows=rows["bins"]),
        Table(name="distributions", title="Distribution of errors", rows=rows["errors"]),
        Table(name="clipping_layers", title="Clipping by layer", rows=rows["clipping"]),
        Table(name="spectra_layers", title="FFT and top-k by layer", rows=rows["spectra"]),
        Table(
            name="brief",
            brief=True,
            title=setting,
            shown=[column for column in errors.shown if column.field in _BRIEF],
            notes=[
                "alone: one worker's payload, decoded. mean: the mean that all workers apply. "
                "Memories are off."
            ],
            rows=whole[:BRIEF],
        ),
    ]
    return tables, _answer(whole), conclusions


BRIEF = 10
"""Number of methods in the short table."""
_BRIEF = ("method", "relative_error_alone", "relative_error_averaged", "zeros_alone", "bits_up",
          "failed")  # fmt: skip


def _answer(rows: Sequence[Row]) -> list[str]:
    """Return which method distorts the mean gradient least, in a sentence."""
    field = "relative_error_averaged"
    known = [row for row in rows if isinstance(row[field], float)]
    if not known:
        return ["Every method failed; see the column failed."]

    def text(row: Row) -> str:
        bits = float(row["bits_up"] or 0)
        return (
            f"{row['method']} ({100 * float(row[field] or 0):.3g} %, {bits:.3g} bits per element)"
        )

    ordered = sorted(known, key=lambda row: float(row[field] or 0))
    return [
        f"The mean gradient is distorted least by {text(ordered[0])}, most by {text(ordered[-1])}."
    ]


def _values(rows: Sequence[Row], field: str) -> list[float]:
    return [value for row in rows if isinstance(value := row.get(field), int | float)]


def _frame(rows: Sequence[Row], names: Sequence[str], numbers: Sequence[str]) -> DataFrame:
    """Return these fields of the rows, `numbers` as floats: NaN where a row has none."""
    import pandas as pd

    frame = pd.DataFrame([*rows], columns=[*names, *numbers])
    return frame.astype(dict.fromkeys(numbers, float))


# ---- errors --------------------------------------------------------------------------------------


def _failures(alike: DataFrame) -> str | None:
    """Return how many of these steps failed, and why the first one did, as text."""
    bad = alike[~alike["good"]]
    if bad.empty:
        return None
    first = bad.iloc[0]
    return f"{len(bad)} of {len(alike)}: step {first['step']}: {first['failed']}"


def _errors(steps: Sequence[Row], setting: str, workers: int) -> Table:
    import pandas as pd

    figures = [f"{name}_{how}" for name in FIGURES for how in ("alone", "averaged")]
    bits, which = ["bits_up", "bits_down", "bits"], ["group", "method"]
    frame = _frame(steps, [*which, "step", "failed"], [*figures, *bits])
    frame["good"] = frame["failed"].isna()
    frame[[*figures, *bits]] = frame[[*figures, *bits]].where(frame["good"], axis="index")
    groups = frame.groupby(which, sort=False)
    result = groups[figures].mean()
    errors = groups["relative_error_alone"]
    result["relative_error_low"], result["relative_error_high"] = errors.min(), errors.max()
    result[bits] = groups[bits].mean()
    result["n"] = workers * groups["good"].sum()
    result["failed"] = [_failures(alike) for _, alike in groups]
    result = result.reset_index()
    result = result.sort_values("group", key=lambda group: pd.factorize(group)[0], kind="stable")
    columns: dict[str, str | tuple[str, float]] = {
        "method": "method",
        "relative_error_alone": ("error %\nalone", 100),
        "relative_error_averaged": ("error %\nmean", 100),
        "cosine_alone": "cosine\nalone",
        "cosine_averaged": "cosine\nmean",
        "norm_ratio_alone": "length\nalone",
        "norm_ratio_averaged": "length\nmean",
        "zeros_alone": ("zeros %\nalone", 100),
        "zeros_averaged": ("zeros %\nmean", 100),
        "bits_up": "bits\nup",
        "bits_down": "bits\ndown",
        "bits": "bits of\nthese",
        "n": "n",
        "failed": "failed",
    }
    return Table(
        name="errors",
        title="Decoded gradients",
        by="group",
        shown=shown(columns),
        notes=[
            f"{setting}.",
            "alone: a worker's payload, decoded, compared with its own gradient; averaged over "
            "workers and steps. mean: the mean that all workers apply, compared with the true mean "
            "of their gradients.",
            "error: ||x - x'|| / ||x||; length: ||x'|| / ||x||. Memories are off, so what error "
            "feedback would send later counts as lost. Signs and votes carry no length; only their "
            "cosine is meaningful.",
            "bits are per element: up and down are what was sent, statistics included; of these is "
            "what a payload would save without these layers. n: steps times workers.",
        ],
        rows=records(result),
    )


def _ratios(steps: Sequence[Row]) -> Table:
    """Return the error of each method divided by that of each other one, over all layers.

    A ratio is the geometric mean over the steps of a seed, then the mean over seeds with limits.
    Steps in which a method failed, or has no error, are left out.
    """
    import numpy as np

    figures = ["relative_error_alone", "relative_error_averaged"]
    frame = _frame(steps, ["group", "method", "seed", "step", "failed"], figures)
    frame = frame[
        (frame["group"] == ALL) & frame["failed"].isna() & (frame[figures] > 0).all(axis="columns")
    ]
    logs = frame.set_index(["seed", "step", "method"])[figures].apply(np.log).unstack("method")
    result: list[Row] = []
    for one, other in combinations(frame["method"].unique(), 2):
        row: Row = {"method": one, "other": other}
        for figure in figures:
            pairs = (logs[figure, one] - logs[figure, other]).dropna().groupby("seed").mean()
            ratio, how = verdicts.geometric([*pairs]), figure.removeprefix("relative_error_")
            row |= {how: finite(ratio.mean), f"{how}_low": finite(ratio.low)}
            row |= {f"{how}_high": finite(ratio.high), "n": ratio.n}
        result.append(row)
    return Table(
        name="ratios",
        title="Errors of one method divided by those of another",
        which=2,
        shown=shown(
            {
                "method": "method",
                "other": "divided by",
                "alone": "alone",
                "alone_low": "\nlow",
                "alone_high": "\nhigh",
                "averaged": "mean",
                "averaged_low": "\nlow",
                "averaged_high": "\nhigh",
                "n": "n",
            }
        ),
        notes=[
            "Errors of all layers, alone and of the mean over workers; geometric mean over steps. "
            f"n: seeds. {verdicts.LIMITS}"
        ],
        rows=result,
    )


# ---- clipping ------------------------------------------------------------------------------------


def _clipping(rows: Sequence[Row]) -> Table:
    ranged, plain = ["length_change", "angle"], ["clipped", "zeros_sent", "zeros_gradient"]
    numbers = [*ranged, *plain, "kurtosis"]
    groups = _frame(rows, ["clip", "kind"], numbers).groupby(["clip", "kind"], sort=False)
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


# ---- spectra -------------------------------------------------------------------------------------


def wins(rows: Sequence[Row]) -> tuple[int, int]:
    """Return in how many rows FFT keeps more energy than top-k, and the number of rows."""
    known = [row for row in rows if row["energy_fft"] is not None]
    won = sum(row["energy_fft"] > row["energy_topk"] for row in known)  # type: ignore[operator]
    return won, len(known)


def _spectra(rows: Sequence[Row]) -> Table:
    which = ["kept", "scales", "rival", "kind"]
    medians = ["energy_fft", "energy_topk", "neighbours", "kept_topk"]
    means = ["bits_fft", "bits_topk"]
    ordered = sorted(rows, key=lambda row: row["kind"] != ALL)
    frame = _frame(ordered, which, [*medians, *means])
    frame["setting"] = [f"{100 * kept:g} % kept of a " for kept in frame["kept"]] + frame["scales"]
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


def _claims(rows: Rows) -> tuple[Table, list[str]]:
    made = [row for claim in CLAIMS if (row := claim(rows)) is not None]
    sentences = [str(row.pop("text")) for row in made]
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
        rows=made,
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
    claim: str, source: str, published: str, normal: float | None, values: Sequence[float]
) -> Row:
    return {
        "claim": claim,
        "source": source,
        "published": published,
        "normal": normal,
        "mean": statistics.fmean(values),
        "low": min(values),
        "high": max(values),
        "n": len(values),
    }


def _range_text(row: Row) -> str:
    return f"{row['mean']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _clipped(
    rows: Rows, field: str, bounds: tuple[float, float], scale: float, what: str, unit: str
) -> Row | None:
    values = [scale * value for value in _values(_large_layers(rows["clipping"]), field)]
    if not values:
        return None
    low, high = bounds
    normal = scale * getattr(gaussian_clipping(CLIP), field)
    claim = f"{what} by clipping at {CLIP} sigma, {unit} (TernGrad, 3.3)"
    row = _claim(claim, "Wen et al. 2017, 3.3", f"{low:g} to {high:g}", normal, values)
    row["inside"] = sum(low <= value <= high for value in values)
    row["text"] = (
        f"Clipping at {CLIP} sigma: {what} {_range_text(row)} {unit} over {len(values)} layers and "
        f"steps; within the published {low:g} to {high:g} in {row['inside']} of them."
    )
    return row


def _length(rows: Rows) -> Row | None:
    bounds = (100 * LENGTH[0], 100 * LENGTH[1])
    return _clipped(rows, "length_change", bounds, -100, "length lost", "%")


def _angle(rows: Rows) -> Row | None:
    return _clipped(rows, "angle", ANGLE, 1, "direction changed", "degrees")


def _zeros(rows: Rows) -> Row | None:
    large = [row for row in _large_layers(rows["clipping"]) if row["kind"] == "fully connected"]
    values = [100 * value for value in _values(large, "zeros_sent")]
    if not values:
        return None
    before = 100 * statistics.fmean(_values(large, "zeros_gradient"))
    normal = 100 * gaussian_clipping(CLIP).zeros
    claim = "zeros in codes of fully connected layers, % (TernGrad, fig. 4c: AlexNet's fc6)"
    published = f"{100 * ZEROS:.2f}"
    row = _claim(claim, "Wen et al. 2017, fig. 4c", published, normal, values)
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
    kept = float(whole[0]["kept"] or 0)
    alike = [row for row in whole if row["kept"] == kept and row["rival"] == RIVALS[0]]
    known = [row for row in alike if row["energy_fft"] is not None]
    if not known:
        return None
    values = [100 * (r["energy_fft"] - r["energy_topk"]) for r in known]  # type: ignore[operator]
    lost = [
        registry.compressor("fft", theta=1 - kept).claims.gaussian_error,
        registry.compressor("topk", ratio=kept).claims.gaussian_error,
    ]
    normal = None if None in lost else 100 * (lost[1] - lost[0])  # type: ignore[operator]
    claim = f"energy kept by FFT beyond top-k's, {100 * kept:g} % kept, points (Wang et al.)"
    row = _claim(claim, "Wang et al. 2020", "above 0", normal, values)
    won, n = wins(alike)
    bits, m = wins([r for r in whole if r["kept"] == kept and r["rival"] == RIVALS[1]])
    row["inside"] = won
    ours, theirs = (
        statistics.median(_values(known, field)) for field in ("energy_fft", "energy_topk")
    )
    parts = [r for r in rows["spectra"] if r["scales"] == "model" and r["kind"] != ALL]
    parts = [r for r in parts if r["kept"] == kept and r["rival"] == RIVALS[0]]
    energies = _values(parts, "energy_fft")
    row["text"] = (
        f"With {100 * kept:g} % kept over the whole model, FFT keeps {100 * ours:.1f} % of the "
        f"energy and top-k {100 * theirs:.1f} % (medians): FFT wins in {won} of {n} steps, and in "
        f"{bits} of {m} against top-k of equal bits. Its error is larger than the gradient in "
        f"{sum(energy < 0 for energy in energies)} of {len(energies)} layers and steps."
    )
    return row


CLAIMS: tuple[Callable[[Rows], Row | None], ...] = (_length, _angle, _zeros, _better)


def _by_kind(rows: Sequence[Row]) -> str | None:
    """Return a sentence on where FFT beats top-k tensor by tensor, for each kind of layer."""
    tensors = [row for row in rows if row["scales"] == "tensor" and row["kind"] != ALL]
    if not tensors:
        return None
    kept = tensors[0]["kept"]
    parts = []
    tensors = [row for row in tensors if row["kept"] == kept]
    for kind in dict.fromkeys(row["kind"] for row in tensors):
        alike = [row for row in tensors if row["kind"] == kind]
        counts = [wins([row for row in alike if row["rival"] == rival]) for rival in RIVALS]
        (share, n), (bits, _) = counts
        parts.append(f"{kind} {share} and {bits} of {n}")
    return (
        f"Tensor by tensor, {100 * float(kept or 0):g} % kept, FFT beats top-k at equal share and "
        f"at equal bits for these layers and steps: {'; '.join(parts)}."
    )
