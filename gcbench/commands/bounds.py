"""`gcbench bounds`: the papers' theorems, and methods' declarations, put to the test."""

from __future__ import annotations

from typing import Annotated

import typer

from gcbench.commands import (
    DataDir,
    Output,
    command_line,
    option,
    refuse_unused,
    say,
    with_groups,
)

TRAIN = "The training whose gradients are observed"
LOOK = "What is tested"
QUADRATIC = {"quadratic_only", "claims", "methods", "compressor", "seed", "strict"}


@with_groups
def bounds(
    ctx: typer.Context,
    *,
    claims: Annotated[
        str, option("Only claims whose names match, e.g. 'sign*' or '*/topk'.", LOOK)
    ] = "*",
    quadratic_only: Annotated[
        bool, option("Train nothing: only known inputs and quadratics.", LOOK)
    ] = False,
    methods: Annotated[
        str | None,
        option("Methods, e.g. topk:ratio=0.1,qsgd:norm=2; default all.", LOOK),
    ] = None,
    task: Annotated[str, option("Task; see `gcbench list tasks`.", TRAIN)] = "digits",
    network: Annotated[str | None, option("The task's network, e.g. resnet20.", TRAIN)] = None,
    task_set: Annotated[
        list[str] | None, option("A task's field, e.g. noise=2.", TRAIN, show_default=False)
    ] = None,
    compressor: Annotated[
        str, option("Compressor of this training, e.g. topk:ratio=0.001.", TRAIN)
    ] = "none",
    workers: Annotated[int, option("Number of workers.", TRAIN, min=1)] = 4,
    steps: Annotated[int, option("Training steps.", TRAIN, min=1)] = 200,
    batch: Annotated[
        int | None, option("Examples per step. Default: the task's.", TRAIN, min=1)
    ] = None,
    lr: Annotated[float | None, option("Learning rate. Default: the task's.", TRAIN)] = None,
    seed: Annotated[
        str, option("Seeds; with 3 or more, intervals are over seeds.", TRAIN)
    ] = "0,1,2",
    every: Annotated[int, option("Steps between observations.", LOOK, min=1)] = 10,
    snapshots: Annotated[
        int, option("Number of steps at which the gradient's noise is sampled.", LOOK, min=1)
    ] = 3,
    batches: Annotated[int, option("Batches per sampled step.", LOOK, min=8)] = 128,
    compressed_steps: Annotated[
        int, option("Training steps with each method and seed; 0 for none.", LOOK, min=0)
    ] = 20,
    strict: Annotated[
        bool,
        option("Exit code 1 if a theorem's bound is violated, or no theorem covers a method."),
    ] = False,
    data_dir: DataDir = None,
    out: Output,
) -> None:
    """Test papers' theorems and declared properties.

    Compressors run on known inputs, in compressed training, and on quadratics with known constants.

    --strict considers theorems alone, and fails for a method that no theorem covers (unless
    --claims selects theorems). A theorem fails only if the code or a method's claim is wrong. Your
    own method is tested against the claims that its class declares or inherits.
    """
    from gcbench.checks import bounds as measure
    from gcbench.core.errors import UsageError
    from gcbench.core.values import items_of
    from gcbench.report import analysis as measuring
    from gcbench.training import grid

    if quadratic_only:
        refuse_unused(ctx, QUADRATIC, "--quadratic-only")
    if methods is not None:
        items_of("--methods", methods)  # refuses empty ones
    options = grid.pairs("--task-set", task_set)
    if network is not None:
        options["network"] = network
    try:
        seeds = tuple(int(part) for part in seed.split(","))
    except ValueError:
        raise UsageError(f"--seed {seed}: numbers with commas expected, e.g. 0,1,2") from None
    settings = measure.make(
        task=task,
        task_options=options,
        compressor=compressor,
        workers=workers,
        steps=steps,
        batch=batch,
        lr=lr,
        seeds=seeds,
        every=every,
        snapshots=snapshots,
        batches=batches,
        compressed_steps=compressed_steps,
        methods=methods or "",
        claims=claims,
        quadratic_only=quadratic_only,
    )
    done = measure.finished(settings, out.results)
    if done is not None and not out.force:
        analysis = measuring.load(done)
        say(f"{done} is finished{analysis.elsewhere}; --force does it again")
    else:
        command = command_line()
        analysis = measure.run(
            settings, out.results, data_dir, out.progress.value, command=command, force=out.force
        )
    out.deliver(analysis)
    if strict and analysis.failed:
        say("a theorem's bound is violated; see the verdicts above")
        raise typer.Exit(1)
    if strict and (left := measure.unjudged(settings, analysis.table("claims").rows)):
        say(f"no theorem judged {', '.join(left)}; gcbench verify checks what a method declares")
        raise typer.Exit(1)
