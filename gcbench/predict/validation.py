"""How well the model predicts finished runs: bytes, phases and steps (`predict --validate`).

No measurement of a run is used to predict that run. Bytes come from its config. Encode (with the
statistic) and decode come from a file of `gcbench bandwidth`, and are not predicted without one.
Computation and update are the median over the other runs of its group, which differ only in method.
Communication between real processes is rounds * a + bytes / b, with a and b fitted to the other
runs of the group. The communication of a simulation was modelled from its link; here it is computed
again, to compare bytes and rounds. A step between real processes is the sum of its phases; that of
a simulation, whose workers share cores, is not predicted.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from gcbench.core import progress, registry
from gcbench.core.errors import GcbenchError
from gcbench.core.exchange import classifier, dense_tensors
from gcbench.predict import costs, traffic
from gcbench.predict.clusters import Cluster, make
from gcbench.predict.networks import Shapes
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table
from gcbench.results import reader
from gcbench.training.configuration import Config

KIND = "validation"
BYTES = ("payload_up", "payload_down", "wire")
TIMES = ("forward_backward", "encode", "communicate", "decode", "update", "step")
FEWEST = 2
"""Least number of other runs to which the communication is fitted."""
EXTRAPOLATED = 2.0
"""A fitted link predicts runs with at most this multiple of the most bytes in the fit."""
FLAG = 4.0
"""Bytes in which workers agree on whether to skip a step."""


class Settings(BaseModel):
    """The settings that decide the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runs: list[str]
    hashes: list[str]
    """Config hashes and seeds, so that other runs give another analysis."""
    kernels: str | None = None
    """A file of `gcbench bandwidth --json`."""
    link_gbit: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    link_latency_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


@dataclass
class Case:
    """A run with its config, its measurements and their predictions."""

    run: reader.Run
    config: Config
    lanes: tuple[Shapes, Shapes]
    measured: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The run in tables."""
        config = self.config
        engine = f"{config.engine} {config.workers}"
        return f"{config.compressor}, {config.collective}, {engine}, seed {config.seed}"

    @property
    def group(self) -> str:
        """A key that is equal for runs that differ only in method."""
        keys = ["task", "task_options", "workers", "engine"]
        keys += ["batch", "device", "threads", "backend"]
        config = self.config.model_dump(mode="json")
        machine = self.run.summary.provenance.get("machine", {}).get("cpu")
        return json.dumps([*(config[key] for key in keys), machine])

    def messages(self, step: int = -1) -> list[traffic.Message]:
        """Return the messages of a step; default the last."""
        config, step = self.config, step % self.config.steps
        if step < config.start_step:
            plain = registry.compressor("none")
            return traffic.exchange(plain, "allreduce", self.lanes, config.workers)
        method = config.make_compressor(step)
        return traffic.exchange(method, config.collective, self.lanes, config.workers)

    @property
    def rounds(self) -> int:
        """Number of messages of a step that rings send one after another."""
        each = {"allreduce": 2, "allgather": 1, "alltoall": 1}
        return sum(each[sent.kind] for sent in self.messages()) * (self.config.workers - 1)


Layers = tuple[dict[str, tuple[int, ...]], list[str]]


def _layers(task: str, options: str) -> Layers:
    """Return the shapes of a task's parameters by name, and the names of its classifier's."""
    model = registry.task(task, **json.loads(options)).model()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return shapes, classifier(model)


def read(run: reader.Run, layers: Callable[[str, str], Layers] = _layers) -> Case:
    """Return the case of a run; `layers` may cache results.

    Raises:
        GcbenchError: its task, model or method is not available here, or it diverged.
    """
    summary = run.summary
    known = {key: value for key, value in summary.config.items() if key in Config.model_fields}
    try:
        config = Config.model_validate(known)
        named, head = layers(config.task, json.dumps(config.task_options, sort_keys=True))
        config.make_compressor()
    except (GcbenchError, ValueError, TypeError) as error:
        text = " ".join(str(error).split())
        raise GcbenchError(f"{run.source}: its config is not valid here ({text})") from None
    if summary.failed is not None:
        raise GcbenchError(
            f"{run.source}: {config.compressor}, seed {config.seed}, diverged at step "
            f"{summary.failed.step}"
        )
    shapes = [*named.values()]
    if summary.params not in (None, params := sum(map(math.prod, shapes))):
        raise GcbenchError(
            f"{run.source}: its model had {summary.params:,} parameters, the task's has "
            f"{params:,}: the model depends on the data, so its layer shapes are unknown"
        )
    last = head if config.dense_last else []
    dense = dense_tensors(list(named), shapes, config.dense_below, last)
    pairs = list(zip(shapes, dense, strict=True))
    lanes = tuple(s for s, is_dense in pairs if not is_dense), tuple(s for s, d in pairs if d)
    case = Case(run, config, lanes)
    case.measured = {
        "payload_up": summary.payload_bytes_up,
        "payload_down": summary.payload_bytes_down,
        "wire": summary.wire_bytes.per_worker,
    }
    # Phases that overlap, or that most steps skip, cannot be compared with those of one step.
    if config.engine != "ddp" and not config.local_steps:
        phases = {k: v for k, v in summary.phase_seconds.items() if v is not None}
        if "statistic" in phases:
            phases["encode"] = phases.get("encode", 0.0) + phases.pop("statistic")
        case.measured |= {k: v for k, v in phases.items() if k in TIMES}
        if summary.step_seconds is not None and config.engine != "simulate":
            case.measured["step"] = summary.step_seconds
    if summary.communicate_modelled is not None:
        case.measured["modelled"] = summary.communicate_modelled.seconds
    return case


# ---- predictions ---------------------------------------------------------------------------------


def predict_bytes(case: Case) -> None:
    """Predict the bytes of the whole run, and a simulation's modelled communication."""
    config = case.config
    workers, link = config.workers, _link(config.link_gbit, config.link_latency_us)
    edges = [*config.stages(), config.steps]
    skipped = case.run.summary.skipped_steps
    if skipped and len(edges) > 2:
        case.notes.append("skipped steps are counted as steps of the last stage")
    sums = dict.fromkeys(BYTES, 0.0)
    seconds = 0.0

    def add(messages: Sequence[traffic.Message], times: int) -> None:
        nonlocal seconds
        moved = traffic.total(messages, workers)
        for name, nbytes in zip(BYTES, (moved.up, moved.down, moved.wire), strict=True):
            sums[name] += times * nbytes
        seconds += times * sum(link.seconds(m.kind, m.nbytes, workers) for m in messages)

    for start, stop in pairwise(edges):
        exchanged = sum(map(config.exchanges_at, range(start, stop)))
        add(case.messages(start), exchanged - (skipped if stop == config.steps else 0))
    if config.on_nonfinite == "skip":
        add([traffic.Message("allreduce", FLAG)], config.steps)
    if config.rebroadcast_every:
        times = config.steps // config.rebroadcast_every
        nbytes = sum(map(traffic.dense_bytes, case.lanes))
        passed = nbytes * (workers - 1) / workers
        for name, each in zip(BYTES, (nbytes / workers, nbytes, passed), strict=True):
            sums[name] += times * each
        wait = (workers - 1) * config.link_latency_us * 1e-6
        seconds += times * (wait + 8 * passed / (config.link_gbit * 1e9)) * (workers > 1)
    case.predicted |= sums
    if "modelled" in case.measured:
        case.predicted["modelled"] = seconds / config.steps


def _link(gbit: float, latency_us: float) -> Cluster:
    """Return a cluster with this link between any two workers, in rings, as `World` models it."""
    link = {"gbit": gbit, "latency_us": latency_us}
    device = {"name": "any", "tflops": 1, "memory_gbyte": 1}
    settings = {"name": "link", "gpus_per_node": 1, "device": device, "algorithm": "ring"}
    return make({**settings, "intra": link, "inter": link}, "link")


def predict_encoding(case: Case, measured: costs.Measured | None) -> None:
    """Predict encode and decode of a step of the last stage, where they were measured."""
    if measured is None:
        return
    config, plain = case.config, registry.compressor("none")
    lanes = (
        (config.make_compressor(config.steps - 1), config.collective, case.lanes[0]),
        (plain, "allreduce", case.lanes[1]),
    )
    encode = decode = 0.0
    for method, collective, shapes in lanes:
        if not shapes:
            continue
        n = traffic.dense_bytes(shapes) / 4
        times = measured.of(method, n)
        if times is None:
            case.notes.append(f"{method.name} was not measured, for {case.run.source}")
            return
        more = times.seconds(method, collective, n, config.workers)
        encode, decode = encode + more[0], decode + more[1]
    case.predicted |= {"encode": encode, "decode": decode}


def predict_from_others(case: Case, others: Sequence[Case], link: Cluster | None) -> None:
    """Predict computation, update and communication from the group's other runs, and the step."""
    for phase in ("forward_backward", "update"):
        known = [other.measured[phase] for other in others if phase in other.measured]
        if known:
            case.predicted[phase] = statistics.median(known)
    if "communicate" in case.measured:
        seconds = _communicate(case, others, link)
        if seconds is not None:
            case.predicted["communicate"] = seconds
    if "step" in case.measured and all(phase in case.predicted for phase in TIMES[:-1]):
        case.predicted["step"] = sum(case.predicted[phase] for phase in TIMES[:-1])


def _communicate(case: Case, others: Sequence[Case], link: Cluster | None) -> float | None:
    """Return the seconds of a step's communication, from a given link or from the other runs."""
    workers = case.config.workers
    if link is not None:
        return sum(link.seconds(sent.kind, sent.nbytes, workers) for sent in case.messages())
    known = [other for other in others if "communicate" in other.measured]
    if len(known) < FEWEST or workers == 1:
        return None

    def wire(one: Case) -> float:
        return traffic.total(one.messages(), workers).wire

    seconds = np.array([one.measured["communicate"] for one in known])
    matrix = np.array([[one.rounds, wire(one)] for one in known], dtype=float) / seconds[:, None]
    each, per_byte = fit(matrix)
    if per_byte and wire(case) > EXTRAPOLATED * max(map(wire, known)):
        case.notes.append(
            f"{case.name}: communication not predicted, because it sends over {EXTRAPOLATED:g} "
            "times the bytes of the runs in the fit; add --link-gbit"
        )
        return None
    return float(each * case.rounds + per_byte * wire(case))


def fit(matrix: Any) -> Any:
    """Return nonnegative (a, b) with matrix @ (a, b) near 1, where one of them may be 0.

    Few noisy rows do not support two parameters: of the fits with both, with a alone and with b
    alone, the one with the least leave-one-out error (squared logarithm of predicted / measured) is
    taken.
    """

    def solve(rows: Any, columns: list[int]) -> Any:
        solution = np.zeros(2)
        solution[columns] = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
        return solution

    def error(columns: list[int]) -> float:
        total = 0.0
        for position in range(len(matrix)):
            solution = solve(np.delete(matrix, position, axis=0), columns)
            predicted = float(matrix[position] @ solution)
            if solution.min() < 0 or predicted <= 0:
                return np.inf
            total += float(np.log(predicted) ** 2)
        return total

    choices = [[0], [1]] if len(matrix) <= FEWEST else [[0], [1], [0, 1]]
    return solve(matrix, min(choices, key=error))


# ---- the analysis --------------------------------------------------------------------------------


def run(settings: Settings, command: str, observer: progress.Observer, ledger: Ledger) -> Analysis:
    """Predict every run and compare.

    Raises:
        UsageError: no run, or a measurement that cannot be read.
        GcbenchError: none of the runs can be predicted here.
    """
    measured = None if settings.kernels is None else costs.load(Path(settings.kernels))
    link = None
    if settings.link_gbit is not None:
        link = _link(settings.link_gbit, settings.link_latency_us)
    layers = cache(_layers)  # many rows share a task, and making its model takes a second
    left_out = []
    groups: dict[str, list[Case]] = {}
    runs = reader.load([Path(run) for run in settings.runs])
    for position, one in enumerate(runs, 1):
        try:
            case = read(one, layers)
            predict_bytes(case)
            predict_encoding(case, measured)
        except GcbenchError as error:
            left_out.append(f"Left out: {error}.")
        else:
            groups.setdefault(case.group, []).append(case)
        observer.step(position)
    if not groups:
        raise GcbenchError(" ".join(left_out))
    cases = [case for group in groups.values() for case in group]
    for group in groups.values():
        for case in group:
            predict_from_others(case, [other for other in group if other is not case], link)
    rows = [row for case in cases for row in _quantities(case)]
    errors = list(_errors(rows))
    if left_out:
        left_out.append(f"{len(left_out)} of {len(runs)} runs left out.")
    notes = dict.fromkeys([*left_out, *(note for case in cases for note in case.notes)])
    sizes = Table(
        name="errors",
        title="Errors of the predictions",
        shown=[
            Shown(field="quantity", heading="quantity"),
            Shown(field="runs", heading="runs"),
            Shown(field="median", heading="median\n%", scale=100),
            Shown(field="largest", heading="largest\n%", scale=100),
            Shown(field="largest_at", heading="of"),
        ],
        rows=errors,
    )
    return Analysis.of(
        KIND,
        settings,
        command,
        answer=[
            f"{row['quantity']}: median error {100 * float(row['median'] or 0):.2g} %, largest "
            f"{100 * float(row['largest'] or 0):.2g} %, n = {row['runs']}."
            for row in errors
            if row["quantity"] in ("wire", "step")
        ],
        tables=[
            Table(
                name="quantities",
                title="Measured and predicted",
                shown=[
                    Shown(field="quantity", heading="quantity"),
                    Shown(field="unit", heading="unit"),
                    Shown(field="measured", heading="measured"),
                    Shown(field="predicted", heading="predicted"),
                    Shown(field="error", heading="error\n%", scale=100),
                ],
                which=2,
                by="run",
                notes=[
                    "Times are per step and worker, bytes per worker over the whole run. encode "
                    "includes the statistic. modelled: communication that the simulation derived "
                    "from its link.",
                    *notes,
                ],
                rows=rows,
            ),
            sizes,
            Table(**{**sizes.model_dump(), "name": "brief", "brief": True, "rows": errors}),
        ],
    )


def _quantities(case: Case) -> Iterator[Row]:
    for name in (*BYTES, *TIMES, "modelled"):
        measured, predicted = case.measured.get(name), case.predicted.get(name)
        if measured is None or (measured == 0 and not predicted):
            continue
        known = bool(predicted) and measured > 0  # phases in which nothing is done have no error
        yield {
            "run": case.name,
            "task": case.config.task,
            "method": case.config.compressor,
            "engine": case.config.engine,
            "workers": case.config.workers,
            "quantity": name,
            "unit": "bytes" if name in BYTES else "s",
            "measured": measured,
            "predicted": predicted,
            "error": (predicted or 0.0) / measured - 1 if known else None,
            "source": str(case.run.source),
        }


def _errors(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the median and the largest error of each quantity."""
    for name in dict.fromkeys(str(row["quantity"]) for row in rows):
        known = [row for row in rows if row["quantity"] == name and row["error"] is not None]
        if not known:
            continue
        sizes = [abs(float(row["error"] or 0)) for row in known]
        largest = max(range(len(known)), key=sizes.__getitem__)
        yield {
            "quantity": name,
            "runs": len(known),
            "median": statistics.median(sizes),
            "largest": sizes[largest],
            "largest_at": known[largest]["run"],
        }


# ---- the picture ---------------------------------------------------------------------------------


def draw(analysis: Analysis, path: Path) -> None:
    """Draw predicted over measured time by phase, with the diagonal and a factor of 2."""
    rows = [
        row
        for row in analysis.table("quantities").rows
        if row["unit"] == "s" and row["predicted"] and row["measured"]
    ]
    names = list(dict.fromkeys(str(row["quantity"]) for row in rows))
    styles = figures.styles(names)
    with figures.canvas(9.5, 7) as figure:
        axes = figure.subplots()
        for name in names:
            points = [
                (1e3 * float(row["measured"] or 0), 1e3 * float(row["predicted"] or 0))
                for row in rows
                if row["quantity"] == name
            ]
            look = {"color": styles[name]["color"], "markersize": 8, "alpha": 0.85}
            label = name.replace("_", " + ")
            axes.plot(*zip(*points, strict=True), styles[name]["marker"], label=label, **look)
        ends = [1e3 * float(row[key] or 0) for row in rows for key in ("measured", "predicted")]
        if ends:
            low, high = min(ends) / 2, max(ends) * 2
            axes.plot([low, high], [low, high], color="0.3", linewidth=1)
            for factor in (0.5, 2.0):
                axes.plot([low, high], [low * factor, high * factor], ":", color="0.5", linewidth=1)
            axes.set(xlim=(low, high), ylim=(low, high))
        axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        runs = len({row["source"] for row in rows})
        axes.set_title(f"Phases of a step, {runs} runs; dotted: a factor of 2", fontsize="medium")
        figure.legend(loc="outside right upper", fontsize="small")
        figures.save(figure, path)
