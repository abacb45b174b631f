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
    Batch,
    Compute,
    DenseBelow,
    DenseLast,
    Kernels,
    Model,
    Module,
    Place,
    PlaceSet,
    Threads,
)


def advise(
    model: Model = "resnet50",
    module: Module = None,
    cluster: Place = "v100-25g",
    cluster_set: PlaceSet = None,
    workers: Annotated[str, typer.Option(help="Number of workers.")] = "64",
    tolerance: Annotated[
        float, typer.Option(help="Points of accuracy that may be lost, 0 to 100.")
    ] = 1.0,
    margin: Annotated[
        float, typer.Option(help="Gain in % below which it is not worth while.")
    ] = 5.0,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            help="Stored results: runs, folders, .json files; may be given again.",
            show_default=f"{RUNS}, where it is",
        ),
    ] = None,
    compressor: Annotated[
        str | None,
        typer.Option(help="Methods with commas, e.g. terngrad,topk:ratio=0.001; default all."),
    ] = None,
    batch: Batch = None,
    compute_ms: Compute = None,
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

    Gains are predicted as by `gcbench scale predict`; accuracy lost is that of stored results.
    """
    from gcbench import experiment, grid
    from gcbench.measure import methods
    from gcbench.measure.scale import advice, clusters

    chosen = [word for word in methods.all_of(compressor) if word != "none"]
    stored = runs if runs is not None else [RUNS] if RUNS.exists() else []
    settings = make(
        advice.Settings,
        model=model,
        module=module,
        compressors=chosen,
        workers=numbers("--workers", workers, int),
        cluster=clusters.load(cluster, grid.pairs("--cluster-set", cluster_set)),
        tolerance=tolerance / 100,
        margin=margin / 100,
        runs=[str(path) for path in stored],
        batch=batch,
        compute_ms=compute_ms,
        dense_last=dense_last,
        dense_below=dense_below,
        kernels=kernels,
        threads=threads or experiment.cores(),
    )
    made = long_work(advice.KIND, settings, results, progress, len(chosen), advice.run, force=force)
    deliver(made, results, plot, format_, as_json=json)
