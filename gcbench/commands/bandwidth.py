"""`gcbench bandwidth`: what collectives cost, plain and compressed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gcbench.commands import Output, say, with_output

S = str | None
SIZES = "Bytes of the float32 gradient"
WHAT = "What is measured"
WHERE = "Where it runs"


def _opt(*flags: str, text: str, panel: str) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel=panel, show_default=False)


@with_output
def bandwidth(
    *,
    sizes: Annotated[
        str, typer.Option(help="Sizes; K, M, G are powers of 1024.", rich_help_panel=SIZES)
    ] = "4K,32K,256K,2M,16M",
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
            text="Collectives of the methods: allreduce, allgather, twoshot, ring, sparse, or "
            "all. Default each method's own.",
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
            help="Whether methods use their memory (error feedback).",
            rich_help_panel=WHAT,
        ),
    ] = True,
    link_latency_us: Annotated[
        float,
        typer.Option(
            min=0,
            help="Latency per message of predicted links, in microseconds.",
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
    out: Output,
) -> None:
    """Time plain and compressed collectives; check every result; exit code 1 if one is wrong.

    Prints the sizes from which compression pays here, and predicts the links on which it would.
    Repeat an interrupted command to continue it.
    """
    from gcbench.core.errors import Interrupted
    from gcbench.profile import bandwidth as measuring
    from gcbench.profile.bandwidth import settings as setting

    settings = setting.make(
        compressors=compressor,
        collectives=collective,
        plain=plain,
        sizes=setting.listed(sizes),
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
        result = measuring.run(settings, out.results, out.progress.value, force=out.force)
    except Interrupted:
        say("\nmeasurements are saved; repeat the command to continue")
        raise
    if result is None:
        return  # worker 0 prints
    analysis, new = result
    if not new:
        say("already measured; --force measures again")
    out.deliver(analysis)
    if analysis.failed:
        raise typer.Exit(1)
