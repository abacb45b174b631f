"""How well the model predicts finished runs: bytes, phases and steps, each with its error.

No measurement of a run is used to predict that run. Bytes come from its config alone. Statistic,
encode and decode come from timings of the kernels, made on this machine (for runs made on it) or
read from a file. Computation and update are the median over the other runs of its group, which
differ only in method. Communication between real processes is rounds * a + bytes / b, with a and b
fitted to the other runs of the group. That of a simulation was modelled from its link; here it is
computed again, to compare bytes and rounds. A step between real processes is the sum of its phases;
that of a simulation, whose workers share cores, is not predicted. speedup: measured step of the
group's `none` / step.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from gcbench import ops
from gcbench.core import progress, registry
from gcbench.core.errors import GcbenchError
from gcbench.core.exchange import classifier, dense_tensors
from gcbench.report import figures, kernel_timings
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table
from gcbench.results import reader
from gcbench.studies.scale import traffic, work
from gcbench.studies.scale.clusters import Cluster, make
from gcbench.studies.scale.networks import Shapes
from gcbench.training import configuration
from gcbench.training.configuration import Config

KIND = "scale-validation"
BYTES = ("payload_up", "payload_down", "wire")
TIMES = ("forward_backward", "statistic", "encode", "communicate", "decode", "update", "step")
FEWEST = 2
"""The least number of other runs to which a and b of the communication are fitted."""
EXTRAPOLATED = 2.0
"""A fitted link predicts runs with at most so many times the most bytes that it was fitted to."""
FLAG = 4.0
"""Bytes in which workers agree on whether to skip a step."""


class Settings(BaseModel):
    """The settings that decide the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runs: list[str]
    hashes: list[str]
    """Hashes of the runs' configs, with seeds, so that other runs give another analysis."""
    kernels: str = "measured"
    link_gbit: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    link_latency_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


@dataclass
class Case:
    """A run with its config, its measurements, and the predictions of them."""

    run: reader.Run
    config: Config
    lanes: tuple[Shapes, Shapes]
    measured: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Text that identifies the run in tables."""
        config = self.config
        words = [config.compressor, config.collective, f"{config.engine} {config.workers}"]
        return ", ".join([*words, f"seed {config.seed}"])

    @property
    def group(self) -> str:
        """Text that is equal for runs of one group, which differ only in method."""
        config = self.config.model_dump(mode="json")
        kept = (
            "task",
            "task_options",
            "workers",
            "engine",
            "batch",
            "device",
            "threads",
            "backend",
        )
        machine = self.run.summary.provenance.get("machine", {}).get("cpu")
        return json.dumps([*(config[key] for key in kept), machine])

    @property
    def messages(self) -> list[traffic.Message]:
        """The messages of a step of the last stage."""
        return _messages(self, self.config.steps - 1)

    @property
    def rounds(self) -> int:
        """The number of messages of a step one after the other, in rings."""
        each = {"allreduce": 2, "allgather": 1, "alltoall": 1}
        return sum(each[sent.kind] for sent in self.messages) * (self.config.workers - 1)


Layers = tuple[dict[str, tuple[int, ...]], list[str]]


def _layers(task: str, options: str) -> Layers:
    """Return the shapes of a task's parameters by name, and the names of its classifier's.

    `options`: the task's, as JSON.
    """
    model = registry.task(task, **json.loads(options)).model()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return shapes, classifier(model)


def read(run: reader.Run, layers: Callable[[str, str], Layers] = _layers) -> Case:
    """Return the case of a run; `layers` may remember what it returned for the same task.

    Raises:
        GcbenchError: its task, model or method cannot be made here, or it diverged.
    """
    summary = run.summary
    known = {key: value for key, value in summary.config.items() if key in Config.model_fields}
    try:
        config = Config.model_validate(known)
        named, head = layers(config.task, json.dumps(config.task_options, sort_keys=True))
        config.make_compressor()
    except (GcbenchError, ValueError, TypeError) as error:
        said = " ".join(str(error).split())
        raise GcbenchError(f"{run.source}: its config cannot be made here ({said})") from None
    if summary.failed is not None:
        raise GcbenchError(
            f"{run.source}: {config.compressor}, seed {config.seed}, diverged at step "
            f"{summary.failed.step}, and has no times, nor the bytes of all of its steps"
        )
    shapes = [*named.values()]
    if summary.params not in (None, params := sum(map(math.prod, shapes))):
        raise GcbenchError(
            f"{run.source}: its model had {summary.params:,} parameters, the task's own has "
            f"{params:,}: it was fitted to data, and its layers cannot be told"
        )
    last = head if config.dense_last else []
    dense = dense_tensors(list(named), shapes, config.dense_below, last)
    pairs = list(zip(shapes, dense, strict=True))
    lanes = tuple(s for s, kept in pairs if not kept), tuple(s for s, kept in pairs if kept)
    case = Case(run, config, lanes)
    case.measured = {
        "payload_up": summary.payload_bytes_up,
        "payload_down": summary.payload_bytes_down,
        "wire": summary.wire_bytes.per_worker,
    }
    # Phases that overlap, or that most steps do not have, cannot be compared with a step's.
    timed = config.engine != "ddp" and not config.local_steps
    for phase, seconds in summary.phase_seconds.items():
        if seconds is not None and phase in TIMES and timed:
            case.measured[phase] = seconds
    if summary.communicate_modelled is not None:
        case.measured["modelled"] = summary.communicate_modelled.seconds
    if summary.step_seconds is not None and config.engine != "simulate" and timed:
        case.measured["step"] = summary.step_seconds
    return case


# ---- predictions ---------------------------------------------------------------------------------


def _messages(case: Case, step: int) -> list[traffic.Message]:
    config = case.config
    if step < config.start_step:
        plain = registry.compressor("none")
        return traffic.exchange(plain, "allreduce", case.lanes, config.workers)
    method = config.make_compressor(step)
    return traffic.exchange(method, config.collective, case.lanes, config.workers)


def predict_bytes(case: Case) -> None:
    """Predict the bytes of the whole run, and a simulation's modelled communication."""
    config = case.config
    workers, link = config.workers, _link(config.link_gbit, config.link_latency_us)
    edges = [*config.stages(), config.steps]
    skipped = case.run.summary.skipped_steps
    if skipped and len(edges) > 2:
        case.notes.append("skipped steps are taken for steps of the last stage")
    found = dict.fromkeys(BYTES, 0.0)
    seconds = 0.0

    def add(messages: Sequence[traffic.Message], times: int) -> None:
        nonlocal seconds
        moved = traffic.total(messages, workers)
        for name, nbytes in zip(BYTES, (moved.up, moved.down, moved.wire), strict=True):
            found[name] += times * nbytes
        seconds += times * sum(link.seconds(m.kind, m.nbytes, workers) for m in messages)

    for start, stop in pairwise(edges):
        exchanged = sum(map(config.exchanges_at, range(start, stop)))
        steps = exchanged - (skipped if stop == config.steps else 0)
        add(_messages(case, start), steps)
    if config.on_nonfinite == "skip":
        add([traffic.Message("allreduce", FLAG)], config.steps)
    if config.rebroadcast_every:
        times = config.steps // config.rebroadcast_every
        nbytes = sum(map(traffic.dense_bytes, case.lanes))
        passed = nbytes * (workers - 1) / workers
        for name, each in zip(BYTES, (nbytes / workers, nbytes, passed), strict=True):
            found[name] += times * each
        wait = (workers - 1) * config.link_latency_us * 1e-6
        seconds += times * (wait + 8 * passed / (config.link_gbit * 1e9)) * (workers > 1)
    case.predicted |= found
    if "modelled" in case.measured:
        case.predicted["modelled"] = seconds / config.steps


def _link(gbit: float, latency_us: float) -> Cluster:
    """Return a link between any two workers, in rings, as `World` models it."""
    wire = {"gbit": gbit, "latency_us": latency_us}
    settings = {
        "name": "link",
        "gpus_per_node": 1,
        "device": {"name": "any", "tflops": 1, "memory_gbyte": 1},
        "intra": wire,
        "inter": wire,
        "algorithm": "ring",
    }
    return make(settings, "link")


Rate = Callable[[Case, Any, Shapes], work.Rates | None]


def predict_kernels(case: Case, rate: Rate) -> None:
    """Predict statistic, encode and decode of a step of the last stage."""
    config, plain = case.config, registry.compressor("none")
    method, carried = config.make_compressor(config.steps - 1), config.make_memory()
    parts = (
        (method, config.collective, case.lanes[0], carried),
        (plain, "allreduce", case.lanes[1], carried.dense()),
    )
    totals = dict.fromkeys(("statistic", "encode", "decode"), 0.0)
    for one, collective, shapes, memory in parts:
        if not shapes:
            continue
        rates = rate(case, one, shapes)
        if rates is None:
            case.notes.append(f"no timings of {one.name} for {case.run.source}")
            return
        n = traffic.dense_bytes(shapes) / 4
        encode, decode = work.step(rates, one, collective, n, config.workers, memory)
        agreed = rates["statistic"] * n
        totals["statistic"] += agreed
        totals["encode"] += max(0.0, encode - agreed)
        totals["decode"] += decode
    case.predicted |= totals


def predict_from_others(case: Case, others: Sequence[Case], link: Cluster | None) -> None:
    """Predict computation, update and communication from the group's other runs, and the step."""
    for phase in ("forward_backward", "update"):
        known = [other.measured[phase] for other in others if phase in other.measured]
        if known:
            case.predicted[phase] = statistics.median(known)
    if "communicate" in case.measured:
        spent = _communicate(case, others, link)
        if spent is not None:
            case.predicted["communicate"] = spent
    if "step" in case.measured and all(phase in case.predicted for phase in TIMES[:-1]):
        case.predicted["step"] = sum(case.predicted[phase] for phase in TIMES[:-1])


def _communicate(case: Case, others: Sequence[Case], link: Cluster | None) -> float | None:
    """Return the time of a step's communication, from a given link or from the other runs."""
    workers = case.config.workers
    if link is not None:
        return sum(link.seconds(sent.kind, sent.nbytes, workers) for sent in case.messages)
    known = [other for other in others if "communicate" in other.measured]
    if len(known) < FEWEST or workers == 1:
        return None

    def wire(one: Case) -> float:
        return traffic.total(one.messages, workers).wire

    seconds = np.array([one.measured["communicate"] for one in known])
    matrix = np.array([[one.rounds, wire(one)] for one in known], dtype=float) / seconds[:, None]
    each, per_byte = _fitted(matrix)
    farthest = EXTRAPOLATED * max(wire(one) for one in known)
    if per_byte and wire(case) > farthest:
        case.notes.append(
            f"{case.name}: communication not predicted, as it sends over {EXTRAPOLATED:g} times "
            "the bytes of the runs that the link would be fitted to; give --link-gbit"
        )
        return None
    return float(each * case.rounds + per_byte * wire(case))


def _fitted(matrix: Any) -> Any:
    """Return nonnegative (a, b) with matrix @ (a, b) near 1; one of them may be 0.

    Few and noisy rows do not support two parameters: of the fits with both, with a alone and with b
    alone, the one with the least leave-one-out error is taken.
    """

    def fit(rows: Any, columns: list[int]) -> Any:
        found = np.zeros(2)
        found[columns] = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
        return found

    def badness(columns: list[int]) -> float:
        """Return the leave-one-out error: the sum of squared logarithms of predicted / measured."""
        total = 0.0
        for place in range(len(matrix)):
            found = fit(np.delete(matrix, place, axis=0), columns)
            told = float(matrix[place] @ found)
            if found.min() < 0 or told <= 0:
                return np.inf
            total += float(np.log(told) ** 2)
        return total

    choices = [[0], [1]] if len(matrix) <= FEWEST else [[0], [1], [0, 1]]
    return fit(matrix, min(choices, key=badness))


# ---- the analysis --------------------------------------------------------------------------------


def run(settings: Settings, command: str, observer: progress.Observer, ledger: Ledger) -> Analysis:
    """Predict every run and compare.

    Raises:
        UsageError: no run, or timings that cannot be read.
        GcbenchError: none of the runs can be predicted here.
    """
    read_cases, left_out = [], []
    layers = cache(_layers)  # many rows are of one task, and making its model takes a second
    for found in reader.load([Path(run) for run in settings.runs]):
        try:
            read_cases.append(read(found, layers))
        except GcbenchError as error:
            left_out.append(f"Left out: {error}.")
    rate = _rates(settings, ledger)
    link = None
    if settings.link_gbit is not None:
        link = _link(settings.link_gbit, settings.link_latency_us)
    cases: list[Case] = []
    groups: dict[str, list[Case]] = {}
    for place, case in enumerate(read_cases):
        observer.step(place, f"timing the kernels of {case.config.compressor}")
        try:
            predict_bytes(case)
            predict_kernels(case, rate)
        except GcbenchError as error:
            left_out.append(f"Left out: {case.run.source}: {case.name}: {error}.")
        else:
            cases.append(case)
            groups.setdefault(case.group, []).append(case)
        observer.step(place + 1)
    if not cases:
        raise GcbenchError(" ".join(left_out))
    for group in groups.values():
        for case in group:
            predict_from_others(case, [other for other in group if other is not case], link)
        _speedups(group)
    count = len(cases) + len(left_out)
    quantities = [row for case in cases for row in _quantities(case)]
    summary = list(_errors(quantities))
    notes = [
        *dict.fromkeys(left_out),
        *dict.fromkeys(note for case in cases for note in case.notes),
    ]
    return Analysis.of(
        KIND,
        settings,
        command,
        conclusions=[
            *_conclusions(summary, quantities),
            *([f"{len(left_out)} of {count} runs left out, see the notes."] if left_out else []),
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
                    "Times are of one step and one worker, bytes of one worker over the whole run. "
                    "modelled is the communication time that the simulation itself derived from "
                    "its link. What is not predicted has a dash.",
                    *notes,
                ],
                rows=quantities,
            ),
            Table(
                name="errors",
                title="Size of the errors, over the runs",
                shown=[
                    Shown(field="quantity", heading="quantity"),
                    Shown(field="runs", heading="runs"),
                    Shown(field="median", heading="median\n%", scale=100),
                    Shown(field="largest", heading="largest\n%", scale=100),
                    Shown(field="largest_at", heading="of"),
                ],
                rows=summary,
            ),
        ],
    )


def _rates(settings: Settings, ledger: Ledger) -> Rate:
    """Return a function for the rates of a method in a run; it returns None if they are unknown."""
    timings = (
        None if settings.kernels == "measured" else kernel_timings.load(Path(settings.kernels))
    )
    here = configuration.machine().get("cpu")

    def rate(case: Case, method: Any, shapes: Shapes) -> work.Rates | None:
        threads = configuration.threads_per_worker(case.config)
        n = max(1, round(traffic.dense_bytes(shapes) / 4))
        if timings is not None:
            return work.of_file(method, timings, n, threads)
        machine = case.run.summary.provenance.get("machine", {})
        if machine.get("cpu") != here or case.config.device != "cpu":
            return None
        source = f"{method.name} {registry.source_digest(method.name)}"
        key = f"{source} {method!r} {shapes} {threads} {case.config.backend}"
        if key not in ledger:
            ops.use(case.config.backend)
            try:
                ledger[key] = work.measure(method, shapes, threads).parts
            finally:
                ops.use("auto")
        return work.Rates(ledger[key], "measured")

    return rate


def _speedups(group: Sequence[Case]) -> None:
    """Add to the group's runs between real processes the speedup over its `none`."""
    base = [case for case in group if case.config.compressor == "none"]
    if not base:
        return
    for case in group:
        if case.config.compressor == "none" or "step" not in case.measured:
            continue
        same = [one for one in base if one.config.seed == case.config.seed] or base
        dense = same[0].measured.get("step")
        for known in (case.measured, case.predicted):
            if dense and "step" in known:
                known["speedup"] = dense / known["step"]


UNITS = {**dict.fromkeys(BYTES, "bytes"), "speedup": "x"}


def _quantities(case: Case) -> Iterator[Row]:
    for name in (*BYTES, *TIMES, "modelled", "speedup"):
        measured, predicted = case.measured.get(name), case.predicted.get(name)
        if measured is None or (measured == 0 and not predicted):
            continue
        known = bool(predicted) and measured > 0  # no error of a phase in which nothing is done
        yield {
            "run": case.name,
            "task": case.config.task,
            "method": case.config.compressor,
            "engine": case.config.engine,
            "workers": case.config.workers,
            "quantity": name,
            "unit": UNITS.get(name, "s"),
            "measured": measured,
            "predicted": predicted,
            "error": (predicted or 0.0) / measured - 1 if known else None,
            "source": str(case.run.source),
        }


def _errors(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the median and the largest error of each quantity."""
    for name in dict.fromkeys(str(row["quantity"]) for row in rows):
        own = [row for row in rows if row["quantity"] == name and row["error"] is not None]
        if not own:
            continue
        sizes = [abs(float(row["error"] or 0)) for row in own]
        largest = max(range(len(own)), key=sizes.__getitem__)
        yield {
            "quantity": name,
            "runs": len(own),
            "median": statistics.median(sizes),
            "largest": sizes[largest],
            "largest_at": own[largest]["run"],
        }


def _conclusions(summary: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    found: Mapping[str, Row] = {str(row["quantity"]): row for row in summary}
    said = []
    moved = [float(found[name]["largest"] or 0) for name in BYTES if name in found]
    if moved:
        said.append(f"Bytes: largest error {100 * max(moved):.2g} % of {len(moved)} counts a run.")
    for name in ("step", "speedup"):
        if name in found:
            row = found[name]
            said.append(
                f"{name.capitalize()}: median error {100 * float(row['median'] or 0):.2g} %, "
                f"largest {100 * float(row['largest'] or 0):.2g} %, n = {row['runs']}."
            )
    judged = [
        (float(row["measured"] or 0) > 1, float(row["predicted"] or 0) > 1)
        for row in rows
        if row["quantity"] == "speedup" and row["predicted"] is not None
    ]
    if judged:
        right = sum(a == b for a, b in judged)
        said.append(f"Faster or slower than `none`: right for {right} of {len(judged)} runs.")
    return said


# ---- the picture ---------------------------------------------------------------------------------


def draw(analysis: Analysis, path: Path) -> None:
    """Draw predicted over measured time, by phase, with the diagonal and a factor of 2."""
    drawn = [
        row
        for row in analysis.table("quantities").rows
        if row["unit"] == "s" and row["predicted"] and row["measured"]
    ]
    names = list(dict.fromkeys(str(row["quantity"]) for row in drawn))
    styles = figures.styles(names)
    with figures.canvas(9.5, 7) as figure:
        axes = figure.subplots()
        for name in names:
            own = [row for row in drawn if row["quantity"] == name]
            axes.plot(
                [1e3 * float(row["measured"] or 0) for row in own],
                [1e3 * float(row["predicted"] or 0) for row in own],
                styles[name]["marker"],
                color=styles[name]["color"],
                markersize=8,
                alpha=0.85,
                label=name.replace("_", " + "),
            )
        values = [1e3 * float(row[key] or 0) for row in drawn for key in ("measured", "predicted")]
        if values:
            low, high = min(values) / 2, max(values) * 2
            axes.plot([low, high], [low, high], color="0.3", linewidth=1)
            for factor in (0.5, 2.0):
                ends = [low * factor, high * factor]
                axes.plot([low, high], ends, ":", color="0.5", linewidth=1)
            axes.set(xlim=(low, high), ylim=(low, high))
        axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        runs = len({row["source"] for row in drawn})
        axes.set_title(f"Phases of a step, {runs} runs; dotted: a factor of 2", fontsize="medium")
        figure.legend(loc="outside right upper", fontsize="small")
        figures.save(figure, path)
