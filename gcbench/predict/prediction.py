"""The predicted time of a training step on a cluster, for every method and number of workers.

Every step is compared with two uncompressed ones, which reduce gradients in fp32 and in bf16 (as
DDP's `bf16_compress_hook` does); a method has to beat the faster of them. Encoding times are a
range: from times measured inside exchanges down to the floor that the device's memory bandwidth
sets (`costs`), which makes the speedup an upper bound.

Scaling is weak: the batch per worker is fixed, so throughput is N batch / step. A single worker, or
a single node under `topology: nodes`, has nothing to compress.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from gcbench.core import progress, registry
from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError
from gcbench.core.exchange import check_legal
from gcbench.predict import costs, networks, throughput, traffic
from gcbench.predict.clusters import Cluster
from gcbench.predict.networks import Network
from gcbench.predict.steps import HALF, Gains, Plain, Spend, Step, pays, simplest
from gcbench.predict.transport import ACHIEVED
from gcbench.predict.validation import Bands, bands
from gcbench.profile.breakeven import CAST, FLOAT, links_text, rate_text
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table
from gcbench.training import methods

KIND = "prediction"
STEPS_PRICED = 1000
MOST_WORKERS = 100_000
ASSUMED, MEASURED = "assumed", "measured"
"""Origin of encoding times: the floor, or a measurement."""
BRIEF = 6
"""Number of methods in the short table."""


class Settings(BaseModel):
    """The settings that decide the prediction."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    module: str | None = None
    compressors: list[str]
    collective: str | None = None
    workers: list[Annotated[int, Field(ge=1, le=MOST_WORKERS)]]
    cluster: Cluster
    batch: Annotated[int, Field(ge=1)] | None = None
    compute_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    dense_last: bool = False
    dense_below: Annotated[int, Field(ge=0)] = 0
    sharded: bool = False
    """Whether parameters and gradients are sharded over all workers, as in FSDP."""
    kernels: str = ASSUMED
    """`ASSUMED`, or a file of `gcbench bandwidth --json`."""


# ---- inputs --------------------------------------------------------------------------------------


def _times(
    settings: Settings, chosen: Mapping[str, Compressor], n: int
) -> tuple[dict[str, Spend], str, list[str]]:
    """Return measured times for n elements by method, their source, and warnings.

    Methods without measured times are missing. The warnings name times that are not used.

    Raises:
        UsageError: the file in `settings.kernels` cannot be read.
    """
    assumed, device = settings.kernels == ASSUMED, settings.cluster.device
    measured = costs.stored() if assumed else costs.load(Path(settings.kernels))
    if measured is None:
        return {}, "none", []
    codecs = {spec: measured.of(method, n) for spec, method in chosen.items()}
    source = measured.source
    if assumed:
        codecs = {spec: one and one.on(device) for spec, one in codecs.items()}
        source += f", scaled to the memory bandwidth of {device.name}"
    spends: dict[str, Spend] = {
        spec: partial(one.seconds, chosen[spec]) for spec, one in codecs.items() if one is not None
    }
    return spends, source, measured.warnings(chosen.values())


def _collectives(method: Compressor, settings: Settings, *, every: bool) -> tuple[str, ...]:
    """Return the collectives to predict: the requested one, the method's default, or all.

    All but `ring`: it sends as many bytes as two-shot, and its error grows with the workers.

    Raises:
        UsageError: the requested collective is not legal for the method.
    """
    if every and settings.collective is None:
        return tuple(name for name in method.legal_collectives() if name != "ring")
    return (check_legal(method, settings.collective),)


@dataclass(frozen=True)
class Prepared:
    """A network and a cluster with the steps of all methods."""

    network: Network
    batch: int | None
    """Examples per worker; None: unknown (then `compute` was given)."""
    compute: float
    """Seconds of forward and backward."""
    plain: Plain
    """The uncompressed step that reduces in fp32."""
    half: Plain
    """The uncompressed step that reduces in bf16."""
    free: Plain
    """The step if the exchange took no time: a bound for all methods."""
    steps: Mapping[tuple[str, str], Step]
    """(method, collective) -> step."""
    notes: Sequence[str]
    """The assumptions, as sentences."""
    refused: Mapping[str, str]
    """Method that cannot be used with these settings -> reason."""
    by_measured: bool
    """Whether rows use measured encoding times where they are available."""

    @property
    def baselines(self) -> tuple[Plain, Plain]:
        """The steps that a method has to beat."""
        return self.plain, self.half

    def gains(self, step: Step, workers: int, cluster: Cluster) -> Gains:
        """Return the speedups of a step over the uncompressed ones.

        Raises:
            UsageError: see `Step.at`.
        """
        high = step.seconds(workers, cluster)
        low = None
        if step.measured is not None:
            low = step.seconds(workers, cluster, measured=True)
        fp32, bf16 = (one.seconds(workers, cluster) for one in self.baselines)
        return Gains((low and fp32 / low, fp32 / high), (low and bf16 / low, bf16 / high))

    def pays_fields(self, step: Step, workers: int, cluster: Cluster, margin: float = 0.0) -> Row:
        """Return the links on which a method pays as fields of a row, measured if known.

        `pays_on` is text. `pays_from_gbit` and `pays_to_gbit` are the ends of the lowest range; the
        upper end is None if there is none, and both are None if no link pays. All are None within
        one node.
        """
        if cluster.nodes_of(workers) == 1:
            return {"pays_on": None, "pays_from_gbit": None, "pays_to_gbit": None}
        links = pays(step, self.baselines, workers, cluster, measured=True, margin=margin)
        low, high = links[0] if links else (None, math.inf)
        return {
            "pays_on": links_text(links),
            "pays_from_gbit": low and 1e-9 * low,
            "pays_to_gbit": None if math.isinf(high) else 1e-9 * high,
        }


def prepare(settings: Settings, *, every: bool = False) -> Prepared:
    """Return the steps of all methods, by each method's collective, or by `every` legal one.

    Raises:
        UsageError: an unknown name, an illegal collective, workers that do not fill nodes, a
            module whose computation is unknown, or an option that FSDP does not have.
    """
    module, cluster = settings.module, settings.cluster
    network = networks.of_module(module) if module else networks.network(settings.model)
    for workers in settings.workers:
        cluster.nodes_of(workers)
    if settings.sharded and settings.collective:
        raise UsageError(
            f"--collective {settings.collective} has no effect with --sharded, which "
            "reduce-scatters gradients; omit it"
        )
    if settings.sharded and settings.dense_last:
        raise UsageError(
            "--dense-last with --sharded: gcbench.shard_hook cannot exclude the last layer; use "
            "--dense-below N"
        )
    batch = settings.batch or network.batch
    if settings.compute_ms is not None:
        computed = throughput.Compute(settings.compute_ms / 1e3, "given")
    else:
        computed = throughput.compute(cluster, network, batch or 1)
    chosen = methods.all_of(",".join(settings.compressors))
    chosen.pop("none", None)
    lanes = network.split(dense_last=settings.dense_last, dense_below=settings.dense_below)
    if not lanes[0]:
        flags = ["--dense-last"] * settings.dense_last
        flags += [f"--dense-below {settings.dense_below}"] * bool(settings.dense_below)
        raise UsageError(f"{' with '.join(flags)} leaves no tensor to compress")
    cases: list[tuple[str, Compressor, str]] = []
    refused: dict[str, str] = {}
    for spec, method in chosen.items():
        if traffic.depends_on_scale(method):
            refused[spec] = (
                f"{spec}: the size of its payload depends on how large gradients are, which a "
                "prediction does not know; measure it in training: "
                f"`gcbench run --compressor {spec}`"
            )
            continue
        legal = _collectives(method, settings, every=every)
        if settings.sharded:
            if "twoshot" not in method.legal_collectives():
                refused[spec] = (
                    f"{spec}: with FSDP each worker receives the mean of its own shard, the first "
                    "half of a two-shot exchange, which this method does not support"
                )
                continue
            if not method.rule.plain:
                refused[spec] = (
                    f"{spec}: its update rule needs the whole mean on every worker, and with FSDP "
                    "each worker has only its shard"
                )
                continue
            legal = ("twoshot",)
        cases += [(spec, method, collective) for collective in legal]
    spends, source, warnings = _times(settings, chosen, max(1, network.numel))
    step_of = partial(Step, network, computed.seconds, sharded=settings.sharded, lanes=lanes)
    steps = {
        (spec, collective): step_of(
            method=method,
            collective=collective,
            floor=costs.floor(method, cluster.device, network.shapes).seconds,
            measured=spends.get(spec),
        )
        for spec, method, collective in cases
    }
    casts = 0.0 if settings.sharded else 2 * CAST / (cluster.device.memory_gbyte * 1e9)
    plain, half, free = (
        Plain(network, computed.seconds, width, each, sharded=settings.sharded)
        for width, each in ((FLOAT, 0.0), (FLOAT // 2, casts), (0, 0.0))
    )
    notes = [
        *_assumptions(settings, network, batch, computed, source),
        *warnings,
    ]
    if missing := dict.fromkeys(spec for (spec, _), step in steps.items() if not step.measured):
        specs = dict.fromkeys(spec for spec, _ in steps)
        notes.append(
            f"Encoding times not measured (speedups are upper bounds): {', '.join(missing)}. To "
            f"measure them: {costs.how_to_measure(specs)}."
        )
    return Prepared(
        network,
        batch,
        computed.seconds,
        plain,
        half,
        free,
        steps,
        notes,
        refused,
        by_measured=settings.kernels != ASSUMED,
    )


def _assumptions(
    settings: Settings,
    network: Network,
    batch: int | None,
    computed: throughput.Compute,
    source: str,
) -> Iterator[str]:
    """Yield the assumptions of the prediction as sentences."""
    cluster = settings.cluster
    who = "a worker's batch" if batch is None else f"batch {batch:,} per GPU ({network.examples})"
    text = f"Forward and backward of {who}: {1e3 * computed.seconds:.4g} ms ({computed.source})."
    if computed.batch is not None and batch is not None and 4 * batch <= computed.batch:
        text += (
            f" The published rate is for batch {computed.batch}; batch {batch} reaches less, so "
            "steps take longer than this and compression gains less."
        )
    yield text
    text = f"Between nodes: {_link_text(cluster.inter)}"
    if cluster.note:
        text += f" ({cluster.note})"
    if cluster.gpus_per_node > 1:
        text += (
            f"; {cluster.gpus_per_node} {cluster.device.name} per node: {_link_text(cluster.intra)}"
        )
    library = cluster.library
    if library.name == ACHIEVED:
        text += "; taken as a rate that collectives achieve"
    else:
        shares = ", ".join(f"{share:.0%}" for share in dict.fromkeys(library.shares.values()))
        text += f"; {library.name} achieves {shares} of it ({library.source})"
    if cluster.overlap:
        count = len(cluster.parts(network.arrival))
        share = "" if cluster.overlap == 1 else f"{cluster.overlap:.0%} of "
        text += f"; {count} bucket{'s' * (count > 1)} hide under {share}the backward pass"
    else:
        text += "; no communication hides under the backward pass (overlap 0)"
    yield f"{text}; algorithm: {cluster.algorithm}, topology: {cluster.topology}."
    if network.frozen:
        gathered = " FSDP gathers them too." if settings.sharded else ""
        yield (
            f"{network.frozen:,} of {network.frozen + network.numel:,} parameters are frozen, have "
            f"no gradient and are not exchanged.{gathered}"
        )
    if network.buffers and not settings.sharded:
        yield (
            f"DDP broadcasts {network.buffers / 1e6:.3g} MB of buffers before every forward pass, "
            "with every method; broadcast_buffers=False avoids it."
        )
    if settings.sharded:
        yield (
            "Sharded (FSDP): every method gathers bf16 parameters before the forward and before "
            "the backward pass; gradients are reduce-scattered in fp32, in bf16 or as payloads."
        )
    yield (
        f"A speedup is a range from measured encoding times ({source}) to an upper bound, at which "
        f"the GPU's memory ({cluster.device.memory_gbyte:g} GB/s) reads and writes every byte once."
    )


def _link_text(link: Any) -> str:
    return f"{rate_text(1e9 * link.gbit)}, {link.latency_us:g} us"


# ---- the analysis --------------------------------------------------------------------------------


def title(settings: Settings, prepared: Prepared, *more: str) -> str:
    """Return the title of a table: model, batch, cluster."""
    network, batch = prepared.network, prepared.batch
    parts = (
        network.title,
        f"{network.numel:,} parameters",
        "batch unknown" if batch is None else f"batch {batch:,} per GPU",
        *more,
        settings.cluster.name,
        *(["sharded"] if settings.sharded else []),
    )
    return ", ".join(parts)


def run(settings: Settings, command: str, observer: progress.Observer, ledger: Ledger) -> Analysis:
    """Predict every method at every number of workers.

    Raises:
        UsageError: see `prepare`.
    """
    prepared = prepare(settings)
    cluster, network, most = settings.cluster, prepared.network, max(settings.workers)
    rows = list(_rows(prepared, settings.workers, cluster))
    observer.step(len(settings.compressors))
    heading = title(settings, prepared)
    kernels = "measured, where available" if prepared.by_measured else "the lower bound"
    notes = [
        *prepared.notes,
        f"Predicted, not measured; encoding times: {kernels}. over fp32, over bf16: time of the "
        "uncompressed step divided by the time of this step. efficiency: forward and backward as a "
        "share of the step.",
        "pays on links: links between nodes (1 Mbit/s to 10 Tbit/s) on which the step is faster "
        "than both uncompressed ones. way: flat, if all workers exchange payloads, as with "
        "gcbench's hooks (bytes per worker), or nodes, if nodes add gradients first and exchange "
        "payloads (bytes per node), as only shard_hook(between=...) does, over replicas.",
    ]
    if cluster.price is not None:
        notes.append(f"cost: {STEPS_PRICED:,} steps at {cluster.price:g} per device and hour.")
    reasons = dict.fromkeys(str(row["refused"]) for row in rows if row["refused"])
    notes += [f"Refused: {reason}." for reason in [*prepared.refused.values(), *reasons]]
    by_workers = {workers: bands(cluster, workers) for workers in settings.workers}
    return Analysis.of(
        KIND,
        settings,
        command,
        answer=[*_answers(rows, by_workers), *filter(None, [by_workers[most].text])],
        tables=[
            Table(
                name="predictions",
                title=heading,
                shown=_SHOWN,
                which=2,
                by="workers",
                notes=notes,
                rows=rows,
            ),
            _brief(f"{network.title}, {cluster.name}", [r for r in rows if r["workers"] == most]),
        ],
    )


_SHOWN = [
    Shown(field="method", heading="method"),
    Shown(field="collective", heading="collective"),
    Shown(field="topology", heading="way"),
    Shown(field="payload_bytes_up", heading="up\nMB", scale=1e-6),
    Shown(field="payload_bytes_down", heading="down\nMB", scale=1e-6),
    Shown(field="wire_bytes", heading="wire\nMB", scale=1e-6),
    Shown(field="encode_seconds", heading="encode\nms", scale=1e3),
    Shown(field="decode_seconds", heading="decode\nms", scale=1e3),
    Shown(field="communicate_seconds", heading="comm.\nms", scale=1e3),
    Shown(field="exposed_seconds", heading="exposed\nms", scale=1e3),
    Shown(field="step_seconds", heading="step\nms", scale=1e3),
    Shown(field="over_fp32", heading="over\nfp32"),
    Shown(field="over_bf16", heading="over\nbf16"),
    Shown(field="efficiency", heading="efficiency\n%", scale=100),
    Shown(field="pays_on", heading="pays on links"),
    Shown(field="cost", heading="cost"),
]


def _brief(heading: str, rows: Sequence[Row]) -> Table:
    """Return the short table: the uncompressed steps and the fastest methods."""
    done = [row for row in rows if row["refused"] is None]
    plain = [row for row in done if row["method"] in ("none", HALF)]
    others = sorted((row for row in done if row not in plain), key=_speed, reverse=True)
    shown = [
        one for one in _SHOWN
        if one.field in ("method", "collective", "step_seconds", "over_fp32", "over_bf16")
    ]  # fmt: skip
    return Table(
        name="brief",
        brief=True,
        title=f"{heading}, predicted for {rows[0]['workers']:,} workers",
        shown=shown,
        rows=[*plain, *others[:BRIEF]],
    )


def _rows(prepared: Prepared, counts: Sequence[int], cluster: Cluster) -> Iterator[Row]:
    """Yield the rows of the uncompressed steps and of the methods, at each number of workers.

    `speedup` is over the uncompressed step that reduces in fp32, by the times in the row.
    """
    steps: list[tuple[str, Step]] = [("none", prepared.plain), (HALF, prepared.half)]
    steps += [(spec, step) for (spec, _), step in prepared.steps.items()]
    for workers, (spec, step) in itertools.product(counts, steps):
        row: Row = {
            "workers": workers,
            "nodes": cluster.nodes_of(workers),
            "method": spec,
            "compressor": registry.call(step.method),
            "collective": "reducescatter" if step.sharded else step.collective,
            "kernels": MEASURED if prepared.by_measured and step.measured else ASSUMED,
        }
        try:
            result = step.at(workers, cluster, measured=prepared.by_measured)
            gains = prepared.gains(step, workers, cluster)
        except UsageError as error:
            yield {**row, "topology": "refused", "refused": str(error)}
            continue
        seconds = result["step_seconds"]
        row |= result
        row["examples_per_second"] = (
            None if prepared.batch is None else workers * prepared.batch / seconds
        )
        row["speedup"] = prepared.plain.seconds(workers, cluster) / seconds
        row |= gains.fields()
        row["efficiency"] = step.compute / seconds
        if isinstance(step, Plain):
            row["over_fp32"] = "1" if spec == "none" else f"{row['over_fp32_high']:.3g}"
            row["over_bf16"] = "1" if spec == HALF else f"{row['over_bf16_high']:.3g}"
        else:
            row |= prepared.pays_fields(step, workers, cluster)
        if cluster.price is not None:
            row["cost"] = cluster.price * workers * seconds * STEPS_PRICED / 3600
        row["refused"] = None
        yield row


def _number(row: Row, field: str) -> float:
    value = row.get(field)
    return float(value) if isinstance(value, int | float) else math.nan


def _speed(row: Row) -> float:
    """Return the speedup by which rows are sorted: measured if available, else the upper bound."""
    sure = _sure(row)
    return _number(row, "over_fp32_high") if math.isnan(sure) else sure


def _sure(row: Row) -> float:
    """Return the speedup over reducing in fp32 with measured times; NaN without any."""
    plain = row["method"] in ("none", HALF)
    return _number(row, "over_fp32_high" if plain else "over_fp32_low")


def _answers(rows: Sequence[Row], by_workers: Mapping[int, Bands]) -> list[str]:
    """Return what to try and its speedup in a sentence, for each number of workers."""
    counts: dict[str, list[str]] = {}
    for workers, error in by_workers.items():
        done = [row for row in rows if row["workers"] == workers and row["refused"] is None]
        counts.setdefault(_fastest(done, error), []).append(f"{workers:,}")
    return [f"{', '.join(alike)} workers: {text}" for text, alike in counts.items()]


def _fastest(rows: Sequence[Row], error: Bands) -> str:
    """Return the simplest of the fastest methods in a sentence, for one number of workers.

    `error`: the error bands, within which steps are tied.
    """
    by = {str(row["method"]): row for row in rows}
    gains = {spec: _sure(row) for spec, row in by.items() if not math.isnan(_sure(row))}
    bounds = {spec: _number(row, "over_fp32_high") for spec, row in by.items() if spec not in gains}
    most = max(gains.values())
    base = max(gains[spec] for spec in ("none", HALF))
    choice = simplest({spec: gains[spec] for spec in ("none", HALF)}, error.plain)
    others = {spec: gain for spec, gain in gains.items() if spec not in ("none", HALF)}
    faster = {
        spec: gain
        for spec, gain in others.items()
        if gain > (1 + error.of(spec.partition(":")[0])) * base
    }
    choice = simplest(faster, error.plain) if faster else choice
    tied = [spec for spec, gain in faster.items() if gain * (1 + error.plain) >= most]
    best = by[choice]
    if choice in ("none", HALF):
        where = "bf16" if choice == HALF else "fp32"
        fastest = max(gains, key=gains.__getitem__)
        measured = " measured" if bounds else ""
        text = f"{where} all-reduce; no{measured} method is faster than fp32 and bf16."
        if fastest not in ("none", HALF):
            text = (
                f"{where} all-reduce. Cannot tell whether a method is faster: {fastest} is "
                f"predicted {most / base:.2f} times as fast as the faster of fp32 and bf16, within "
                "the model's error."
            )
    else:
        text = (
            f"try {choice}, predicted {best['over_fp32']} times as fast as fp32, "
            f"{best['over_bf16']} as bf16"
        )
        if len(tied) > 1:
            text += f"; {len(tied) - 1} more within {error.plain:.0%}"
        text += "."
    perhaps = [spec for spec in bounds if bounds[spec] > most]
    if perhaps:
        text += f" Perhaps faster, not measured: {', '.join(perhaps)}."
    return text


# ---- the picture ---------------------------------------------------------------------------------

_PARTS = (
    ("compute_seconds", "forward + backward", "0.75"),
    ("encode_seconds", "encode", "#2E8B57"),
    ("decode_seconds", "decode", "#D98032"),
    ("exposed_seconds", "exposed communication", "#33658F"),
)


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the parts of a step at the most workers, one bar per method, the fastest at the top."""
    table = analysis.table("predictions")
    most = max(_number(row, "workers") for row in table.rows)
    rows = [row for row in table.rows if row["workers"] == most and row["refused"] is None]
    rows.sort(key=lambda row: -_number(row, "step_seconds"))
    names = [f"{row['method']}, {_number(row, 'speedup'):.3g}x" for row in rows]
    with figures.canvas(8, max(4.5, 2.2 + 0.36 * len(rows))) as figure:
        axes, starts = figure.subplots(), [0.0] * len(rows)
        for field, label, colour in _PARTS:
            widths = [1e3 * _number(row, field) for row in rows]
            axes.barh(names, widths, left=starts, color=colour, label=label)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axes.grid(axis="y", visible=False)
        axes.set(xlabel="ms", title=f"a step at {most:,.0f} workers, speedup over none")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.suptitle(f"{table.title} (predicted)", fontsize="medium")
        figures.save(figure, path)
