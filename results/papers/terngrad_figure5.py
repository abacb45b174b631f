"""TernGrad's Fig. 5: images per second on two clusters, 1 to 512 GPUs, published and predicted.

The time of a step on i nodes of 4 GPUs is modelled as T(4 GPUs) + V(i) h G r. G is the gradient in
Gbit; V(i) the seconds per Gbit on i nodes, a free parameter for each i; r the bytes that a method
sends divided by those of fp32; h the share of a network's gradient that fits its bars. T, V and h
are fitted to the published bars of fp32 only, by least squares of relative errors, with h = 1 for
GoogLeNet and VGG-A. The bars of TernGrad are then predicted from r:

    r = lambda + (1 - lambda) / 16    lambda: share of the last layer, in fp32; the rest in 2 bits

The formula of the paper's supplement was not available; this form fits the bars. AlexNet's bars
need only half of its gradient on both clusters, which nothing in the paper explains, so h is
reported. For other methods r is computed from the bytes that an exchange among the nodes puts on a
link, divided by those of a ring all-reduce of fp32. The bytes of gcbench's TernGrad, whose sums
need more bits the more nodes there are, are also compared with TernGrad's bars. The model has no
terms for encoding and decoding.
Source: Wen et al., NeurIPS 2017, Fig. 5 and section 5. The bars were read from the vector graphics
of its poster: fp32 exact, TernGrad +-1 %, fp32 of VGG-A on 8 and 16 GPUs of the slower cluster
+-4 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from _paper import Choices, main, table
from pydantic import Field
from scipy import optimize

from gcbench.core import progress, registry
from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError
from gcbench.core.exchange import check_legal
from gcbench.predict import networks, traffic
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row
from gcbench.training import methods

KIND = "terngrad-figure5"
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
NODE = 4
NODES = tuple(gpus // NODE for gpus in GPUS if gpus > NODE)
CLUSTERS = {"1g": "1G Ethernet", "100g": "100G InfiniBand"}
"""Nodes of 4 GTX 1080 with PCI; nodes of 4 P100 with NVLink."""
NETWORKS = {"alexnet": 128, "googlenet-slim": 64, "vgg-a": 32}
"""Network -> images per GPU and step."""
ANCHORS = ("googlenet-slim", "vgg-a")
"""Networks for which h = 1 is fixed."""


def _published() -> dict[tuple[str, str], dict[str, tuple[int, ...]]]:
    bars = pd.read_csv(Path(__file__).with_suffix(".csv"), dtype=str)
    published: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    for cluster, name, method, gpus, rate in bars.itertuples(index=False):
        bars_of = published.setdefault((cluster, name), {})
        bars_of[method] = (*bars_of.get(method, ()), int(rate))
        assert int(gpus) == GPUS[len(bars_of[method]) - 1]
    return published


PUBLISHED = _published()
"""Images per second at each of `GPUS`, by cluster and network and then by method."""
BARS = len(PUBLISHED) * len(GPUS)
"""Number of bars of each method."""
COARSE = {("1g", "vgg-a", 8): 4.0, ("1g", "vgg-a", 16): 4.0}
"""Bars that were read less exactly -> factor on their error."""
CLAIM = ("1g", "alexnet", 8, 3.04)
"""The paper's claim: 3.04 times the images per second at 8 GPUs."""


class Settings(Choices):
    """The settings that decide the result."""

    compressor: list[str] = Field(
        default=["topk"], description="Methods to model beside TernGrad; '' for none."
    )
    collective: str = Field(
        default="", description="allreduce, allgather or twoshot; empty: the method's default."
    )


def steps(settings: Settings) -> int:
    """Return the number of progress steps: bars of each method."""
    return BARS


def gbit(name: str) -> float:
    """Return a network's gradient in 10^9 bits."""
    return 32e-9 * networks.network(name).numel


def paper_share(name: str) -> float:
    """Return r of TernGrad as published: 2 bits both ways, the last layer in fp32."""
    last = networks.network(name).last_share
    return last + (1 - last) / 16


def effective_gbit(cluster: str) -> float:
    """Return the link between nodes, in Gbit/s, with which a ring fits the fp32 bars.

    It is the median of 2 (nodes - 1) / (nodes V) over the numbers of nodes.
    """
    volume = fit(cluster).volume
    return statistics.median(2 * (nodes - 1) / nodes / each for nodes, each in volume.items())


def share(method: Compressor, collective: str, name: str, nodes: int) -> float:
    """Return r of a method: its bytes on the link among the nodes over those of fp32.

    Raises:
        UsageError: see `traffic.exchange`.
    """
    network = networks.network(name)
    lanes = network.split(dense_last=True)
    wire = traffic.total(traffic.exchange(method, collective, lanes, nodes), nodes).wire
    return wire / (2 * (nodes - 1) / nodes * traffic.dense_bytes(network.shapes))


# ---- the fit -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """The parameters fitted to the fp32 bars of one cluster."""

    inside: dict[tuple[str, int], float]
    """T: seconds of a step inside a node, by network and GPUs 1, 2 and 4."""
    volume: dict[int, float]
    """V: seconds per Gbit, by number of nodes."""
    needed: dict[str, float]
    """h: the share of a network's gradient that fits its bars."""
    error: dict[str, float]
    """Standard errors, from the residuals, of the h that were fitted."""

    @property
    def parameters(self) -> int:
        """Number of fitted parameters: T of each network, V of each number of nodes, free h."""
        return sum(gpus == NODE for _, gpus in self.inside) + len(self.volume) + len(self.error)

    def seconds(self, name: str, gpus: int, sent: float) -> float:
        """Return the seconds of a step that sends the share `sent` (r) of the bytes of fp32."""
        if gpus <= NODE:
            return self.inside[name, gpus]
        spent = self.volume[gpus // NODE] * self.needed[name] * gbit(name) * sent
        return self.inside[name, NODE] + spent


def _observed(cluster: str) -> list[tuple[str, int, float, float]]:
    """Return network, GPUs, seconds of a step and reading error of fp32 bars, 4 GPUs and more."""
    return [
        (
            name,
            gpus,
            gpus * NETWORKS[name] / rate,
            COARSE.get((cluster, name, gpus), 1.0),
        )
        for name in NETWORKS
        for gpus, rate in zip(GPUS, PUBLISHED[cluster, name]["fp32"], strict=True)
        if gpus >= NODE
    ]


def fit(cluster: str) -> Fit:
    """Fit T, V and h to the fp32 bars of a cluster, by least squares of relative errors."""
    bars = _observed(cluster)
    free = [name for name in NETWORKS if name not in ANCHORS]
    keys: list[tuple[str, Any]] = [*(("T", name) for name in NETWORKS), *(("V", n) for n in NODES)]
    keys += [("h", name) for name in free]
    sizes = {name: gbit(name) for name in NETWORKS}

    def model(_: object, *values: float) -> list[float]:
        of = dict(zip(keys, values, strict=True))
        return [
            of["T", name] + of.get(("V", gpus // NODE), 0) * of.get(("h", name), 1) * sizes[name]
            for name, gpus, _, _ in bars
        ]

    seconds = [spent for _, _, spent, _ in bars]
    inside = {
        (name, gpus): gpus * NETWORKS[name] / rate
        for name in NETWORKS
        for gpus, rate in zip(GPUS, PUBLISHED[cluster, name]["fp32"], strict=True)
        if gpus <= NODE
    }
    start = [inside[name, NODE] if kind == "T" else 1.0 for kind, name in keys]
    errors = [spent * loose for _, _, spent, loose in bars]
    exact = dict.fromkeys(("ftol", "xtol", "gtol"), 1e-15)
    values, covariance = optimize.curve_fit(model, None, seconds, start, errors, **exact)
    fitted = dict(zip(keys, values.tolist(), strict=True))
    deviation = dict(zip(keys, np.sqrt(np.diag(covariance)).tolist(), strict=True))
    return Fit(
        {**inside, **{(name, NODE): fitted["T", name] for name in NETWORKS}},
        {nodes: fitted["V", nodes] for nodes in NODES},
        {name: fitted.get(("h", name), 1.0) for name in NETWORKS},
        {name: deviation["h", name] for name in free},
    )


# ---- the analysis --------------------------------------------------------------------------------

TERNGRAD = "TernGrad, 2 bits"
OWN = "TernGrad, own bytes"
"""TernGrad as gcbench exchanges it: the default configuration by its first collective."""
FP32 = "fp32"


def run(settings: Settings, command: str, observer: progress.Observer, ledger: Ledger) -> Analysis:
    """Fit the model to the bars of fp32, and predict those of TernGrad and of other methods.

    Raises:
        UsageError: an unknown method, or an illegal collective.
    """
    chosen = methods.all_of(",".join(settings.compressor)) if settings.compressor else {}
    collectives = {
        word: check_legal(method, settings.collective or None) for word, method in chosen.items()
    }
    fits = {cluster: fit(cluster) for cluster in CLUSTERS}
    bars: list[Row] = []
    for cluster, fitted in fits.items():
        for name in NETWORKS:
            for gpus in GPUS:
                bars += _bars(cluster, fitted, name, gpus, chosen, collectives)
                observer.step(len(bars) // (3 + len(chosen)), f"{name}, {gpus} GPUs")
    panels = list(_panels(bars))
    return Analysis.of(
        KIND,
        settings,
        command,
        conclusions=_conclusions(bars, fits),
        tables=[
            table(
                "bars",
                "Images per second",
                {
                    "gpus": "GPUs",
                    "method": "method",
                    "sent": "r",
                    "published": "published",
                    "model": "model",
                    "error": ("error\n%", 100.0),
                    "basis": "basis",
                },
                bars,
                which=2,
                by="panel",
                notes=[
                    "A node of 1G Ethernet has 4 GTX 1080, a node of 100G InfiniBand 4 P100. "
                    "basis: fitted (the fp32 bars), predicted (the TernGrad bars, not used in the "
                    "fit), or taken as a parameter.",
                    "r: bytes sent divided by those of fp32. TernGrad's bars are predicted twice: "
                    "with 2 bits both ways as published, and with the bytes of gcbench's exchange. "
                    "Other methods have no bars; their r are the bytes of an exchange among nodes, "
                    "with the last layer in fp32.",
                ],
            ),
            table(
                "panels",
                "Errors of the model, in %",
                {
                    "panel": "panel",
                    "method": "method",
                    "basis": "basis",
                    "bars": "bars",
                    "median": ("median", 100.0),
                    "largest": ("largest", 100.0),
                    "largest_at": "at GPUs",
                },
                panels,
                which=2,
            ),
            table(
                "fit",
                "Fitted to the fp32 bars",
                {
                    "cluster": "cluster",
                    "parameter": "parameter",
                    "value": "value",
                    "unit": "unit",
                    "error": "standard\nerror",
                    "link_gbit": "as a link\nGbit/s",
                },
                list(_fitted(fits)),
                which=2,
            ),
        ],
    )


def _bars(
    cluster: str,
    fitted: Fit,
    name: str,
    gpus: int,
    chosen: Mapping[str, Compressor],
    collectives: Mapping[str, str],
) -> list[Row]:
    """Return the bars of one panel at one number of GPUs."""
    place, images = GPUS.index(gpus), gpus * NETWORKS[name]
    published_bars = PUBLISHED[cluster, name]
    title = networks.network(name).title

    def row(method: str, sent: float, published: float | None, basis: str) -> Row:
        rate = images / fitted.seconds(name, gpus, sent)
        alone = gpus < NODE and method == FP32  # the bar itself is a parameter of the model
        return {
            "panel": f"{title}, {CLUSTERS[cluster]}",
            "cluster": cluster,
            "network": name,
            "gpus": gpus,
            "method": method,
            "sent": sent if gpus > NODE else None,
            "published": published,
            "model": rate,
            "error": None if published is None or alone else rate / published - 1,
            "basis": "taken" if alone else basis,
        }

    result = [
        row(FP32, 1.0, published_bars["fp32"][place], "fitted"),
        row(TERNGRAD, paper_share(name), published_bars["terngrad"][place], "predicted"),
    ]
    method = registry.compressor("terngrad")
    sent = share(method, check_legal(method), name, gpus // NODE) if gpus > NODE else 0.0
    result.append(row(OWN, sent, published_bars["terngrad"][place], "predicted"))
    for word, method in chosen.items():
        sent = 0.0
        if gpus > NODE:
            try:
                sent = share(method, collectives[word], name, gpus // NODE)
            except UsageError as error:
                raise UsageError(f"{word}: {error}") from None
        result.append(row(f"{word} {collectives[word]}", sent, None, "no bar"))
    return result


def _panels(bars: Sequence[Row]) -> list[Row]:
    """Return the median and the largest error of each panel and published method."""
    rows: list[Row] = []
    for panel in dict.fromkeys(str(bar["panel"]) for bar in bars):
        for method in (FP32, TERNGRAD, OWN):
            mine = [bar for bar in bars if (bar["panel"], bar["method"]) == (panel, method)]
            judged = [bar for bar in mine if bar["error"] is not None]
            errors = [abs(float(bar["error"] or 0)) for bar in judged]
            worst = max(zip(errors, judged, strict=True), key=lambda pair: pair[0])
            rows.append(
                {
                    "panel": panel,
                    "method": method,
                    "basis": mine[-1]["basis"],
                    "bars": len(judged),
                    "median": statistics.median(errors),
                    "largest": worst[0],
                    "largest_at": worst[1]["gpus"],
                }
            )
    return rows


def _fitted(fits: Mapping[str, Fit]) -> list[Row]:
    """Return the fitted parameters as rows."""
    rows: list[Row] = []

    def add(cluster: str, parameter: str, value: float, unit: str, **more: float) -> None:
        rows.append(
            {"cluster": cluster, "parameter": parameter, "value": value, "unit": unit, **more}
        )

    for cluster, fitted in fits.items():
        for name in NETWORKS:
            title = networks.network(name).title
            add(cluster, f"T of 4 GPUs, {title}", fitted.inside[name, NODE], "s")
        for nodes, volume in fitted.volume.items():
            add(cluster, f"V of {nodes} nodes", volume, "s/Gbit", link_gbit=1 / volume)
        for name, error in fitted.error.items():
            title = networks.network(name).title
            add(cluster, f"h of {title}", fitted.needed[name], "", error=error)
    return rows


def _bar(bars: Sequence[Row], cluster: str, name: str, gpus: int, method: str) -> Row:
    return next(
        bar
        for bar in bars
        if (bar["cluster"], bar["network"], bar["gpus"], bar["method"])
        == (cluster, name, gpus, method)
    )


def _errors(bars: Sequence[Row], method: str) -> list[tuple[float, Row]]:
    """Return the size of the error in % of each bar of a method, with the bar."""
    mine = [bar for bar in bars if bar["method"] == method and bar["error"] is not None]
    return [(100 * abs(float(bar["error"] or 0)), bar) for bar in mine]


def _summary(errors: Sequence[tuple[float, Row]]) -> str:
    """Return the median and the largest error as text."""
    largest, bar = max(errors, key=lambda each: each[0])
    middle = statistics.median(error for error, _ in errors)
    return (
        f"median error {middle:.2g} %, largest {largest:.2g} % ({bar['panel']}, {bar['gpus']} GPUs)"
    )


def _conclusions(bars: Sequence[Row], fits: Mapping[str, Fit]) -> list[str]:
    cluster, name, gpus, claimed = CLAIM
    plain, tern = (_bar(bars, cluster, name, gpus, method) for method in (FP32, TERNGRAD))
    read = float(tern["published"] or 0) / float(plain["published"] or 1)
    modelled = float(tern["model"] or 0) / float(plain["model"] or 1)
    sentences = [
        f"AlexNet at 8 GPUs, {CLUSTERS[cluster]}: {claimed}x in the paper's text, {read:.2f}x by "
        f"its bars, {modelled:.2f}x by the model.",
    ]
    fitted_bars = sum(len(_observed(cluster)) for cluster in fits)
    taken = sum(bar["basis"] == "taken" for bar in bars)
    sentences.append(
        f"{sum(fitted.parameters for fitted in fits.values())} parameters are fitted to "
        f"{fitted_bars} bars of fp32, {taken} bars of 1 and 2 GPUs are taken as they are, and none "
        "of TernGrad's bars is used."
    )
    far = [bar for bar in bars if float(bar["gpus"] or 0) > NODE]
    slow = [bar for bar in far if bar["cluster"] == "1g"]
    for method, how in (
        (TERNGRAD, "predicted from 2 bits both ways, as published"),
        (OWN, "predicted from the bytes of gcbench's exchange, whose sums grow with the nodes"),
    ):
        every, some = _errors(far, method), _errors(slow, method)
        sentences.append(
            f"TernGrad's {len(every)} bars of 8 GPUs and more, {how}: {_summary(every)}; the "
            f"{len(some)} of {CLUSTERS['1g']}: {_summary(some)}."
        )
    within = _errors([bar for bar in bars if float(bar["gpus"] or 0) <= NODE], TERNGRAD)
    sentences.append(
        f"TernGrad's {len(within)} bars inside a node, where nothing is sent but its bars differ "
        f"from those of fp32: {_summary(within)}."
    )
    halves = ", ".join(
        f"{fitted.needed['alexnet']:.3f} +- {fitted.error['alexnet']:.3f} on {CLUSTERS[cluster]}"
        for cluster, fitted in fits.items()
    )
    sentences.append(
        f"AlexNet's bars need this share of its gradient of {gbit('alexnet'):.3f} Gbit, if those "
        f"of GoogLeNet and VGG-A need all of it: {halves}. Nothing in the paper explains the half."
    )
    last = max(NODES)
    links = ", ".join(f"{1 / fits[c].volume[last]:.3g} Gbit/s on {CLUSTERS[c]}" for c in fits)
    sentences.append(
        f"The fp32 bars of {last} nodes pass the whole gradient at {links}; a ring passes it twice "
        "and would need twice that."
    )
    return sentences


# ---- the picture ---------------------------------------------------------------------------------


def draw(analysis: Analysis, path: Path) -> None:
    """Draw images per second and GPU: published bars as points, the model as lines, by panel."""
    bars = analysis.table("bars").rows
    errors = {(row["panel"], row["method"]): row for row in analysis.table("panels").rows}
    labels = list(dict.fromkeys(str(bar["method"]) for bar in bars))
    styles = figures.styles(labels)
    with figures.canvas(13, 8) as figure:
        grid = figure.subplots(2, 3, sharex=True)
        for (cluster, name), axes in zip(PUBLISHED, grid.flat, strict=True):
            panel = [b for b in bars if (b["cluster"], b["network"]) == (cluster, name)]
            for label in labels:
                mine = [bar for bar in panel if bar["method"] == label]
                style = {k: v for k, v in styles[label].items() if k != "marker"}
                gpus = [float(bar["gpus"] or 0) for bar in mine]
                model = [float(bar["model"] or 0) / n for bar, n in zip(mine, gpus, strict=True)]
                axes.plot(gpus, model, **style, label=f"{label}, model")
                if label in (FP32, TERNGRAD):
                    read = [
                        float(bar["published"] or 0) / n for bar, n in zip(mine, gpus, strict=True)
                    ]
                    axes.plot(
                        gpus,
                        read,
                        styles[label]["marker"],
                        color=styles[label]["color"],
                        label=f"{label}, published",
                    )
            pair = [errors[panel[0]["panel"], label] for label in (FP32, TERNGRAD)]
            off = " / ".join(f"{100 * float(row['median'] or 0):.1f}" for row in pair)
            title = networks.network(name).title
            axes.set_title(f"{title}, median error {off} %", fontsize="small")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
            axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
        for axes, cluster in zip(grid[:, 0], CLUSTERS, strict=True):
            axes.set_ylabel(f"images/s and GPU\n{CLUSTERS[cluster]}", fontsize="small")
        for axes in grid[1]:
            axes.set_xlabel("GPUs")
        handles, names = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize="small")
        figure.suptitle(
            "TernGrad's Fig. 5: model fitted to fp32 bars, TernGrad's predicted (errors: fp32 / "
            "TernGrad)",
            fontsize="medium",
        )
        figures.save(figure, path)


if __name__ == "__main__":
    main()
