"""The tables of `gcbench histogram`, and its conclusions on two papers' claims.

The claims are tested by counting the layers and steps in which they hold:

* Wen et al. 2017 (TernGrad), section 3.3: clipping at 2.5 sigma changes a gradient's length by 1.0
  to 1.5 % and its direction by 2 to 3 degrees; figure 4c: 71.32 % of the codes of AlexNet's first
  fully connected layer (fc6) are zero. Of normal values it would be 1.13 %, 2.75 degrees, 68.2 %.
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
from gcbench.report.analysis import Row, Shown, Table
from gcbench.report.rendering import records
from gcbench.studies import verdicts
from gcbench.studies.histogram.reconstruction import ALL, RIVALS, gaussian_clipping

if TYPE_CHECKING:
    from pandas import DataFrame

GRADIENT = "(gradient)"
"""The entry of the column `method` in rows of the uncompressed gradient."""
FIGURES = ("relative_error", "cosine", "norm_ratio", "zeros")
WEIGHTS = ("convolution", "fully connected")
LEAST = 1000
"""Claims about clipping are tested on layers of at least so many elements."""
CLIP, LENGTH, ANGLE, ZEROS = 2.5, (0.010, 0.015), (2.0, 3.0), 0.7132
"""TernGrad's clipping in standard deviations, and its claims: shortening, degrees, zeros (fc6)."""

Rows = Mapping[str, list[Row]]


def of(rows: Rows, settings: Mapping[str, Any]) -> tuple[list[Table], list[str]]:
    """Return the tables and the conclusions, from the rows of single steps, by table."""
    found = settings["captures"]
    steps = sorted({one["step"] for one in found})
    seeds = len({one["seed"] for one in found})
    setting = (
        f"{found[0]['task']}, {settings['workers']} workers, "
        f"{len(steps)} steps ({', '.join(map(str, steps))}), {seeds} seed{'s' * (seeds > 1)}"
    )
    claims, said = _claims(rows)
    tables = [
        _errors(rows["steps"], setting, settings["workers"]),
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
    ]
    return tables, said


def _values(rows: Sequence[Row], field: str) -> list[float]:
    return [value for row in rows if isinstance(value := row.get(field), int | float)]


def _frame(rows: Sequence[Row], names: Sequence[str], numbers: Sequence[str]) -> DataFrame:
    """Return these fields of the rows, `numbers` as floats: NaN where a row has none."""
    import pandas as pd

    found = pd.DataFrame([*rows], columns=[*names, *numbers])
    return found.astype(dict.fromkeys(numbers, float))


# ---- errors --------------------------------------------------------------------------------------


def _failures(alike: DataFrame) -> str | None:
    """Return in words how many of these steps failed, and why the first one did."""
    bad = alike[~alike["good"]]
    if bad.empty:
        return None
    first = bad.iloc[0]
    return f"{len(bad)} of {len(alike)}: step {first['step']}: {first['failed']}"


def _errors(steps: Sequence[Row], setting: str, workers: int) -> Table:
    import pandas as pd

    figures = [f"{name}_{how}" for name in FIGURES for how in ("alone", "averaged")]
    bits, which = ["bits_up", "bits_down", "bits"], ["group", "method"]
    found = _frame(steps, [*which, "step", "failed"], [*figures, *bits])
    found["good"] = found["failed"].isna()
    found[[*figures, *bits]] = found[[*figures, *bits]].where(found["good"], axis="index")
    groups = found.groupby(which, sort=False)
    made = groups[figures].mean()
    errors = groups["relative_error_alone"]
    made["relative_error_low"], made["relative_error_high"] = errors.min(), errors.max()
    made[bits] = groups[bits].mean()
    made["n"] = workers * groups["good"].sum()
    made["failed"] = [_failures(alike) for _, alike in groups]
    made = made.reset_index()
    made = made.sort_values("group", key=lambda group: pd.factorize(group)[0], kind="stable")
    return Table(
        name="errors",
        title="Gradients as they arrive",
        by="group",
        shown=[
            Shown(field="method", heading="method"),
            Shown(field="relative_error_alone", heading="error %\nalone", scale=100),
            Shown(field="relative_error_averaged", heading="error %\nmean", scale=100),
            Shown(field="cosine_alone", heading="cosine\nalone"),
            Shown(field="cosine_averaged", heading="cosine\nmean"),
            Shown(field="norm_ratio_alone", heading="length\nalone"),
            Shown(field="norm_ratio_averaged", heading="length\nmean"),
            Shown(field="zeros_alone", heading="zeros %\nalone", scale=100),
            Shown(field="zeros_averaged", heading="zeros %\nmean", scale=100),
            Shown(field="bits_up", heading="bits\nup"),
            Shown(field="bits_down", heading="bits\ndown"),
            Shown(field="bits", heading="bits of\nthese"),
            Shown(field="n", heading="n"),
            Shown(field="failed", heading="failed"),
        ],
        notes=[
            f"{setting}.",
            "alone: what a worker's payload decodes to, x' = decode(encode(x)), is compared with "
            "its own gradient x, and the result averaged over workers and steps. mean: the mean "
            "that all workers apply is compared with the true mean of their gradients.",
            "error is ||x - x'|| / ||x||, length is ||x'|| / ||x||. No memory is used, so what "
            "error feedback would send later counts as lost. Signs and votes carry no length: for "
            "them only the cosine has a meaning.",
            "bits are counted for each element: up and down are what was sent, agreed statistics "
            "included; of these is what a payload would save without these layers. n is the number "
            "of steps times that of workers.",
        ],
        rows=records(made),
    )


def _ratios(steps: Sequence[Row]) -> Table:
    """Return for each pair of methods how many times the error of the second the first one has.

    Of all layers together: the geometric mean over the steps of a seed, and over seeds its mean
    with limits. Steps in which a method failed, or has no error, are left out.
    """
    import numpy as np

    figures = ["relative_error_alone", "relative_error_averaged"]
    found = _frame(steps, ["group", "method", "seed", "step", "failed"], figures)
    found = found[
        (found["group"] == ALL) & found["failed"].isna() & (found[figures] > 0).all(axis="columns")
    ]
    logs = found.set_index(["seed", "step", "method"])[figures].apply(np.log).unstack("method")
    made: list[Row] = []
    for one, other in combinations(found["method"].unique(), 2):
        row: Row = {"method": one, "other": other}
        for figure in figures:
            pairs = (logs[figure, one] - logs[figure, other]).dropna().groupby("seed").mean()
            ratio, how = verdicts.geometric([*pairs]), figure.removeprefix("relative_error_")
            row |= {how: finite(ratio.mean), f"{how}_low": finite(ratio.low)}
            row |= {f"{how}_high": finite(ratio.high), "n": ratio.n}
        made.append(row)
    return Table(
        name="ratios",
        title="Errors of one method divided by those of another",
        which=2,
        shown=[
            Shown(field="method", heading="method"),
            Shown(field="other", heading="divided by"),
            Shown(field="alone", heading="alone"),
            Shown(field="alone_low", heading="\nlow"),
            Shown(field="alone_high", heading="\nhigh"),
            Shown(field="averaged", heading="mean"),
            Shown(field="averaged_low", heading="\nlow"),
            Shown(field="averaged_high", heading="\nhigh"),
            Shown(field="n", heading="n"),
        ],
        notes=[
            "Errors of all layers together, alone and of the mean over workers, as in the table of "
            "gradients; a ratio is the geometric mean over steps. n is the number of seeds. "
            f"{verdicts.LIMITS}"
        ],
        rows=made,
    )


# ---- clipping ------------------------------------------------------------------------------------


def _clipping(rows: Sequence[Row]) -> Table:
    ranged, plain = ["length_change", "angle"], ["clipped", "zeros_sent", "zeros_gradient"]
    numbers = [*ranged, *plain, "kurtosis"]
    groups = _frame(rows, ["clip", "kind"], numbers).groupby(["clip", "kind"], sort=False)
    found = groups.size().to_frame("n")
    for field in ranged:
        found[field] = groups[field].mean()
        found[f"{field}_low"], found[f"{field}_high"] = groups[field].min(), groups[field].max()
    found[numbers[2:]] = groups[numbers[2:]].mean()
    measured: list[Row] = records(found.reset_index())
    made: list[Row] = []
    for clip in dict.fromkeys(row["clip"] for row in measured):
        assert isinstance(clip, float)
        normal = gaussian_clipping(clip)
        made.append(
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
        made += [row for row in measured if row["clip"] == clip]
    return Table(
        name="clipping",
        title="Clipping a tensor at standard deviations (TernGrad), and its codes",
        by="clip",
        shown=[
            Shown(field="kind", heading="layers"),
            Shown(field="length_change", heading="length %\nmean", scale=100),
            Shown(field="length_change_low", heading="\nlowest", scale=100),
            Shown(field="length_change_high", heading="\nhighest", scale=100),
            Shown(field="angle", heading="degrees\nmean"),
            Shown(field="angle_low", heading="\nlowest"),
            Shown(field="angle_high", heading="\nhighest"),
            Shown(field="clipped", heading="cut\n%", scale=100),
            Shown(field="zeros_gradient", heading="zeros %\nbefore", scale=100),
            Shown(field="zeros_sent", heading="\nin codes", scale=100),
            Shown(field="kurtosis", heading="kur-\ntosis"),
            Shown(field="n", heading="n"),
        ],
        notes=[
            "The row of normal values is computed, not sampled. Of the other rows n is the number "
            "of layers times that of steps, and each value is the mean over workers. A tensor of "
            "equal values, or of one value, has a standard deviation of 0 and is clipped to zeros."
        ],
        rows=made,
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
    found = groups[medians].median()
    found[means] = groups[means].mean()
    found["won"], found["n"] = groups["won"].sum(), groups["energy_fft"].count()
    found["share"] = found["won"] / found["n"]
    made: list[Row] = records(found.reset_index())
    order = [row["kind"] for row in made]
    made.sort(
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
        shown=[
            Shown(field="rival", heading="top-k of"),
            Shown(field="kind", heading="layers"),
            Shown(field="energy_fft", heading="FFT %", scale=100),
            Shown(field="energy_topk", heading="top-k %", scale=100),
            Shown(field="won", heading="FFT\nwins"),
            Shown(field="n", heading="n"),
            Shown(field="neighbours", heading="neighbours'\ncorrelation"),
            Shown(field="kept_topk", heading="top-k\nkeeps %", scale=100),
            Shown(field="bits_fft", heading="bits\nFFT"),
            Shown(field="bits_topk", heading="bits\ntop-k"),
        ],
        notes=[
            "Both methods code each value in 10 bits, and both take their largest values from one "
            "tensor or from the whole model, as the title says. Energies are medians over layers "
            "and steps, each the mean over workers; below 0 the error is larger than the gradient.",
            "n is the number of layers times that of steps (for all layers together: of steps). "
            "Layers whose gradient is zero are not counted.",
        ],
        rows=made,
    )


# ---- claims --------------------------------------------------------------------------------------


def _claims(rows: Rows) -> tuple[Table, list[str]]:
    made = [row for claim in CLAIMS if (row := claim(rows)) is not None]
    said = [str(row.pop("said")) for row in made]
    if sentence := _by_kind(rows["spectra"]):
        said.append(sentence)
    table = Table(
        name="claims",
        title="What the papers claim of such gradients",
        shown=[
            Shown(field="claim", heading="claim"),
            Shown(field="published", heading="pub-\nlished"),
            Shown(field="normal", heading="normal\nvalues"),
            Shown(field="mean", heading="here\nmean"),
            Shown(field="low", heading="\nlowest"),
            Shown(field="high", heading="\nhighest"),
            Shown(field="inside", heading="holds\nin"),
            Shown(field="n", heading="\nof"),
        ],
        notes=[
            f"Each (layer, step) pair of weights with {LEAST:,} elements or more is one value; for "
            "FFT each step is one, as it takes one spectrum of the whole model. normal values: "
            "what the same measurement gives for a normal distribution."
        ],
        rows=made,
    )
    return table, said


def _speaking(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of clipping at TernGrad's 2.5 sigma, of weights that are large enough."""
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


def _told(row: Row) -> str:
    return f"{row['mean']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _clipped(
    rows: Rows, field: str, bounds: tuple[float, float], scale: float, what: str, unit: str
) -> Row | None:
    values = [scale * value for value in _values(_speaking(rows["clipping"]), field)]
    if not values:
        return None
    low, high = bounds
    normal = scale * getattr(gaussian_clipping(CLIP), field)
    claim = f"{what} by clipping at {CLIP} sigma, {unit} (TernGrad, 3.3)"
    row = _claim(claim, "Wen et al. 2017, 3.3", f"{low:g} to {high:g}", normal, values)
    row["inside"] = sum(low <= value <= high for value in values)
    row["said"] = (
        f"Clipping at {CLIP} sigma: {what} {_told(row)} {unit} over {len(values)} (layer, step) "
        f"pairs, {low:g} to {high:g} as published in {row['inside']} of them."
    )
    return row


def _length(rows: Rows) -> Row | None:
    bounds = (100 * LENGTH[0], 100 * LENGTH[1])
    return _clipped(rows, "length_change", bounds, -100, "length lost", "%")


def _angle(rows: Rows) -> Row | None:
    return _clipped(rows, "angle", ANGLE, 1, "direction changed", "degrees")


def _zeros(rows: Rows) -> Row | None:
    speaking = [row for row in _speaking(rows["clipping"]) if row["kind"] == "fully connected"]
    values = [100 * value for value in _values(speaking, "zeros_sent")]
    if not values:
        return None
    before = 100 * statistics.fmean(_values(speaking, "zeros_gradient"))
    normal = 100 * gaussian_clipping(CLIP).zeros
    claim = "zeros in codes of fully connected layers, % (TernGrad, fig. 4c: AlexNet's fc6)"
    published = f"{100 * ZEROS:.2f}"
    row = _claim(claim, "Wen et al. 2017, fig. 4c", published, normal, values)
    row["inside"] = None
    row["said"] = (
        f"TernGrad's codes of fully connected layers: {_told(row)} % zeros over {len(values)} "
        f"(layer, step) pairs, {published} % in the paper, {normal:.1f} % of normal values; "
        f"{before:.1f} % of these gradients are zeros before."
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
    row["said"] = (
        f"With {100 * kept:g} % kept over the whole model, FFT keeps {100 * ours:.1f} % of the "
        f"energy and top-k {100 * theirs:.1f} % (medians): FFT wins in {won} of {n} steps, and in "
        f"{bits} of {m} against top-k of equal bits. Its error is larger than the gradient in "
        f"{sum(energy < 0 for energy in energies)} of {len(energies)} (layer, step) pairs."
    )
    return row


CLAIMS: tuple[Callable[[Rows], Row | None], ...] = (_length, _angle, _zeros, _better)


def _by_kind(rows: Sequence[Row]) -> str | None:
    """Return a sentence on where FFT beats top-k tensor by tensor, for each kind of layer."""
    own = [row for row in rows if row["scales"] == "tensor" and row["kind"] != ALL]
    if not own:
        return None
    kept = own[0]["kept"]
    parts = []
    own = [row for row in own if row["kept"] == kept]
    for kind in dict.fromkeys(row["kind"] for row in own):
        alike = [row for row in own if row["kind"] == kind]
        counts = [wins([row for row in alike if row["rival"] == rival]) for rival in RIVALS]
        (share, n), (bits, _) = counts
        parts.append(f"{kind} {share} and {bits} of {n}")
    return (
        f"Tensor by tensor, {100 * float(kept or 0):g} % kept, FFT beats top-k at equal share and "
        f"at equal bits in these (layer, step) pairs: {'; '.join(parts)}."
    )
