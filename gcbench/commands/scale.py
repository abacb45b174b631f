"""`gcbench scale`: performance models of clusters, and how well they predict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gcbench.commands import (
    ANALYSES,
    RUNS,
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

app = typer.Typer(
    no_args_is_help=True,
    help="Model the time of a training step on clusters, from packed bytes and measured codecs.",
)

Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of the kernels; default all cores.")
]


Model = Annotated[
    str,
    typer.Option(
        help="alexnet, googlenet, googlenet-slim, vgg-a, resnet20, resnet32, resnet50, "
        "bert-large, transformer-1.3b."
    ),
]
Module = Annotated[
    str | None,
    typer.Option(help="PACKAGE:CALLABLE that returns any torch module, in place of --model."),
]
Place = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="A .yaml file, or one of gtx1080x4-1gbe, p100x4-100g, v100x8-25g, a100x1-10g, "
        "a100x8-25g, a100x8-100g, a100x8-1600g, h100x8-3200g: GPU, GPUs in a node, link between "
        "nodes.",
    ),
]
PlaceSet = Annotated[
    list[str] | None,
    typer.Option(
        "--cluster-set", help="A setting of the cluster, e.g. price=2.5 or inter.gbit=10."
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(help="Methods, e.g. terngrad,topk:ratio=0.001; default all."),
]
Batch = Annotated[
    int | None,
    typer.Option(
        help="Examples of one GPU in a step (for the transformers: sequences). The larger the "
        "batch, the less compression can gain. Default: that of the published throughput."
    ),
]
Compute = Annotated[
    float | None,
    typer.Option(
        help="Milliseconds of one GPU's forward and backward pass, measured by you, in place of a "
        "published throughput."
    ),
]
Overlap = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Share of the backward pass that can hide communication; 0: none, 1: as with DDP's "
        "buckets. Default the cluster's.",
    ),
]
Sharded = Annotated[
    bool,
    typer.Option(
        "--sharded",
        help="FSDP: bf16 parameters are gathered twice a step and gradients reduce-scattered; "
        "only the gradients are compressed.",
    ),
]
DenseLast = Annotated[bool, typer.Option(help="Exchange the last layer in fp32.")]
DenseBelow = Annotated[int, typer.Option(help="Exchange tensors below this many elements in fp32.")]
Kernels = Annotated[
    str,
    typer.Option(
        help="Where times of encoding and decoding come from. assumed: a range, from the stored "
        "measurement scaled to the GPU's memory bandwidth down to the least that this bandwidth "
        "allows; measured: timed on this machine now; or a file of `gcbench bandwidth --json` or "
        "`make bench`, made on the machine in question."
    ),
]


FLAGS = {"compressors": "--compressor", "code_bits": "--bits"}
"""Flags of settings that have another name than theirs."""


def compressed(words: str | None) -> list[str]:
    """Return the methods of a list but `none`, by their words; without a list all of them.

    Raises:
        UsageError: see `methods.all_of`, or none is left.
    """
    from gcbench.studies import methods

    chosen = [word for word in methods.all_of(words) if word != "none"]
    if not chosen:
        raise UsageError(
            f"--compressor {words}: `none` is what methods are compared with; name a method, e.g. "
            "--compressor int8, or leave it out for all"
        )
    return chosen


def cluster_changes(settings: list[str] | None, overlap: float | None) -> dict[str, Any]:
    """Return the settings of a cluster that the options change, as `clusters.load` takes them."""
    from gcbench.training import grid

    changes = dict(grid.pairs("--cluster-set", settings))
    return changes if overlap is None else {**changes, "overlap": overlap}


Stored = Annotated[
    str,
    typer.Option(
        help="Times of codecs inside an exchange: stored (a measurement in the package), or a "
        "file of `gcbench bandwidth --json`."
    ),
]
Latency = Annotated[float, typer.Option(min=0, help="Latency of the link in microseconds.")]


@app.command()
def predict(
    model: Model = "resnet50",
    module: Module = None,
    cluster: Place = "v100x8-25g",
    cluster_set: PlaceSet = None,
    compressor: Methods = None,
    collective: Annotated[
        str | None, typer.Option(help="allreduce, allgather or twoshot; default the method's.")
    ] = None,
    workers: Annotated[
        str, typer.Option(help="Numbers of GPUs, e.g. 8,64, up to 100000.")
    ] = "8,64,512",
    batch: Batch = None,
    compute_ms: Compute = None,
    overlap: Overlap = None,
    sharded: Sharded = False,
    dense_last: DenseLast = False,
    dense_below: DenseBelow = 0,
    kernels: Kernels = "assumed",
    threads: Threads = None,
    format_: Formatted = Format.table,
    plot: Plot = None,
    results: Results = ANALYSES,
    progress: Shown = Progress.auto,
    force: Force = False,
    json: Json = False,
) -> None:
    """Predict a step's time, speedup and cost on a cluster, for each method.

    A cluster's YAML file has gpus_per_node, device (a name, or name, tflops and memory_gbyte),
    intra and inter (the links inside and between nodes: gbit, latency_us), and may have nodes,
    utilization, overlap, algorithm (ring, tree, fastest), topology (flat, nodes), buckets, price.
    """
    from gcbench.studies import methods
    from gcbench.studies.scale import clusters, prediction
    from gcbench.training import configuration

    chosen = list(methods.all_of(compressor))
    settings = make(
        prediction.Settings,
        FLAGS,
        model=model,
        module=module,
        compressors=chosen,
        collective=collective,
        workers=numbers("--workers", workers, int),
        cluster=clusters.load(cluster, cluster_changes(cluster_set, overlap)),
        batch=batch,
        compute_ms=compute_ms,
        dense_last=dense_last,
        dense_below=dense_below,
        sharded=sharded,
        kernels=kernels,
        threads=threads or configuration.cores(),
    )
    made = long_work(
        prediction.KIND, settings, results, progress, len(chosen), prediction.run, force=force
    )
    deliver(made, results, plot, format_, as_json=json)


@app.command("links")
def pays(
    workers: Annotated[
        str, typer.Option(help="Numbers of GPUs, e.g. 8,64; default that of the measurement.")
    ] = "",
    compressor: Annotated[
        str | None, typer.Option(help="Methods, e.g. terngrad,topk:ratio=0.001; default all.")
    ] = None,
    kernels: Stored = "stored",
    link_latency_us: Latency = 50.0,
    format_: Formatted = Format.table,
    plot: Plot = None,
    results: Results = ANALYSES,
    progress: Shown = Progress.auto,
    force: Force = False,
    json: Json = False,
) -> None:
    """Tell on which links each method pays, from what was measured inside exchanges.

    Definition and measurement are those of `gcbench bandwidth` and `advise`. Here, as in
    `bandwidth`, an exchange is judged alone; `advise` judges a training step, whose backward pass
    hides communication.
    """
    from gcbench.studies.scale import links

    chosen = compressed(compressor)
    known = links.measurement(kernels)
    settings = make(
        links.Settings,
        FLAGS,
        kernels=kernels,
        compressors=chosen,
        workers=numbers("--workers", workers, int) if workers.strip() else [],
        link_latency_us=link_latency_us,
        measured=f"{known.analysis.name}, {known.analysis.provenance.get('started')}",
    )
    made = long_work(
        links.KIND, settings, results, progress, max(1, len(settings.workers)), links.run,
        force=force,
    )  # fmt: skip
    deliver(made, results, plot, format_, as_json=json)


@app.command()
def validate(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs, folders of runs, or files of rows (.json, .parquet)."),
    ] = None,
    kernels: Annotated[
        str,
        typer.Option(
            help="Times of the kernels. measured: on this machine now; or a file of `make bench`."
        ),
    ] = "measured",
    link_gbit: Annotated[
        float | None,
        typer.Option(
            help="Gbit/s of the link between real processes; default fitted to the other runs."
        ),
    ] = None,
    link_latency_us: Annotated[float, typer.Option(help="Its latency in microseconds.")] = 0.0,
    format_: Formatted = Format.table,
    plot: Plot = None,
    results: Results = ANALYSES,
    progress: Shown = Progress.auto,
    force: Force = False,
    json: Json = False,
) -> None:
    """Predict finished runs, each without using its own times, and state the errors."""
    from gcbench.results import reader
    from gcbench.studies.scale import validation

    folders = runs or [RUNS]
    found = reader.load(folders)
    settings = make(
        validation.Settings,
        FLAGS,
        runs=[str(folder) for folder in folders],
        hashes=sorted(f"{run.summary.config_hash}-{run.summary.seed}" for run in found),
        kernels=kernels,
        link_gbit=link_gbit,
        link_latency_us=link_latency_us,
    )
    made = long_work(
        validation.KIND, settings, results, progress, len(found), validation.run, force=force
    )
    deliver(made, results, plot, format_, as_json=json)
