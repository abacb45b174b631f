"""`gcbench netlab`: training over real links of a chosen rate, on one machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gcbench.commands import Output, make, option, with_groups
from gcbench.core.errors import UsageError
from gcbench.core.values import items_of
from gcbench.results.settings import Settings


def _sources(compressors: Sequence[str], arguments: Sequence[str]) -> dict[str, str]:
    """Return digests of the compressors' code, and of the files that the other words name.

    Those that a --config file names are among them.

    Raises:
        UsageError: an unknown compressor, or a file that cannot be registered.
    """
    from gcbench import netlab as lab
    from gcbench.core import files, registry
    from gcbench.training import grid

    digests = {}
    for spec in compressors:
        name, _ = grid.method(spec)
        registry.compressor_class(name)
        digests[spec] = registry.source_digest(name)
    for word in arguments:
        path = Path(word.rpartition("=")[2])
        if path.is_file():
            digests[word] = files.hash_file(path)
    for key, values in lab.file_settings(arguments).items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, str) and Path(value).is_file():
                digests[f"{key}: {value}"] = files.hash_file(Path(value))
    return digests


def _check_runs(compressors: Sequence[str], words: Sequence[str], workers: int) -> None:
    """Check before a lab is made that `gcbench run` makes one run per compressor of these words.

    Raises:
        UsageError: the words make several runs, or settings that `run` refuses.
        click.UsageError: a flag that `run` does not have.
    """
    from gcbench.commands import run
    from gcbench.training import grid

    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(run.run)
    values = typer.main.get_command(app).make_context("gcbench run", list(words)).params
    settings = {k: v for k, v in values.items() if k in Settings.model_fields and v is not None}
    for spec in compressors:
        one = {**settings, "compressor": spec, "workers": str(workers)}
        configs = grid.expand(run.values_of(one, values["network"]), values["config"])
        if len(configs) != 1:
            raise UsageError(
                f"netlab measures one run per method and link, and `{shlex.join(words)}` makes "
                f"{len(configs)} with {spec}: give each setting one value, e.g. --seed 0"
            )


@with_groups
def netlab(
    *,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- run ...", help="A `gcbench run` command, after `--`, without --workers."
        ),
    ],
    nodes: Annotated[
        int | None, typer.Option(min=2, help="Nodes; default: as many as workers.")
    ] = None,
    workers_per_node: Annotated[
        int, typer.Option(min=1, help="Workers on each node; they share its fast local link.")
    ] = 1,
    workers: Annotated[
        int | None, typer.Option(min=2, help="Total workers. Default: 4, or those of the nodes.")
    ] = None,
    bandwidth: Annotated[
        str, option("Rates of each node's link: 100mbit,1gbit, or unlimited.")
    ] = "100mbit,1gbit",
    delay: Annotated[str, option("One-way delays: 0,5ms. Needs the kernel's netem.")] = "0",
    loss: Annotated[str, option("Packet loss rates: 0,0.01. Needs the kernel's netem.")] = "0",
    out: Output,
) -> None:
    """Train over real links of chosen rates: between network namespaces of one machine.

    Needs Linux, and root or unprivileged user namespaces:

    gcbench netlab --workers 4 --bandwidth 100mbit,1gbit -- run --compressor none,bf16,terngrad
    """
    from gcbench import netlab as lab
    from gcbench.report import analysis as measuring

    if nodes is None:
        nodes, rest = divmod(workers or 4 * workers_per_node, workers_per_node)
        if rest:
            raise UsageError(
                f"--workers {workers}: expected a multiple of --workers-per-node {workers_per_node}"
            )
    elif workers not in (None, nodes * workers_per_node):
        raise UsageError(
            f"--workers {workers} with --nodes {nodes} --workers-per-node {workers_per_node}: "
            f"expected {nodes * workers_per_node}; leave --workers out"
        )
    compressors, arguments = lab.split(command)
    _check_runs(compressors, arguments, nodes * workers_per_node)
    settings = make(
        lab.Settings,
        {"compressors": "--compressor"},
        nodes=nodes,
        workers_per_node=workers_per_node,
        bandwidth=items_of("--bandwidth", bandwidth),
        delay=items_of("--delay", delay),
        loss=items_of("--loss", loss),
        compressors=compressors,
        arguments=arguments,
        sources=_sources(compressors, arguments),
    )
    settings.links()  # raises before any work
    out.deliver(out.run(lab, settings, lab.steps(settings), measuring.code(lab)))
