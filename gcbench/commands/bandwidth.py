"""`gcbench bandwidth`: what collectives cost, plain and compressed."""

from __future__ import annotations

from typing import Annotated

import typer

from gcbench.commands import Output, option, say, with_groups

SIZES = "Bytes of the float32 gradient"
WHAT = "What is measured"
WHERE = "Where it runs"


@with_groups
def bandwidth(
    *,
    sizes: Annotated[
        str, option("Sizes; K, M, G are powers of 1024.", SIZES)
    ] = "4K,32K,256K,2M,16M",
    iterations: Annotated[
        int,
        option(
            "Timed iterations of each size and item; a verdict needs 7.",
            SIZES,
            *("-n", "--iters"),
            min=1,
        ),
    ] = 20,
    warmup: Annotated[
        int,
        option("Iterations before the timed ones.", SIZES, "-w", "--warmup-iters", min=0),
    ] = 5,
    compressor: Annotated[
        str | None, option("Methods, e.g. none,topk:ratio=0.001. Default all.", WHAT)
    ] = None,
    collective: Annotated[
        str | None,
        option(
            "Collectives of the methods: allreduce, allgather, twoshot, ring, sparse, or all. "
            "Default each method's own.",
            WHAT,
        ),
    ] = None,
    plain: Annotated[
        str | None,
        option(
            "Uncompressed collectives of the library: all_reduce, reduce_scatter, all_gather, "
            "alltoall, broadcast, sendrecv. Default all.",
            WHAT,
        ),
    ] = None,
    memory: Annotated[bool, option("Use the methods' memory (error feedback).", WHAT)] = True,
    link_latency_us: Annotated[
        float, option("Latency per message of predicted links, in microseconds.", WHAT, min=0)
    ] = 50.0,
    workers: Annotated[
        int | None, option("Number of processes. Default 2, or torchrun's.", WHERE)
    ] = None,
    engine: Annotated[
        str | None,
        option("spawn starts the processes; torchrun is detected. Default spawn.", WHERE),
    ] = None,
    device: Annotated[str, option("cpu (gloo) or cuda (NCCL).", WHERE)] = "cpu",
    backend: Annotated[str, option("auto, reference, cpu or cuda.", WHERE)] = "auto",
    threads: Annotated[
        int | None, option("Threads of each process. Default: cores / workers.", WHERE, min=1)
    ] = None,
    seed: Annotated[
        int, option("Seed of the methods' random numbers.", WHERE, min=0, max=2**32 - 1)
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
        say(f"already measured{analysis.elsewhere}; --force measures again")
    out.deliver(analysis)
    if analysis.failed:
        raise typer.Exit(1)
