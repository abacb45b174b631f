"""`gcbench advise`: what to do with a training job on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gcbench.commands import RUNS, Output, numbers, option, say, with_groups
from gcbench.commands.predict import CLUSTER_YAML, Job, compressed
from gcbench.core.errors import UsageError


@with_groups
def advise(
    *,
    job: Job,
    workers: Annotated[str, option("Total number of GPUs.")] = "64",
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
        option(
            "Runs of suites: files of rows or folders. May be repeated.",
            show_default=f"results/reference, {RUNS} and the packaged rows",
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure encoding times here, and under torchrun the link between its machines.",
        ),
    ] = False,
    device: Annotated[
        str | None, option("With --measure: cpu (gloo) or cuda (NCCL).", show_default="cpu")
    ] = None,
    out: Output,
) -> None:
    """Plan a training job: one worker, fp32, bf16, each method, accumulation, local steps, FSDP.

    Speeds are predicted as by `gcbench predict`. The loss of accuracy comes from stored runs of a
    suite with a holdout and at least 3 seeds (`gcbench help protocol`). They trained smaller
    models: the answer is what to try, not a guarantee.
    """
    from gcbench.predict import advice, measuring
    from gcbench.training import grid, rank

    if device is not None and not measure:
        raise UsageError(f"--device {device} needs --measure: nothing else runs on a device")
    chosen = compressed(job.compressor)
    changes: dict[str, object] = {}
    if measure:
        if job.kernels != "assumed":
            raise UsageError(f"--measure and --kernels {job.kernels} exclude each other: give one")
        if rank.by_torchrun() and not measuring.on_one_machine():
            changed = grid.pairs("--cluster-set", job.cluster_set)
            for key in sorted(changed.keys() & measuring.FITTED):
                raise UsageError(
                    f"--cluster-set {key}={changed[key]}: under torchrun --measure measures this; "
                    "leave one of the two out"
                )
        here = measuring.measure(
            chosen, device or "cpu", out.results, out.progress.value, job.place(), force=out.force
        )
        if here is None:
            return  # worker 0 prints
        if here.stored is not None:
            say(f"already measured{here.stored}; --force measures again")
        job, changes = job._replace(kernels=str(here.kernels)), here.changes
    places = runs if runs is not None else advice.default_places(RUNS)
    settings = job.settings(
        advice.Settings,
        changes,
        compressors=chosen,
        workers=numbers("--workers", workers),
        tolerance=tolerance / 100,
        tolerance_loss=tolerance_loss,
        margin=margin / 100,
        runs=[str(path) for path in places],
    )
    out.deliver(out.run(advice, settings, len(chosen)))


advise.__doc__ = f"{advise.__doc__}\n{CLUSTER_YAML}"
