"""`gcbench advise`: whether to compress on a cluster, and with what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gcbench.commands import (
    ANALYSES,
    RUNS,
    Force,
    Format,
    Formatted,
    Json,
    Plot,
    Progress,
    Results,
    Shown,
    deliver,
    long_work,
    make,
    numbers,
)
from gcbench.commands.scale import (
    FLAGS,
    Batch,
    Compute,
    DenseBelow,
    DenseLast,
    Kernels,
    Methods,
    Model,
    Module,
    Overlap,
    Place,
    PlaceSet,
    Sharded,
    Threads,
    cluster_changes,
    compressed,
)


def advise(
    model: Model = "resnet50",
    module: Module = None,
    cluster: Place = "v100x8-25g",
    cluster_set: PlaceSet = None,
    workers: Annotated[str, typer.Option(help="Number of GPUs, all nodes together.")] = "64",
    tolerance: Annotated[
        float, typer.Option(min=0, max=100, help="Points of accuracy that may be lost.")
    ] = 1.0,
    tolerance_loss: Annotated[
        float,
        typer.Option(
            min=0, help="Increase of test loss that is acceptable on tasks without accuracy."
        ),
    ] = 0.02,
    margin: Annotated[
        float, typer.Option(min=0, help="Gain in % below which compression is not worthwhile.")
    ] = 5.0,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            help="Runs of suites, as files of rows or folders; may be given several times.",
            show_default=f"results/reference, {RUNS} and gcbench's own rows",
        ),
    ] = None,
    compressor: Methods = None,
    batch: Batch = None,
    compute_ms: Compute = None,
    overlap: Overlap = None,
    sharded: Sharded = False,
    dense_last: DenseLast = False,
    dense_below: DenseBelow = 0,
    kernels: Kernels = "assumed",
    threads: Threads = None,
    format_: Formatted = Format.table,
    plot: Plot = None,
    results: Results = ANALYSES,
    progress: Shown = Progress.auto,
    force: Force = False,
    json: Json = False,
) -> None:
    """Say whether compression pays for a model on a cluster, and which method.

    Gains are predicted as by `gcbench scale predict`. The loss of accuracy is taken from runs that
    were made for a suite with a holdout, with at least 3 seeds: `gcbench help protocol`.
    """
    from gcbench.studies.scale import advice, clusters
    from gcbench.training import configuration

    chosen = compressed(compressor)
    places = runs if runs is not None else advice.usual_places(RUNS)
    settings = make(
        advice.Settings,
        FLAGS,
        model=model,
        module=module,
        compressors=chosen,
        workers=numbers("--workers", workers, int),
        cluster=clusters.load(cluster, cluster_changes(cluster_set, overlap)),
        tolerance=tolerance / 100,
        tolerance_loss=tolerance_loss,
        margin=margin / 100,
        runs=[str(path) for path in places],
        batch=batch,
        compute_ms=compute_ms,
        dense_last=dense_last,
        dense_below=dense_below,
        sharded=sharded,
        kernels=kernels,
        threads=threads or configuration.cores(),
    )
    made = long_work(advice.KIND, settings, results, progress, len(chosen), advice.run, force=force)
    deliver(made, results, plot, format_, as_json=json)
