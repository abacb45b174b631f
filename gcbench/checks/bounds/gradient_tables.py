"""Tables of the measurements on gradients: the gradient bound, clipping, geometry."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gcbench.checks.bounds.observe import Record
from gcbench.report.analysis import Row, Shown, Table
from gcbench.stats.confidence import Interval, mean, ratio


def each(records: Sequence[Record], group: str) -> list[list[Record]]:
    """Return the "observations" or "snapshots" (`group`) of the records, one list a seed."""
    return [record[group] for record in records]


def tables(
    records: Sequence[Record], names: Sequence[str], sizes: Sequence[int], seeds: Sequence[int]
) -> Iterator[Table]:
    """Yield the tables; `names` and `sizes` are those of the tensors in the bucket."""
    observations, snapshots = each(records, "observations"), each(records, "snapshots")
    flat = [one for run in observations for one in run]
    if flat and "whole" in flat[0]:
        yield _bounds(observations)
        yield _layers(observations, names, sizes)
    if any("batches" in one for run in snapshots for one in run):
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
        shown=[
            Shown(field="scalers", heading="scalers"),
            Shown(field="r", heading="ratio"),
            Shown(field="r_low", heading="low"),
            Shown(field="r_high", heading="high"),
            Shown(field="n", heading="n"),
            Shown(field="over", heading="of"),
        ],
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
        shown=[
            Shown(field="tensor", heading="tensor"),
            Shown(field="elements", heading="elements"),
            Shown(field="length", heading="shorter\n%", scale=100),
            Shown(field="length_low", heading="low", scale=100),
            Shown(field="length_high", heading="high", scale=100),
            Shown(field="angle", heading="turned\ndegrees"),
            Shown(field="angle_low", heading="low"),
            Shown(field="angle_high", heading="high"),
            Shown(field="ratio", heading="R"),
            Shown(field="ratio_clipped", heading="R\nclipped"),
            Shown(field="n", heading="n"),
        ],
        rows=rows,
    )


def _geometry(snapshots: Sequence[Sequence[Record]], seeds: Sequence[int]) -> Table:
    fields = (
        *("gradient_l1", "gradient_l2", "sigma_l1", "sigma_l2"),
        *("density_gradient", "density_noise", "noise_share", "batches"),
    )
    rows: list[Row] = [
        {"seed": seed, "step": one["step"], **{field: one[field] for field in fields}}
        for seed, run in zip(seeds, snapshots, strict=True)
        for one in run
    ]
    return Table(
        name="geometry",
        title="Geometry of gradient and noise: phi(v) = ||v||_1^2 / (d ||v||_2^2)",
        shown=[
            Shown(field="seed", heading="seed"),
            Shown(field="step", heading="step"),
            Shown(field="gradient_l1", heading="||g||_1"),
            Shown(field="gradient_l2", heading="||g||_2"),
            Shown(field="sigma_l1", heading="||sigma||_1"),
            Shown(field="sigma_l2", heading="||sigma||_2"),
            Shown(field="density_gradient", heading="phi(g)"),
            Shown(field="density_noise", heading="phi(sigma)"),
            Shown(field="noise_share", heading="noise in\n||g||^2, %", scale=100),
            Shown(field="batches", heading="batches"),
        ],
        which=2,
        rows=rows,
    )
