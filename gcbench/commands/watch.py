"""`gcbench watch`: what a user's own training job sends, and whether its ranks agree."""

from __future__ import annotations

from typing import Annotated

import typer

from gcbench.commands import Details, Format, Formatted, Json, command_line, make, option
from gcbench.core import output


def watch(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND ...", help="The job: -- torchrun ... train.py."),
    ],
    expect: Annotated[
        str,
        option(
            "DTYPE, DTYPE/BYTES or /BYTES: exit code 1 if less than 95 % of the bytes have "
            "this dtype, or if a rank sends more bytes per step."
        ),
    ] = "",
    check_every: Annotated[
        int, typer.Option(min=1, help="Compare every N-th result, and parameters every N-th step.")
    ] = 10,
    sharded: Annotated[
        bool, typer.Option("--sharded", help="Do not compare parameters: they differ by design.")
    ] = False,
    details: Details = False,
    format_: Formatted = Format.table,
    json: Json = False,
) -> None:
    """Run a distributed job and show its collectives; exit code 1 if a check fails.

    It checks that all ranks have the same bits, that the traffic matches --expect, and that a
    gcbench hook of the job carries the gradients:

    gcbench watch --expect bfloat16 -- torchrun --nproc-per-node 4 train.py
    """
    from gcbench import watch as watching
    from gcbench.report import analysis as measuring

    settings = make(
        watching.Settings,
        {"every": "--check-every"},
        command=command,
        expect=expect,
        every=check_every,
        sharded=sharded,
    )
    result = watching.run(settings, command_line())
    output.emit(measuring.render(result, "json" if json else format_.value, details=details))
    if result.failed:
        raise typer.Exit(1)
