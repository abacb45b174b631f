"""`gcbench advise`: what to do with a training job on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gcbench.commands import (
    ANALYSES,
    RUNS,
    Details,
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
from gcbench.commands.predict import (
    CLUSTER_YAML,
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
    cluster_changes,
    compressed,
)
from gcbench.core.errors import UsageError


def advise(
    model: Model = "resnet50",
    module: Module = None,
    cluster: Place = "v100x8-25g",
    cluster_set: PlaceSet = None,
    workers: Annotated[str, typer.Option(help="Total number of GPUs.")] = "64",
    tolerance: Annotated[
        float, typer.Option(min=0, max=100, help="Acceptable loss of accuracy in points.")
    ] = 1.0,
    tolerance_loss: Annotated[
        float,
        typer.Option(min=0, help="Acceptable increase of test loss on tasks without an accuracy."),
    ] = 0.02,
    margin: Annotated[
        float, typer.Option(min=0, help="Least speedup in % that makes compression worthwhile.")
    ] = 5.0,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            help="Runs of suites: files of rows or folders. May be repeated.",
            show_default=f"results/reference, {RUNS} and the packaged rows",
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
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure encoding times here, and under torchrun also the link between its ranks.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="With --measure: cpu (gloo) or cuda (NCCL).")] = "cpu",
    details: Details = False,
    format_: Formatted = Format.table,
    plot: Plot = None,
    results: Results = ANALYSES,
    progress: Shown = Progress.auto,
    force: Force = False,
    json: Json = False,
) -> None:
    """Plan a training job: one worker, fp32, bf16, each method, accumulation, local steps, FSDP.

    Speeds are predicted as by `gcbench predict`. The loss of accuracy comes from stored runs of a
    suite with a holdout and at least 3 seeds (`gcbench help protocol`). They trained smaller
    models: the answer is what to try, not a guarantee.
    """
    from gcbench.predict import advice, clusters, measuring

    chosen = compressed(compressor)
    places = runs if runs is not None else advice.default_places(RUNS)
    changes = cluster_changes(cluster_set, overlap)
    if measure:
        if kernels != "assumed":
            raise UsageError(f"--measure and --kernels {kernels} exclude each other: give one")
        here = measuring.measure(chosen, device, results, progress.value, force=force)
        if here is None:
            return  # worker 0 prints
        kernels, changes = str(here.kernels), here.changes() | changes
    settings = make(
        advice.Settings,
        FLAGS,
        model=model,
        module=module,
        compressors=chosen,
        workers=numbers("--workers", workers, int),
        cluster=clusters.load(cluster, changes),
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
    )
    analysis = long_work(
        advice.KIND, settings, results, progress, len(chosen), advice.run, force=force
    )
    deliver(analysis, results, plot, format_, as_json=json, details=details)


advise.__doc__ = f"{advise.__doc__}\n{CLUSTER_YAML}"
