"""`gcbench bandwidth`: what collectives cost, plain and compressed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gcbench.commands import (
    ANALYSES,
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
    say,
)

S = str | None
SIZES = "Bytes of the float32 gradient"
WHAT = "What is measured"
WHERE = "Where it runs"


def _opt(*flags: str, text: str, panel: str) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel=panel, show_default=False)


def bandwidth(
    minbytes: Annotated[
        S, _opt("-b", "--minbytes", text="Smallest size, e.g. 4K. Default 4K.", panel=SIZES)
    ] = None,
    maxbytes: Annotated[
        S, _opt("-e", "--maxbytes", text="Largest size, e.g. 16M. Default 16M.", panel=SIZES)
    ] = None,
    factor: Annotated[
        float | None,
        _opt(
            "-f", "--stepfactor", text="Factor from one size to the next. Default 8.", panel=SIZES
        ),
    ] = None,
    step: Annotated[
        S,
        _opt(
            "-i",
            "--stepbytes",
            text="Difference between one size and the next, in place of the factor.",
            panel=SIZES,
        ),
    ] = None,
    sizes: Annotated[
        S, _opt("--sizes", text="A list of sizes in place of -b, -e, -f, -i: 4K,1M.", panel=SIZES)
    ] = None,
    iterations: Annotated[
        int,
        typer.Option(
            "-n",
            "--iters",
            min=1,
            help="Timed iterations of each size and item; a verdict needs 7.",
            rich_help_panel=SIZES,
        ),
    ] = 20,
    warmup: Annotated[
        int,
        typer.Option(
            "-w",
            "--warmup-iters",
            "--warmup_iters",
            min=0,
            help="Iterations before the timed ones.",
            rich_help_panel=SIZES,
        ),
    ] = 5,
    compressor: Annotated[
        S,
        _opt("--compressor", text="Methods, e.g. none,topk:ratio=0.001. Default all.", panel=WHAT),
    ] = None,
    collective: Annotated[
        S,
        _opt(
            "--collective",
            text="Collectives of the methods: allreduce, allgather, twoshot, or all. Default each "
            "method's own.",
            panel=WHAT,
        ),
    ] = None,
    plain: Annotated[
        S,
        _opt(
            "--plain",
            text="Uncompressed collectives of the library: all_reduce, reduce_scatter, "
            "all_gather, alltoall, broadcast, sendrecv. Default all.",
            panel=WHAT,
        ),
    ] = None,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory/--no-memory",
            help="Use the memory of each method's source (error feedback), or none.",
            rich_help_panel=WHAT,
        ),
    ] = True,
    link_latency_us: Annotated[
        float,
        typer.Option(
            min=0,
            help="Latency in microseconds of the links for which is predicted what pays.",
            rich_help_panel=WHAT,
        ),
    ] = 50.0,
    workers: Annotated[
        int | None,
        _opt("--workers", text="Number of processes. Default 2, or torchrun's.", panel=WHERE),
    ] = None,
    engine: Annotated[
        S,
        _opt(
            "--engine",
            text="spawn starts the processes; torchrun is detected. Default spawn.",
            panel=WHERE,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu (gloo) or cuda (NCCL).", rich_help_panel=WHERE)
    ] = "cpu",
    backend: Annotated[
        str, typer.Option(help="auto, reference, cpu or cuda.", rich_help_panel=WHERE)
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads of each process. Default: cores / workers.",
            rich_help_panel=WHERE,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the methods' random numbers.", rich_help_panel=WHERE)
    ] = 0,
    results: Results = ANALYSES,
    plot: Plot = None,
    force: Force = False,
    progress: Shown = Progress.auto,
    details: Details = False,
    format_: Formatted = Format.table,
    json: Json = False,
) -> None:
    """Time collectives, plain and compressed, and check every result; exit code 1 if one is wrong.

    Prints the sizes from which compression pays here, and predicts the links on which it would.
    An interrupted command continues when it is repeated.
    """

    from gcbench.core.errors import Interrupted, UsageError
    from gcbench.profile import bandwidth as measuring
    from gcbench.profile.bandwidth import settings as setting

    if sizes is not None:
        if any(flag is not None for flag in (minbytes, maxbytes, factor, step)):
            raise UsageError("--sizes is a list in place of -b, -e, -f and -i: give one of the two")
        wanted = setting.listed(sizes)
    else:
        wanted = setting.sizes_between(
            setting.size_of(minbytes or "4K"),
            setting.size_of(maxbytes or "16M"),
            factor,
            None if step is None else setting.size_of(step),
        )
    settings = setting.make(
        compressors=compressor,
        collectives=collective,
        plain=plain,
        sizes=wanted,
        workers=workers,
        engine=engine,
        threads=threads,
        iterations=iterations,
        warmup=warmup,
        memory=memory,
        link_latency_us=link_latency_us,
        device=device,
        backend=backend,
        seed=seed,
    )
    try:
        result = measuring.run(settings, results, progress.value, force=force)
    except Interrupted:
        say("\nmeasurements are saved; repeat the command to continue")
        raise
    if result is None:
        return  # worker 0 prints
    analysis, new = result
    if not new:
        say("already measured; --force measures again")
    deliver(analysis, results, plot, format_, as_json=json, details=details)
    if analysis.failed:
        raise typer.Exit(1)
