"""Statistics over seeds, in two frames: one line per run, and one line per configuration.

`per_run` makes the first and `per_config` the second from it; the other functions add columns
to the second. A configuration is all settings but the seed, as `Run.method` writes them. NaN means
unknown. `gcbench.report.compare` makes the rows of a table from these frames;
`gcbench help reading-results` explains every column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from gcbench.core.schema import PHASES
from gcbench.core.values import canonical
from gcbench.results.reader import Run
from gcbench.stats.intervals import half_interval, half_width, resolution

if TYPE_CHECKING:
    from pandas import DataFrame

BASELINE = "none"
"""The compressor that sends fp32 gradients."""
SPENT = ("step", "payload_bytes", "wire_bytes", "seconds", "link_seconds")
"""Columns about the first evaluation that met a target, each with the prefix "target_": its step;
bytes per worker, encoded (up and down together) and on the network; wall clock of the run (engine
simulate: of all workers in one process); modelled communication alone. Infinite for a run that
never met the target; NaN if not recorded."""
TARGET = tuple(f"target_{name}" for name in SPENT)
_MEANS = ("nominal_ratio", "payload_ratio_up", "payload_ratio_down", "test_top5")
_BYTES = ("payload_bytes", "wire_bytes")


# ---- runs ----------------------------------------------------------------------------------------

MOST_EXAMPLES = 1_000_000
"""Examples of a test set above which it is not derived from accuracies."""


def examples(runs: Sequence[Run]) -> list[float]:
    """Return the size of each run's test set; NaN if unknown.

    This is the least `test_examples` of the summaries, or `holdout` of a trial. Without it, it is
    the smallest common denominator of the accuracies on the same test set: at least 360 for
    347/360 and 0.9.
    """
    splits = list(map(_split, runs))
    sizes: dict[str, float] = {}
    for run, split in zip(runs, splits, strict=True):
        held_out = run.summary.config.get("holdout")
        recorded = held_out if run.is_trial else run.summary.test_examples
        if recorded:
            sizes[split] = min(float(recorded), sizes.get(split, math.inf))
    missing: dict[str, int] = {}
    for run, split in zip(runs, splits, strict=True):
        accuracy = _accuracy(run)
        if split in sizes or accuracy is None or not 0 <= accuracy <= 1:
            continue
        denominator = missing.get(split, 1)
        if denominator:
            exact = Fraction(accuracy).limit_denominator(MOST_EXAMPLES)
            together = math.lcm(denominator, exact.denominator)
            fits = float(exact) == accuracy and together <= MOST_EXAMPLES
            missing[split] = together if fits else 0
    sizes |= {split: float(n) for split, n in missing.items() if n}
    return [sizes.get(split, math.nan) for split in splits]


def _accuracy(run: Run) -> float | None:
    return run.summary.validation_accuracy if run.is_trial else run.summary.test_accuracy


def _split(run: Run) -> str:
    """Return a key of the examples on which a run was evaluated."""
    options = run.summary.config.get("task_options")
    options_text = canonical(options) if options else ""
    held_out = run.summary.config.get("holdout") if run.is_trial else None
    return f"{run.summary.task} {options_text} {run.is_trial} {held_out}"


def _final(run: Run, metric: str) -> float | None:
    """Return the metric of a run after its last step; None where the run diverged."""
    summary = run.summary
    split = run.result_split
    loss = getattr(summary, f"{split}_loss")
    value = getattr(summary, f"{split}_accuracy") if metric == "accuracy" else loss
    if summary.failed or value is None or not math.isfinite(value):
        return None
    # A model with NaN parameters has the accuracy of guessing. Its loss is NaN, stored as null; a
    # summary without that field did not measure the loss.
    measured = f"{split}_loss" in summary.present
    diverged = measured if loss is None else not math.isfinite(loss)
    return None if diverged else value


def _to_target(run: Run, metric: str, target: float) -> dict[str, float | None]:
    """Return the cost up to the evaluation that met the target; empty without evaluations.

    A run with NaN parameters never meets a target, although it has an accuracy.
    """
    curve = run.evaluations()
    loss = f"{run.judged_by}_loss"
    column = f"{run.judged_by}_accuracy" if metric == "accuracy" else loss
    for record in curve:
        value = record.get(column)
        if value is None or record.get(loss, 0.0) is None:
            continue
        if value >= target if metric == "accuracy" else value <= target:
            up, down = record.get("payload_bytes_up"), record.get("payload_bytes_down")
            spent = {
                "step": record["step"],
                "payload_bytes": None if up is None or down is None else up + down,
                "wire_bytes": record.get("wire_bytes"),
                "seconds": record.get("seconds"),
                "link_seconds": _link_seconds(run, record),
            }
            return {f"target_{name}": spent[name] for name in SPENT}
    return dict.fromkeys(TARGET, math.inf) if curve else {}


def _link_seconds(run: Run, record: Mapping[str, Any]) -> float | None:
    """Return the modelled seconds up to an evaluation; None where they are not known.

    Runs have the mean over their steps, which applies if those before the evaluation sent as much.
    """
    link, wire = run.summary.communicate_modelled, record.get("wire_bytes")
    if link is None or wire is None:
        return None
    expected = run.summary.wire_bytes.per_worker * record["step"] / run.summary.steps
    is_even = math.isclose(wire, expected, rel_tol=0.02)
    return link.seconds * record["step"] if is_even else None


def per_run(runs: Sequence[Run], metrics: Mapping[str, str], target: float | None) -> DataFrame:
    """Return one line per run, in the given order.

    Columns: `configuration`; `seed`; `eval_every` (steps; 0: only the last); `uncompressed`;
    `sign`: 1 where a higher metric is better, else -1; `value`: the metric after the last step, NaN
    where the run diverged; `examples`: of the test set, NaN where it is not known and for losses;
    bytes of a worker in the whole run, NaN where it ended early; ratios; `test_top5`, NaN where the
    run diverged; seconds of a step and of its phases ("phase encode"); `TARGET`.
    `metrics`: "accuracy" or "test_loss", by task. `target`: the metric to be met; None: none.

    Raises:
        GcbenchError: with a target, evaluations that cannot be read.
    """
    import numpy as np
    import pandas as pd

    summaries = [run.summary for run in runs]
    accuracies = [metrics[summary.task] == "accuracy" for summary in summaries]

    def numbers(values: Iterable[float | None]) -> Any:
        return np.array([math.nan if value is None else value for value in values], dtype=float)

    def of(name: str) -> Any:
        return numbers(getattr(summary, name) for summary in summaries)

    finals = [_final(run, metrics[run.summary.task]) for run in runs]
    ended = [summary.failed is None for summary in summaries]
    links = [summary.communicate_modelled for summary in summaries]
    phases = dict.fromkeys((*PHASES, *(name for s in summaries for name in s.phase_seconds)))
    spent: list[dict[str, float | None]] = [{} for _ in runs]
    in_files = sorted(range(len(runs)), key=lambda i: (str(runs[i].source), runs[i].number))
    if target is not None:
        for i in in_files:  # packed texts are read in their order
            spent[i] = _to_target(runs[i], metrics[runs[i].summary.task], target)
    columns = {
        "configuration": [run.method for run in runs],
        "seed": [summary.seed for summary in summaries],
        "steps": [summary.steps for summary in summaries],
        "skipped_steps": [summary.skipped_steps for summary in summaries],
        "eval_every": [summary.config.get("eval_every") or 0 for summary in summaries],
        "uncompressed": [summary.compressor_name == BASELINE for summary in summaries],
        "sign": np.where(accuracies, 1, -1),
        "value": numbers(finals),
        "examples": numbers(
            size if accuracy else None
            for size, accuracy in zip(examples(runs), accuracies, strict=True)
        ),
        "payload_bytes": np.where(ended, of("payload_bytes_up") + of("payload_bytes_down"), np.nan),
        "wire_bytes": np.where(ended, [s.wire_bytes.per_worker for s in summaries], np.nan),
        **{name: of(name) for name in (*_MEANS, "step_seconds")},
        "test_top5": np.where([one is None for one in finals], np.nan, of("test_top5")),
        "communicate_modelled_seconds": numbers(
            None if link is None else link.seconds for link in links
        ),
        **{
            f"phase {name}": numbers(s.phase_seconds.get(name) for s in summaries)
            for name in phases
        },
        **{name: numbers(one.get(name) for one in spent) for name in TARGET},
    }
    return pd.DataFrame(columns)


def values(runs: DataFrame) -> dict[str, dict[int, float]]:
    """Return the metric of each configuration by seed, without the runs that diverged."""
    result: dict[str, dict[int, float]] = {}
    for name, seed, value in zip(runs["configuration"], runs["seed"], runs["value"], strict=True):
        by_seed = result.setdefault(name, {})
        if math.isfinite(value):
            by_seed[seed] = value
    return result


# ---- configurations ------------------------------------------------------------------------------


def per_config(runs: DataFrame) -> DataFrame:
    """Return one line per configuration: the columns of `per_run` over its seeds.

    The index is the configuration. `diverged` counts the seeds without a value. Of the others are
    `mean`, `sd` (sample standard deviation, NaN below two seeds), `half_interval` (half the 95 %
    interval of the mean, 0 below two seeds), `low`, `high` and `n`. Bytes are of one step. Seconds
    are medians; those of modelled communication are NaN where communication was measured.
    """
    groups = runs.groupby("configuration", sort=False)
    table = groups[["uncompressed", "sign", "examples"]].first()
    values = groups["value"]
    table["mean"], table["sd"], table["n"] = values.mean(), values.std(), values.count()
    table["diverged"] = groups.size() - table["n"]
    table["low"], table["high"] = values.min(), values.max()
    table["half_interval"] = half_width(table["sd"], table["n"]).fillna(0.0)
    table[[*_MEANS]] = groups[[*_MEANS]].mean()
    table["bits_up"] = 32 / table["payload_ratio_up"].where(table["payload_ratio_up"] != 0)
    steps = groups["steps"].first()
    for name in _BYTES:
        table[f"{name}_step"] = groups[name].mean() / steps
    phases = [str(name) for name in runs if str(name).startswith("phase ")]
    seconds = ["step_seconds", "communicate_modelled_seconds", *phases]
    table[seconds] = groups[seconds].median()
    measured = table["phase communicate"].notna()
    table.loc[measured, "communicate_modelled_seconds"] = math.nan
    table["skipped_steps"] = groups["skipped_steps"].sum()
    spent = groups[[*TARGET]]
    table[[*TARGET]] = spent.median().where(spent.count().eq(groups.size(), axis=0))
    table["target_runs"] = groups["target_step"].count()
    met = runs["target_step"] < math.inf
    table["target_reached"] = met.groupby(runs["configuration"], sort=False).sum()
    return table


def against_baselines(runs: DataFrame, configurations: DataFrame) -> DataFrame:
    """Return the configurations with what follows from their column `baseline`.

    That is the configuration of the uncompressed runs of equal budget, or missing. Added are:
    `pairs`, the number of seeds that both finished; `difference`, the mean of the paired
    differences, or the difference of the two means where there is no pair; `difference_sd`;
    `difference_low` and `difference_high`, its 95 % interval by `half_interval`, NaN below two
    pairs;
    `above_baseline` and `below_baseline`: whether the interval lies on one side of zero, the better
    or the worse, and, for the better, no seed diverged; `faster`: whether all seeds met the target,
    and in fewer steps, by the interval of the paired differences of steps where both met it, at
    least two (a step is that of an evaluation, so each has a rounding error, too); `band_low` and
    `band_high`: the lowest and the highest value of the uncompressed seeds, NaN below two;
    `in_band`: whether the mean lies in the band, as text. If it is outside and the interval of the
    difference contains zero, the text names no direction.
    """
    import numpy as np

    table = configurations.copy()
    names, compressed = table["baseline"], ~table["uncompressed"]
    finished = runs.loc[runs["value"].notna(), ["configuration", "seed", "value"]]
    pairs = finished.join(names[compressed], on="configuration", how="inner").merge(
        finished, left_on=["baseline", "seed"], right_on=["configuration", "seed"]
    )
    paired = (pairs["value_x"] - pairs["value_y"]).groupby(pairs["configuration_x"])
    table["pairs"] = paired.count().reindex(table.index, fill_value=0)
    unpaired = (table["mean"] - names.map(table["mean"])).where(compressed)
    table["difference"] = paired.mean().reindex(table.index).fillna(unpaired)
    table["difference_sd"] = paired.std().reindex(table.index)
    noise = table["difference"], table["examples"]
    half = half_interval(table["difference_sd"], table["pairs"], *noise)
    table["difference_low"] = table["difference"] - half
    table["difference_high"] = table["difference"] + half
    better, worse = table["difference_low"] > 0, table["difference_high"] < 0
    table["above_baseline"] = better.where(table["sign"] > 0, worse) & (table["diverged"] == 0)
    table["below_baseline"] = worse.where(table["sign"] > 0, better)

    columns = ["configuration", "seed", "target_step", "eval_every"]
    met = runs.loc[runs["target_step"] < math.inf, columns]
    met = met.join(names[compressed], on="configuration", how="inner").merge(
        met, left_on=["baseline", "seed"], right_on=["configuration", "seed"]
    )
    later = (met["target_step_x"] - met["target_step_y"]).groupby(met["configuration_x"])
    # the variance of a uniform error is a twelfth of the squared distance between evaluations
    rounding = (met["eval_every_x"] ** 2 + met["eval_every_y"] ** 2) / 12
    spread = (later.var() + rounding.groupby(met["configuration_x"]).mean()) ** 0.5
    sooner = later.mean() + half_width(spread, later.count()) < 0
    is_met = table["target_reached"] == table["n"] + table["diverged"]
    table["faster"] = sooner.reindex(table.index, fill_value=False) & is_met

    table["baseline_n"] = names.map(table["n"]).fillna(0).astype(int)
    several = table["baseline_n"] > 1
    table["band_low"] = names.map(table["low"]).where(several)
    table["band_high"] = names.map(table["high"]).where(several)
    mean, low, high = table["mean"], table["band_low"], table["band_high"]
    table["in_band"] = np.select(
        [
            ~compressed,
            table["diverged"] > 0,
            table["baseline_n"] == 0,
            table["baseline_n"] == 1,
            (low <= mean) & (mean <= high),
            (table["difference_low"].notna() & ~better & ~worse)
            | (table["difference"].abs() <= resolution(*noise)),
            (mean > high) == (table["sign"] > 0),
        ],
        [
            *("baseline", "no: failed", "no baseline", "n/a (1 seed)", "yes"),
            *("no: indistinguishable", "no: better"),
        ],
        "no: worse",
    )
    return table
