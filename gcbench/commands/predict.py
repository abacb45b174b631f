"""`gcbench predict`: the time of a training step on a cluster, and on which links methods pay."""

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
    long_work,
    make,
    numbers,
)
from gcbench.core.errors import UsageError

Model = Annotated[
    str,
    typer.Option(
        help="alexnet, googlenet-slim, vgg-a, resnet20, resnet32, resnet50, bert-large, "
        "transformer-1.3b."
    ),
]
Module = Annotated[
    str | None,
    typer.Option(help="PACKAGE:CALLABLE that returns a torch module, instead of --model."),
]
CLUSTER_YAML = """
A cluster's YAML file has gpus_per_node, device (a name, or name, tflops and memory_gbyte), intra
and inter (the links inside and between nodes: gbit, latency_us). It may have transport (nccl, gloo,
or achieved if inter.gbit is a rate that collectives reached), nodes, utilization, overlap,
algorithm (ring, tree, fastest), topology (flat, nodes), buckets and price. For example:

gpus_per_node: 4 | device: a100 | intra: {gbit: 2400, latency_us: 5} | inter: {gbit: 10, latency_us:
30} (a line each)
"""
"""The format of a cluster's file, for the help of the commands that read one."""
Place = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="A .yaml file (its format is above), or one of gtx1080x4-1gbe, p100x4-100g, "
        "v100x8-25g, a100x1-10g, a100x8-25g, a100x8-100g, a100x8-1600g, h100x8-3200g, "
        "h100x8-100g, rtx4090x1-10g, rtx4090x1-1g, rtx4090x1-internet (GPU, GPUs per node, link "
        "between nodes), g5.48xlarge.",
    ),
]
PlaceSet = Annotated[
    list[str] | None,
    typer.Option(
        "--cluster-set", help="Change a setting of the cluster: price=2.5, inter.gbit=10."
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(help="Methods, e.g. terngrad,topk:ratio=0.001; default all."),
]
Batch = Annotated[
    int | None,
    typer.Option(
        help="Examples per GPU and step (sequences for transformers). The larger the batch, the "
        "less compression can gain. Default: the batch of the published throughput."
    ),
]
Compute = Annotated[
    float | None,
    typer.Option(
        help="Milliseconds of one GPU's forward and backward pass, if you measured it; default: "
        "from published throughput."
    ),
]
Overlap = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Share of the backward pass that can hide communication: 0 none, 1 as in DDP. "
        "Default: the cluster's.",
    ),
]
Sharded = Annotated[
    bool,
    typer.Option(
        "--sharded",
        help="FSDP: parameters are gathered in bf16 twice per step; only the reduce-scatter of "
        "gradients is compressed.",
    ),
]
DenseLast = Annotated[bool, typer.Option(help="Exchange the last layer in fp32.")]
DenseBelow = Annotated[int, typer.Option(help="Exchange tensors below this many elements in fp32.")]
Kernels = Annotated[
    str,
    typer.Option(
        help="Encoding times. assumed: a range, from the packaged measurement scaled to the GPU's "
        "memory bandwidth down to the least time that this bandwidth allows; or a file of `gcbench "
        "bandwidth --json` made on the machine in question."
    ),
]

FLAGS = {"compressors": "--compressor"}
"""Flags of settings whose flag is not their name."""


def compressed(specs: str | None) -> list[str]:
    """Return the specs of a list except `none`; without a list, of all methods.

    Raises:
        UsageError: see `methods.all_of`, or only `none` is listed.
    """
    from gcbench.studies import methods

    chosen = [spec for spec in methods.all_of(specs) if spec != "none"]
    if not chosen:
        raise UsageError(
            f"--compressor {specs}: `none` is the baseline; add a method, e.g. --compressor int8, "
            "or omit the flag for all methods"
        )
    return chosen


def cluster_changes(settings: list[str] | None, overlap: float | None) -> dict[str, Any]:
    """Return the cluster settings that the options change, as `clusters.load` takes them."""
    from gcbench.training import grid

    changes = dict(grid.pairs("--cluster-set", settings))
    return changes if overlap is None else {**changes, "overlap": overlap}


OUTPUT = {"results", "plot", "force", "progress", "format_", "json", "details"}
LINKS = {"links", "workers", "compressor", "kernels", "link_latency_us"}
VALIDATE = {"validate"}


def _refuse_unused(ctx: typer.Context, used: set[str], mode: str) -> None:
    """Refuse options that a mode does not use.

    Raises:
        UsageError: such an option was given.
    """
    for option in ctx.command.params:
        name = str(option.name)
        source = ctx.get_parameter_source(name)
        explicit = source is not None and source.name == "COMMANDLINE"
        if explicit and name not in used | OUTPUT:
            raise UsageError(f"{option.opts[0]} has no effect with {mode}; omit it")


def predict(
    ctx: typer.Context,
    model: Model = "resnet50",
    module: Module = None,
    cluster: Place = "v100x8-25g",
    cluster_set: PlaceSet = None,
    compressor: Methods = None,
    collective: Annotated[
        str | None,
        typer.Option(help="allreduce, allgather, twoshot, ring or sparse; default: the method's."),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            help="Numbers of GPUs, up to 100000.",
            show_default="8,64,512; with --links that of the measurement",
        ),
    ] = None,
    batch: Batch = None,
    compute_ms: Compute = None,
    overlap: Overlap = None,
    sharded: Sharded = False,
    dense_last: DenseLast = False,
    dense_below: DenseBelow = 0,
    kernels: Kernels = "assumed",
    links: Annotated[
        bool,
        typer.Option(
            "--links", help="On which links each method pays, as an exchange without a model."
        ),
    ] = False,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Compare predictions with measured times: public ones, and those of netlab.",
        ),
    ] = False,
    link_latency_us: Annotated[
        float, typer.Option(min=0, help="With --links: latency per message.")
    ] = 50.0,
    details: Details = False,
    format_: Formatted = Format.table,
    plot: Plot = None,
    results: Results = ANALYSES,
    progress: Shown = Progress.auto,
    force: Force = False,
    json: Json = False,
) -> None:
    """Predict step times on a cluster: with speedup and cost, for each method."""
    from gcbench.predict import clusters, prediction, validation
    from gcbench.predict import links as break_even
    from gcbench.studies import methods

    study: Any
    if validate:
        _refuse_unused(ctx, VALIDATE, "--validate")
        study, settings, steps = validation, validation.settings(), 1
    elif links:
        _refuse_unused(ctx, LINKS, "--links")
        chosen = compressed(compressor)
        study, measured = break_even, break_even.measurement(kernels)
        settings = make(
            break_even.Settings,
            FLAGS,
            kernels=kernels,
            compressors=chosen,
            workers=numbers("--workers", workers, int) if workers else [],
            link_latency_us=link_latency_us,
            measured=f"{measured.analysis.name}, {measured.analysis.provenance.get('started')}",
        )
        steps = max(1, len(settings.workers))
    else:
        if link_latency_us != 50.0:
            raise UsageError(
                "--link-latency-us needs --links; to change the cluster use --cluster-set "
                "inter.latency_us=10"
            )
        chosen = list(methods.all_of(compressor))
        study, steps = prediction, len(chosen)
        settings = make(
            prediction.Settings,
            FLAGS,
            model=model,
            module=module,
            compressors=chosen,
            collective=collective,
            workers=numbers("--workers", workers or "8,64,512", int),
            cluster=clusters.load(cluster, cluster_changes(cluster_set, overlap)),
            batch=batch,
            compute_ms=compute_ms,
            dense_last=dense_last,
            dense_below=dense_below,
            sharded=sharded,
            kernels=kernels,
        )
    analysis = long_work(study.KIND, settings, results, progress, steps, study.run, force=force)
    deliver(analysis, results, plot, format_, as_json=json, details=details)


predict.__doc__ = f"{predict.__doc__}\n{CLUSTER_YAML}"
