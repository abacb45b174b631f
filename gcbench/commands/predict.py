"""`gcbench predict`: the time of a training step on a cluster, and on which links methods pay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from gcbench.commands import Output, make, numbers, option, refuse_unused, with_groups
from gcbench.core.errors import UsageError

if TYPE_CHECKING:
    from gcbench.predict.clusters import Cluster

CLUSTER_YAML = """
A cluster's YAML file has gpus_per_node, device (a name, or name, tflops and memory_gbyte), intra
and inter (the links inside and between nodes: gbit, latency_us). It may have transport (nccl, gloo,
or achieved if inter.gbit is a rate that collectives reached), nodes, utilization, overlap,
algorithm (ring, tree, fastest), topology (flat, nodes), buckets and price. For example:

gpus_per_node: 4 | device: a100 | intra: {gbit: 2400, latency_us: 5} | inter: {gbit: 10, latency_us:
30} (a line each)
"""
"""The format of a cluster's file, for the help of the commands that read one."""


class Job(NamedTuple):
    """A training job on a cluster: the flags that `predict` and `advise` share."""

    model: Annotated[
        str,
        option(
            "alexnet, googlenet-slim, vgg-a, resnet20, resnet32, resnet50, bert-large, "
            "transformer-1.3b."
        ),
    ] = "resnet50"
    module: Annotated[
        str | None, option("PACKAGE:CALLABLE that returns a torch module, instead of --model.")
    ] = None
    cluster: Annotated[
        str,
        option(
            "A .yaml file (its format is above), or one of gtx1080x4-1gbe, p100x4-100g, "
            "v100x8-25g, a100x1-10g, a100x8-25g, a100x8-100g, a100x8-1600g, h100x8-3200g, "
            "h100x8-100g, rtx4090x1-10g, rtx4090x1-1g, rtx4090x1-internet (GPU, GPUs per node, "
            "link between nodes), g5.48xlarge."
        ),
    ] = "v100x8-25g"
    cluster_set: Annotated[
        list[str] | None, option("Change a setting of the cluster: price=2.5, inter.gbit=10.")
    ] = None
    compressor: Annotated[
        str | None, option("Methods, e.g. terngrad,topk:ratio=0.001; default all.")
    ] = None
    batch: Annotated[
        int | None,
        option(
            "Examples per GPU and step (sequences for transformers). The larger the batch, "
            "the less compression can gain. Default: the batch of the published throughput."
        ),
    ] = None
    compute_ms: Annotated[
        float | None,
        option(
            "Measured milliseconds of one GPU's forward and backward pass. Default: from "
            "published throughput."
        ),
    ] = None
    overlap: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of the backward pass that can hide communication: 0 none, 1 as in DDP. "
            "Default: the cluster's.",
        ),
    ] = None
    sharded: Annotated[
        bool,
        typer.Option(
            "--sharded",
            help="FSDP: parameters are gathered in bf16 twice per step; only the reduce-scatter "
            "of gradients is compressed.",
        ),
    ] = False
    dense_last: Annotated[bool, option("Exchange the last layer in fp32.")] = False
    dense_below: Annotated[int, option("Exchange tensors below this many elements in fp32.")] = 0
    kernels: Annotated[
        str,
        option(
            "Encoding times: a file of `gcbench bandwidth --json` from your machine; or assumed: "
            "from the packaged times of a CPU, scaled to the GPU's memory bandwidth, down to the "
            "least time that it allows."
        ),
    ] = "assumed"

    def place(self, changes: Mapping[str, Any] | None = None) -> Cluster:
        """Return the cluster with `changes`, as `clusters.load` has them, and those of the flags.

        Raises:
            UsageError: see `clusters.load`; or a setting is given by two flags.
        """
        from gcbench.predict import clusters
        from gcbench.training import grid

        updates = dict(grid.pairs("--cluster-set", self.cluster_set))
        if self.overlap is not None:
            if "overlap" in updates:
                raise UsageError(
                    f"--overlap {self.overlap:g} and --cluster-set overlap={updates['overlap']} "
                    "set the same: give one"
                )
            updates["overlap"] = self.overlap
        return clusters.load(self.cluster, {**(changes or {}), **updates})

    def settings(self, kind: Any, changes: Mapping[str, Any], **more: Any) -> Any:
        """Return settings of class `kind`; `changes`: see `place`.

        Raises:
            UsageError: a value is out of range, or given by two flags.
        """
        fields = ("model", "module", "batch", "compute_ms", "sharded", "dense_last", "dense_below")
        fields_of_job = {name: getattr(self, name) for name in (*fields, "kernels")}
        return make(kind, FLAGS, **{**fields_of_job, "cluster": self.place(changes), **more})


FLAGS = {"compressors": "--compressor"}
"""Flags of settings whose flag is not their name."""


def compressed(specs: str | None) -> list[str]:
    """Return the specs of a list except `none`; without a list, of all methods.

    Raises:
        UsageError: see `methods.all_of`, or only `none` is listed.
    """
    from gcbench.training import methods

    chosen = [spec for spec in methods.all_of(specs) if spec != "none"]
    if not chosen:
        raise UsageError(
            f"--compressor {specs}: `none` is the baseline; add a method, e.g. --compressor int8, "
            "or omit the flag for all methods"
        )
    return chosen


LINKS = {"links", "workers", "compressor", "kernels", "link_latency_us"}
VALIDATE = {"validate"}


@with_groups
def predict(
    ctx: typer.Context,
    *,
    job: Job,
    collective: Annotated[
        str | None, option("allreduce, allgather, twoshot, ring or sparse; default: the method's.")
    ] = None,
    workers: Annotated[
        str | None,
        option(
            "Numbers of GPUs, up to 100000.",
            show_default="8,64,512; with --links: as measured",
        ),
    ] = None,
    links: Annotated[
        bool,
        typer.Option(
            "--links", help="Show the link rates at which each method pays, for an exchange alone."
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
    out: Output,
) -> None:
    """Predict step times on a cluster: speedup and cost of each method."""
    from gcbench.predict import links as break_even
    from gcbench.predict import prediction, validation
    from gcbench.training import methods

    study: Any
    if validate:
        refuse_unused(ctx, VALIDATE, "--validate")
        study, settings, steps = validation, validation.settings(), 1
    elif links:
        refuse_unused(ctx, LINKS, "--links")
        chosen = compressed(job.compressor)  # first: a measurement's times are of known methods
        study, measured = break_even, break_even.measurement(job.kernels)
        settings = make(
            break_even.Settings,
            FLAGS,
            kernels=job.kernels,
            compressors=chosen,
            workers=numbers("--workers", workers) if workers is not None else [],
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
        chosen = list(methods.all_of(job.compressor))
        study, steps = prediction, len(chosen)
        counts = numbers("--workers", "8,64,512" if workers is None else workers)
        settings = job.settings(
            prediction.Settings, {}, compressors=chosen, collective=collective, workers=counts
        )
    out.deliver(out.run(study, settings, steps))


predict.__doc__ = f"{predict.__doc__}\n{CLUSTER_YAML}"
