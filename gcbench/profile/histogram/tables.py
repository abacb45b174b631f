"""The tables of `gcbench histogram`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from gcbench.core.values import finite
from gcbench.profile.histogram.reconstruction import ALL
from gcbench.report.analysis import Row, Table, shown
from gcbench.report.rendering import records
from gcbench.studies import verdicts

if TYPE_CHECKING:
    from pandas import DataFrame

GRADIENT = "(gradient)"
"""Value of `method` in rows of the uncompressed gradient."""
FIGURES = ("relative_error", "cosine", "norm_ratio", "zeros")

Rows = Mapping[str, list[Row]]


def of(rows: Rows, settings: Mapping[str, Any]) -> tuple[list[Table], list[str]]:
    """Return tables and answer from the rows of single steps, by table."""
    captures = settings["captures"]
    steps = sorted({one["step"] for one in captures})
    seeds = len({one["seed"] for one in captures})
    setting = (
        f"{captures[0]['task']}, {settings['workers']} workers, "
        f"{len(steps)} steps ({', '.join(map(str, steps))}), {seeds} seed{'s' * (seeds > 1)}"
    )
    errors = _errors(rows["steps"], setting, settings["workers"])
    whole = [row for row in errors.rows if row["group"] == ALL and row["method"] != GRADIENT]
    tables = [
        errors,
        _ratios(rows["steps"]),
        Table(name="steps", title="Errors by step", rows=rows["steps"]),
        Table(name="layers", title="Errors by layer and step", rows=rows["layers"]),
        Table(name="bins", title="Histograms", rows=rows["bins"]),
        Table(name="distributions", title="Distribution of errors", rows=rows["errors"]),
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
    return tables, _answer(whole)


BRIEF = 10
"""Number of methods in the short table."""
_BRIEF = ("method", "relative_error_alone", "relative_error_averaged", "zeros_alone", "bits_up",
          "failed")  # fmt: skip


def _answer(rows: Sequence[Row]) -> list[str]:
    """Return which method distorts the mean gradient least, in a sentence."""
    field = "relative_error_averaged"
    measured = [row for row in rows if isinstance(row[field], float)]
    if not measured:
        return ["Every method failed; see the column failed."]

    def text(row: Row) -> str:
        bits = float(row["bits_up"] or 0)
        return (
            f"{row['method']} ({100 * float(row[field] or 0):.3g} %, {bits:.3g} bits per element)"
        )

    ordered = sorted(measured, key=lambda row: float(row[field] or 0))
    return [
        f"The mean gradient is distorted least by {text(ordered[0])}, most by {text(ordered[-1])}."
    ]


def frame_of(rows: Sequence[Row], names: Sequence[str], numbers: Sequence[str]) -> DataFrame:
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
    frame = frame_of(steps, [*which, "step", "failed"], [*figures, *bits])
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
    frame = frame_of(steps, ["group", "method", "seed", "step", "failed"], figures)
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
