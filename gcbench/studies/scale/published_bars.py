"""Predictions compared with the bars of TernGrad's Fig. 5, for their clusters and networks.

The model of `figure5` is fitted to the bars; a prediction is not. The difference between the two is
split into parts, in seconds of a step, by changing one term after the other:

    model       T(4 GPUs) + V(nodes) h G r of `figure5`, with r as published
    gradient    + all of the gradient G is sent, in place of the share h that fits the bars
    links       + a ring over one effective link, in place of V, which is free at each size
    messages    + the bytes that the method hands to collectives, and latencies, in place of r
    node        + one GPU's rate, the sum inside a node, encoding and decoding, in place of T

The sum of the parts is the prediction.
"""

from __future__ import annotations

from collections.abc import Sequence

from gcbench.reporting.analysis import Row, Shown, Table
from gcbench.studies.scale import clusters, figure5, traffic
from gcbench.studies.scale.clusters import Cluster
from gcbench.studies.scale.networks import Network

PRESETS = {"gtx1080x4-1gbe": "1g", "p100x4-100g": "100g"}
"""Name of a cluster in `clusters` -> its name in `figure5`."""
OWN_MESSAGES = 0.1
"""The conclusions mention the part `messages` if it is at least this share of a step."""
PARTS = ("model", "gradient", "links", "messages", "node")


def place(cluster: Cluster) -> str | None:
    """Return the name of a cluster in `figure5`; None if it is not there, or was changed."""
    name = PRESETS.get(cluster.name)
    return name if name and cluster == clusters.load(cluster.name) else None


def compare(
    cluster: Cluster, network: Network, batch: int | None, rows: Sequence[Row]
) -> list[Row]:
    """Return a row for each prediction that has a published bar; none for other clusters.

    `rows` are those of `prediction.run` for this cluster, network and batch. A row of the result
    has images a second, and seconds of a step by `PARTS`.
    """
    where = place(cluster)
    if where is None or batch is None or figure5.NETWORKS.get(network.name) != batch:
        return []
    fitted, size = figure5.fit(where), figure5.gbit(network.name)
    needed = fitted.needed[network.name]
    made: list[Row] = []
    for row in rows:
        workers, word = int(row["workers"] or 0), str(row["method"])
        bar = {"none": "fp32", "terngrad": "terngrad"}.get(word.partition(":")[0])
        known = bar is not None and row["refused"] is None and workers > figure5.NODE
        if bar is None or not known or workers not in figure5.GPUS:
            continue
        seconds = {
            field: float(row[f"{field}_seconds"] or 0)
            for field in ("compute", "encode", "decode", "communicate", "step")
        }
        nodes = workers // figure5.NODE
        sent = size * (1.0 if bar == "fp32" else figure5.paper_share(network.name))
        inside = 0.0
        if row["topology"] == "nodes":
            inside = cluster.inside_seconds(traffic.dense_bytes(network.shapes), workers)
        among = seconds["communicate"] - inside
        ring = 2 * (nodes - 1) / nodes * sent / cluster.inter.gbit
        free = fitted.volume[nodes] * sent
        own = seconds["compute"] + seconds["encode"] + seconds["decode"] + inside
        parts = {
            "model": fitted.inside[network.name, figure5.NODE] + free * needed,
            "gradient": free * (1 - needed),
            "links": ring - free,
            "messages": among - ring,
            "node": own - fitted.inside[network.name, figure5.NODE],
        }
        images = workers * batch
        published = figure5.PUBLISHED[where, network.name][bar][figure5.GPUS.index(workers)]
        made.append(
            {
                "workers": workers,
                "method": word,
                "published": published,
                "model": images / parts["model"],
                "predicted": images / seconds["step"],
                "needed": needed,
                "predicted_needed": images / (own + needed * among),
                **{f"{part}_seconds": value for part, value in parts.items()},
                "step_seconds": seconds["step"],
            }
        )
    return made


def table(network: Network, rows: Sequence[Row]) -> Table:
    """Return the rows of `compare` as a table."""
    return Table(
        name="published",
        title=f"{network.title}: images a second in TernGrad's Fig. 5 and predicted; ms of a step",
        shown=[
            Shown(field="workers", heading="GPUs"),
            Shown(field="method", heading="method"),
            Shown(field="published", heading="published"),
            Shown(field="model", heading="model"),
            Shown(field="predicted", heading="predicted"),
            Shown(field="predicted_needed", heading="predicted,\nshare h"),
            Shown(field="model_seconds", heading="model\nms", scale=1e3),
            Shown(field="gradient_seconds", heading="+ whole\ngradient", scale=1e3),
            Shown(field="links_seconds", heading="+ ring,\none link", scale=1e3),
            Shown(field="messages_seconds", heading="+ own\nmessages", scale=1e3),
            Shown(field="node_seconds", heading="+ in\na node", scale=1e3),
            Shown(field="step_seconds", heading="predicted\nms", scale=1e3),
        ],
        which=2,
        notes=[
            "model is that of `gcbench scale figure5`, T + V h G r, whose parameters are fitted to "
            "the fp32 bars. Each column after it replaces one of its terms, and the last one is "
            "the prediction above: all of the gradient G in place of the share h of it that the "
            "bars need; a ring over one link in place of V, which the fit chooses for each number "
            "of nodes; this method's own messages in place of r; the rate of one GPU, the sum "
            "inside a node and the kernels in place of T. The bars keep the last layer in fp32 "
            "(--dense-last).",
        ],
        rows=list(rows),
    )


def conclusions(rows: Sequence[Row]) -> list[str]:
    """Return sentences on published and predicted speedups, and why they differ."""
    plain = {row["workers"]: row for row in rows if row["method"] == "none"}
    gains: dict[str, list[str]] = {}
    for row in rows:
        base = plain.get(row["workers"])
        if base is None or row is base:
            continue

        def gain(field: str, row: Row = row, base: Row = base) -> str:
            return f"{float(row[field] or 0) / float(base[field] or 1):.2f}"

        told = f"{row['workers']} GPUs: {gain('published')} published, {gain('predicted')} here"
        if row["needed"] != 1.0:
            told += f", {gain('predicted_needed')} with the share h"
        gains.setdefault(str(row["method"]), []).append(told)
    said = [
        f"Times as fast as `none` in TernGrad's Fig. 5, {word} at {'; '.join(each)}."
        for word, each in gains.items()
    ]
    most = max(rows, key=lambda row: float(row["messages_seconds"] or 0), default=None)
    if most is not None and float(most["messages_seconds"] or 0) > OWN_MESSAGES * float(
        most["step_seconds"] or 0
    ):
        said.append(
            f"Of the {1e3 * float(most['step_seconds'] or 0):,.0f} ms that a step of "
            f"{most['method']} at {most['workers']} GPUs takes here, "
            f"{1e3 * float(most['messages_seconds'] or 0):,.0f} are its own messages beyond the 2 "
            "bits both ways of the bars: sums over more nodes need more bits."
        )
    shares = {float(row["needed"] or 0) for row in rows} - {1.0}
    said += [
        f"The bars of this network need only {share:.3f} of its gradient (h), which nothing in the "
        "paper explains; the prediction sends all of it."
        for share in shares
    ]
    return said
