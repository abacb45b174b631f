"""`gcbench histogram`: what methods do to real gradients, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gcbench.commands import DataDir, Output, command_line, option, refuse_unused, with_groups
from gcbench.core.errors import UsageError

TRAINED = "Training (without captures)"
WITH_CAPTURES = {"captures", "compressor", "layers", "capture", "workers"}


@with_groups
def histogram(
    ctx: typer.Context,
    *,
    captures: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Captured gradients of one network: files or folders. Default: train first."
        ),
    ] = None,
    compressor: Annotated[
        str | None,
        option(
            "Methods, fields after colons: terngrad,topk:ratio=0.001; or all.",
            show_default="seven, one of each family",
        ),
    ] = None,
    layers: Annotated[str, option("Layers that are shown, e.g. 'fc*'; all are encoded.")] = "*",
    capture: Annotated[
        str | None,
        option(
            "Steps, counted from 0, e.g. 0,100,399.",
            show_default="all captured; five of a training",
        ),
    ] = None,
    workers: Annotated[
        int | None, option("Workers.", min=1, show_default="all captured; 4 in a training")
    ] = None,
    task: Annotated[str, option("Task; see `gcbench list tasks`.", TRAINED)] = "digits",
    network: Annotated[
        str | None, option("Its network.", TRAINED, show_default="the task's")
    ] = None,
    steps: Annotated[
        int | None, option("Training steps.", TRAINED, min=1, show_default="the task's")
    ] = None,
    batch: Annotated[
        int | None, option("Examples per step.", TRAINED, min=1, show_default="the task's")
    ] = None,
    seed: Annotated[str, option("Seeds, e.g. 0,1,2: a training each.", TRAINED)] = "0",
    data_dir: DataDir = None,
    out: Output,
) -> None:
    """Show what compressors do to real gradients: histograms and errors.

    Gradients come from `gcbench run --capture 0,100,399`, or this command trains first. All
    methods encode the same gradients, without memory. Errors are those of each worker, and of the
    mean over workers.
    """
    command = command_line()
    from gcbench.profile import histogram as measuring
    from gcbench.training import captures as capturing

    measuring.methods_of(compressor)  # before any training
    chosen = None if capture is None else capturing.steps(capture)
    if captures:
        refuse_unused(ctx, WITH_CAPTURES, "captured gradients")
        loaded = capturing.load(captures)
    else:
        words = {"task": task, "workers": workers or 4, "steps": steps, "batch": batch}
        config = {key: value for key, value in words.items() if value is not None}
        if network is not None:
            config["task_options"] = {"network": network}
        try:
            seeds = [*dict.fromkeys(int(word) for word in seed.split(","))]
        except ValueError:
            raise UsageError(f"--seed {seed!r}: whole numbers with commas expected") from None
        loaded = measuring.train(
            config, seeds, chosen, out.results, data_dir, out.progress.value, force=out.force
        )
    loaded, number = measuring.select(loaded, chosen, workers)
    analysis = measuring.measure(
        loaded,
        compressor,
        workers=number,
        layers=layers,
        results=out.results,
        shown=out.progress.value,
        command=command,
        force=out.force,
    )
    out.deliver(analysis)
