"""Tables of the measurements on gradients: the gradient bound, clipping, geometry."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gcbench.checks.bounds.observe import Record
from gcbench.report.analysis import Row, Table, shown
from gcbench.stats.confidence import Interval, mean, ratio


def tables(records: Sequence[Record], seeds: Sequence[int]) -> Iterator[Table]:
    """Yield the tables; `records`: those of `Watch.record`, one per seed."""
    observations = [record["observations"] for record in records]
    snapshots = [record["snapshots"] for record in records]
    if any(observations):
        yield _bounds(observations)
        sizes = [math.prod(shape) for shape in records[0]["shapes"]]
        yield _layers(observations, records[0]["names"], sizes)
    if any(snapshots):
        yield _geometry(snapshots, seeds)


def _spread(name: str, estimate: Interval) -> Row:
    exact = math.isinf(estimate.high)
    return {
        name: estimate.mean,
        f"{name}_low": None if exact else estimate.low,
        f"{name}_high": None if exact else estimate.high,
    }


def _bounds(observations: Sequence[Sequence[Record]]) -> Table:
    rows: list[Row] = []
    for scalers, field in (
        ("one for the model", "whole"),
        ("one a tensor", "layer"),
        ("one a tensor, clipped", "clip"),
    ):
        estimate = ratio([[(one[field], one["square"]) for one in run] for run in observations])
        rows.append(
            {"scalers": scalers, **_spread("r", estimate), "n": estimate.n, "over": estimate.over}
        )
    return Table(
        name="gradient_bound",
        title="TernGrad's gradient bound over SGD's: E||g||_inf ||g||_1 / E||g||^2",
        shown=shown(
            {
                "scalers": "scalers",
                "r": "ratio",
                "r_low": "low",
                "r_high": "high",
                "n": "n",
                "over": "of",
            }
        ),
        rows=rows,
    )


def _layers(
    observations: Sequence[Sequence[Record]], names: Sequence[str], sizes: Sequence[int]
) -> Table:
    rows: list[Row] = []
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        row: Row = {"tensor": name, "elements": size}
        for field in ("length", "angle"):
            series = [
                [one[field][i] for one in run if one[field][i] is not None] for run in observations
            ]
            if all(series):
                estimate = mean(series)
                row |= {**_spread(field, estimate), "n": estimate.n, "over": estimate.over}
        for field, top in (("ratio", "raw"), ("ratio_clipped", "cut")):
            pairs = [[(one[top][i], one["squares"][i]) for one in run] for run in observations]
            value = ratio(pairs).mean
            row[field] = value if math.isfinite(value) else None
        rows.append(row)
    return Table(
        name="clipping",
        title="Clipping at 2.5 sigma by tensor: shortening, turning, ||g||_inf ||g||_1 / ||g||^2",
        shown=shown(
            {
                "tensor": "tensor",
                "elements": "elements",
                "length": ("shorter\n%", 100),
                "length_low": ("low", 100),
                "length_high": ("high", 100),
                "angle": "turned\ndegrees",
                "angle_low": "low",
                "angle_high": "high",
                "ratio": "R",
                "ratio_clipped": "R\nclipped",
                "n": "n",
            }
        ),
        rows=rows,
    )


def _geometry(snapshots: Sequence[Sequence[Record]], seeds: Sequence[int]) -> Table:
    columns: dict[str, str | tuple[str, float]] = {
        "seed": "seed",
        "step": "step",
        "gradient_l1": "||g||_1",
        "gradient_l2": "||g||_2",
        "sigma_l1": "||sigma||_1",
        "sigma_l2": "||sigma||_2",
        "density_gradient": "phi(g)",
        "density_noise": "phi(sigma)",
        "noise_share": ("noise in\n||g||^2, %", 100),
        "batches": "batches",
    }
    rows: list[Row] = [
        {field: seed if field == "seed" else one[field] for field in columns}
        for seed, run in zip(seeds, snapshots, strict=True)
        for one in run
    ]
    return Table(
        name="geometry",
        title="Geometry of gradient and noise: phi(v) = ||v||_1^2 / (d ||v||_2^2)",
        shown=shown(columns),
        which=2,
        rows=rows,
    )
