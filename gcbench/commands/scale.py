"""`gcbench scale`: performance models of clusters, and how well they predict."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gcbench.commands import (
    ANALYSES,
    Force,
    Format,
    Formatted,
    Json,
    Plot,
    Progress,
    Results,
    Shown,
    deliver,
)
from gcbench.errors import UsageError

if TYPE_CHECKING:
    from gcbench import progress
    from gcbench.measure.analysis import Analysis, Ledger

app = typer.Typer(
    no_args_is_help=True,
    help="Model the time of a step on clusters: bytes as they are packed, kernels as measured.",
)

Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of the kernels; default the cores.")
]
KERNELS = "results/kernels.json"


def _command() -> str:
    return shlex.join(["gcbench", *sys.argv[1:]])


def _numbers(flag: str, text: str, cast: Callable[[float], Any]) -> list[Any]:
    """Return the numbers of a list with commas, each once; 1e3 is 1000.

    Raises:
        UsageError: a word is no number above 0.
    """
    found = []
    for word in filter(None, (piece.strip() for piece in text.split(","))):
        value = -1.0
        with suppress(ValueError):
            value = float(word)
        if not 0 < value < math.inf or (cast is int and value != int(value)):
            kind = "whole numbers" if cast is int else "numbers"
            raise UsageError(
                f"{flag} {text!r}: {kind} above 0 with commas expected ({word!r} came), e.g. 8,64"
            )
        found.append(cast(value))
    if not found:
        raise UsageError(f"{flag}: at least one number expected, e.g. {flag} 8,64")
    return list(dict.fromkeys(found))


def _make(kind: type[Any], /, **given: Any) -> Any:
    """Return the settings, a flag's name in the error of one that is out of range."""
    from pydantic import ValidationError

    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors()[0]
        flag = "--" + str(first["loc"][0]).replace("_", "-").removesuffix("s")
        if f"{flag[2:]}s" in ("workers", "kernels", "threads"):
            flag += "s"
        raise UsageError(f"{flag}: {first['msg']} (came: {first['input']!r})") from None


def _long(
    kind: str,
    settings: Any,
    results: Path,
    shown: Progress,
    steps: int,
    work: Callable[[Any, str, progress.Observer, Ledger], Analysis],
    *,
    force: bool,
) -> Analysis:
    """Run work that keeps a ledger, with progress."""
    from gcbench import progress
    from gcbench.measure import analysis as measuring

    name = f"{kind}-{measuring.digest(settings.model_dump(mode='json'))}"
    observer = progress.observer(shown.value, name, steps)
    try:
        with measuring.Ledger(results / name).open(afresh=force) as ledger:
            return work(settings, _command(), observer, ledger)
    finally:
        observer.close()
        with suppress(OSError):  # what was refused leaves no folder behind
            path = results / name / measuring.LEDGER
            if not path.stat().st_size:
                path.unlink()
                path.parent.rmdir()


@app.command()
def predict(
    model: Annotated[
        str,
        typer.Option(
            help="alexnet, googlenet, googlenet-slim, vgg-a, resnet20, resnet32, resnet50, "
            "transformer-1.3b."
        ),
    ] = "resnet50",
    module: Annotated[
        str | None,
        typer.Option(help="PACKAGE:CALLABLE that returns any torch module, in place of --model."),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            help="A .yaml file, or gtx1080-1gbe, p100-100g, v100-25g, a100-10g, a100-1600g, "
            "h100-3200g."
        ),
    ] = "v100-25g",
    cluster_set: Annotated[
        list[str] | None,
        typer.Option(help="A setting of the cluster, e.g. overlap=0.5 or inter.gbit=10."),
    ] = None,
    compressor: Annotated[
        str | None,
        typer.Option(help="Methods with commas, e.g. terngrad,topk:ratio=0.001; default all."),
    ] = None,
    collective: Annotated[
        str | None, typer.Option(help="allreduce, allgather or twoshot; default the method's.")
    ] = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers, up to 100000.")] = "8,64,512",
    batch: Annotated[int | None, typer.Option(help="Examples of a worker in a step.")] = None,
    compute_ms: Annotated[
        float | None,
        typer.Option(help="Milliseconds of a worker's forward and backward pass, measured."),
    ] = None,
    dense_last: Annotated[bool, typer.Option(help="Keep the last layer dense.")] = False,
    dense_below: Annotated[
        int, typer.Option(help="Keep tensors below this many elements dense.")
    ] = 0,
    kernels: Annotated[
        str,
        typer.Option(
            help="assumed: the floor of the device's memory; measured: here and now; or a file of "
            "`make bench`."
        ),
    ] = "assumed",
    threads: Threads = None,
    format_: Formatted = Format.table,
    plot: Plot = None,
    results: Results = ANALYSES,
    progress: Shown = Progress.auto,
    force: Force = False,
    json: Json = False,
) -> None:
    """Predict a step's time, speedup and cost on a cluster, for each method.

    A cluster's YAML has gpus_per_node, device (a name, or name, tflops, memory_gbyte), intra and
    inter (gbit, latency_us), and may have nodes, utilization, overlap, algorithm (ring, tree,
    fastest), topology (flat, nodes), buckets, price.
    """
    from gcbench import experiment, grid, pictures
    from gcbench.measure import methods
    from gcbench.measure.scale import clusters, prediction

    if plot is not None:
        pictures.check(plot)
    chosen = list(methods.all_of(compressor))
    settings = _make(
        prediction.Settings,
        model=model,
        module=module,
        compressors=chosen,
        collective=collective,
        workers=_numbers("--workers", workers, int),
        cluster=clusters.load(cluster, grid.pairs("--cluster-set", cluster_set)),
        batch=batch,
        compute_ms=compute_ms,
        dense_last=dense_last,
        dense_below=dense_below,
        kernels=kernels,
        threads=threads or experiment.cores(),
    )
    made = _long(
        prediction.KIND, settings, results, progress, len(chosen), prediction.run, force=force
    )
    deliver(made, results, plot, format_, as_json=json)


@app.command()
def figure5(
    compressor: Annotated[
        str,
        typer.Option(help="Methods with commas that are put beside the bars; '' for none."),
    ] = "terngrad,topk",
    collective: Annotated[
        str | None, typer.Option(help="allreduce, allgather or twoshot; default the method's.")
    ] = None,
    format_: Formatted = Format.table,
    plot: Plot = None,
    results: Results = ANALYSES,
    json: Json = False,
) -> None:
    """Hold a model to TernGrad's Fig. 5: three networks, two clusters, 1 to 512 GPUs."""
    from gcbench import pictures
    from gcbench.measure import methods
    from gcbench.measure.scale import figure5 as published

    if plot is not None:
        pictures.check(plot)
    chosen = list(methods.all_of(compressor)) if compressor.strip() else []
    settings = _make(published.Settings, compressors=chosen, collective=collective)
    deliver(published.run(settings, _command()), results, plot, format_, as_json=json)


@app.command()
def fft(
    throughput: Annotated[
        list[str] | None,
        typer.Option(help="Given GB/s in place of timing: Tm=300, Tf=70, Tp=34, Ts=55; all four."),
    ] = None,
    theta: Annotated[float, typer.Option(help="Share of the bins that is dropped.")] = 0.85,
    bits: Annotated[int, typer.Option(help="Bits of a code.")] = 10,
    mantissa: Annotated[int, typer.Option(help="Bits of its mantissa.")] = 5,
    granularity: Annotated[
        str, typer.Option(help="model (as published), tensor, or a group size.")
    ] = "model",
    links: Annotated[str, typer.Option(help="Links in Gbit/s.")] = "1,10,25,40,56,100,400",
    workers: Annotated[int, typer.Option(help="Workers of the methods' table.")] = 8,
    compressor: Annotated[
        str | None, typer.Option(help="Methods of that table, with commas; default all.")
    ] = None,
    kernels: Annotated[
        str, typer.Option(help="For that table: measured here and now, or a file of `make bench`.")
    ] = "measured",
    elements: Annotated[
        str, typer.Option(help="Elements of the timed gradient, in thousands.")
    ] = "1e6",
    threads: Threads = None,
    format_: Formatted = Format.table,
    plot: Plot = None,
    results: Results = ANALYSES,
    progress: Shown = Progress.auto,
    force: Force = False,
    json: Json = False,
) -> None:
    """Evaluate FFT sparsification's cost model: the least ratio, the fastest link that pays."""
    from gcbench import experiment, grid, pictures
    from gcbench.errors import unknown
    from gcbench.measure import methods
    from gcbench.measure.scale import breakeven

    if plot is not None:
        pictures.check(plot)
    given = grid.pairs("--throughput", throughput)
    for stage in given:
        if stage not in breakeven.STAGES:
            raise unknown("throughput", stage, breakeven.STAGES)
    if given and len(given) < len(breakeven.STAGES):
        missing = ", ".join(stage for stage in breakeven.STAGES if stage not in given)
        raise UsageError(f"--throughput: {missing} missing; give all four, or none to time them")
    chosen = list(methods.all_of(compressor))
    settings = _make(
        breakeven.Settings,
        theta=theta,
        code_bits=bits,
        mantissa=mantissa,
        granularity=grid.value(granularity),
        elements=_numbers("--elements", elements, int)[0],
        threads=threads or experiment.cores(),
        throughput=given,
        links=_numbers("--links", links, float),
        workers=workers,
        compressors=chosen,
        kernels=kernels,
    )
    made = _long(
        breakeven.KIND, settings, results, progress, len(chosen) + 2, breakeven.run, force=force
    )
    deliver(made, results, plot, format_, as_json=json)


@app.command()
def validate(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Runs, folders of runs, or JSON files of rows.")
    ] = None,
    kernels: Annotated[
        str, typer.Option(help="measured: here and now; or a file of `make bench`.")
    ] = "measured",
    link_gbit: Annotated[
        float | None,
        typer.Option(help="The link between real processes; default fitted to the other runs."),
    ] = None,
    link_latency_us: Annotated[float, typer.Option(help="Its latency.")] = 0.0,
    format_: Formatted = Format.table,
    plot: Plot = None,
    results: Results = ANALYSES,
    progress: Shown = Progress.auto,
    force: Force = False,
    json: Json = False,
) -> None:
    """Predict finished runs, none from itself, and state the errors."""
    from gcbench import finished, pictures
    from gcbench.measure.scale import validation

    if plot is not None:
        pictures.check(plot)
    folders = runs or [Path("results/runs")]
    found = finished.load(folders)
    settings = _make(
        validation.Settings,
        runs=[str(folder) for folder in folders],
        hashes=sorted(f"{run.summary.config_hash}-{run.summary.seed}" for run in found),
        kernels=kernels,
        link_gbit=link_gbit,
        link_latency_us=link_latency_us,
    )
    made = _long(
        validation.KIND, settings, results, progress, len(found), validation.run, force=force
    )
    deliver(made, results, plot, format_, as_json=json)
