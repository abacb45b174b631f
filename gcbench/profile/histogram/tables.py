"""The tables of `gcbench histogram`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gcbench.profile.histogram.reconstruction import ALL
from gcbench.report.analysis import Row, Table, shown
from gcbench.report.rendering import records

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
        Table(name="steps", title="Errors by step", rows=rows["steps"]),
        Table(name="layers", title="Errors by layer and step", rows=rows["layers"]),
        Table(name="bins", title="Histograms", rows=rows["bins"]),
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

    if len(measured) == 1:
        return [f"Distortion of the mean gradient: {text(measured[0])}."]
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
