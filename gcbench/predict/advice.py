"""Whether to try compression on a cluster, and which method (`gcbench advise`).

The gain is predicted (`prediction`), over the faster of the uncompressed steps in fp32 and in bf16.
A method is judged by the legal collective with the best verdict; among equal ones, by the fastest.
Of methods that are tied within the margin the simplest comes first (`steps.SIMPLE`). The loss of
accuracy comes from stored runs (`evidence`) of tasks that read the same inputs as the model, images
or text; the worst of several rows counts. Rows of other tasks only warn. The runs trained smaller
models, so the advice is what to try, never a promise; a method without accuracy runs or measured
encoding times is not recommended. A row by another collective counts if both compute the same mean.

By all-gather a worker receives N - 1 payloads of b bits per element, by a ring all-reduce of fp32
2 (N - 1) / N times 32 bits: an all-gather moves less only for fewer than N = 64 / b workers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from gcbench.core import progress, registry
from gcbench.core.compressor import Compressor, requantizes
from gcbench.core.errors import UsageError
from gcbench.predict import bundled, costs, evidence, prediction, traffic
from gcbench.predict.clusters import Cluster
from gcbench.predict.evidence import Evidence, Tolerance
from gcbench.predict.prediction import Prepared
from gcbench.predict.steps import HALF, Step, simplest
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table
from gcbench.results import reader
from gcbench.results.schema import Summary
from gcbench.studies import methods
from gcbench.training import suites

KIND = "advice"
TRY, UNCLEAR, UNTESTED = "try", "unclear", "untested"
LOSES, NO_GAIN, REFUSED = "loses too much", "no gain", "refused"
ORDER = (TRY, UNCLEAR, UNTESTED, LOSES, NO_GAIN, REFUSED)
VERDICTS = {evidence.FITS: TRY, evidence.UNCLEAR: UNCLEAR, evidence.LOSES: LOSES}
SUITE = "main"
"""The suite that measures the accuracy of methods without evidence."""
ROWS = "results/reference"
"""The folder of reference rows, below the current folder."""
BF16 = ("DDP: bf16_compress_hook", "FSDP: reduce_dtype=torch.bfloat16")
"""How to reduce in bf16, without and with sharding."""
BRIEF = 5
"""Number of methods in the short table."""


class Settings(prediction.Settings):
    """The settings that decide the advice."""

    workers: Annotated[
        list[Annotated[int, Field(ge=2, le=prediction.MOST_WORKERS)]],
        Field(min_length=1, max_length=1),
    ]
    tolerance: Annotated[float, Field(ge=0, le=1)]
    """Acceptable loss of accuracy, a fraction of 1."""
    tolerance_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Acceptable increase of the test loss, on tasks without an accuracy."""
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Least gain that makes compression worthwhile: 0.05 is 5 %."""
    runs: list[str]
    """Folders and files of results."""

    @property
    def allowed(self) -> Tolerance:
        """The acceptable losses."""
        return Tolerance(self.tolerance, self.tolerance_loss)


def default_places(runs: Path) -> list[Path]:
    """Return the default places of results that exist.

    They are the files in `ROWS` below the current folder, the packaged files whose name is not
    among those, and the folder `runs`.
    """
    files = reader.row_files(Path(ROWS))
    names = {file.name for file in files}
    packaged = [file for file in bundled.rows() if file.name not in names]
    finished = any((folder / "summary.json").exists() for folder in reader.run_folders(runs))
    return [*files, *packaged, *([runs] if finished else [])]


# ---- the loss of accuracy ------------------------------------------------------------------------


class Losses(NamedTuple):
    """What runs show about the accuracy of a method, used in one way."""

    counting: Sequence[Evidence]
    """Rows that count for the collective in question."""
    others: Sequence[Evidence]
    """Rows by a collective that computes another mean."""


def losses_of(
    settings: Settings, step: Step, known: Sequence[Evidence], inputs: str = ""
) -> Losses:
    """Return the rows of exactly this method, used as in `step`.

    Rows count if they have the same collective, or one that computes the same mean. A row by
    all-gather that loses too much also counts against a two-shot exchange, whose owners lose more;
    one that does not lose too much shows nothing about it. `inputs`: what the model reads; a loss
    on a task with other inputs counts so only if there is no nearer task.
    """
    rows = of_method(settings, step.method, known)
    near = set(map(id, evidence.nearest(rows, inputs).near))

    def counts(one: Evidence) -> bool:
        loses = one.judge(settings.allowed) == evidence.LOSES and id(one) in near
        same = _same_mean(step.method, one.row.first.collective, step.collective)
        return same or (step.collective == "twoshot" and loses)

    return Losses([one for one in rows if counts(one)], [one for one in rows if not counts(one)])


def of_method(settings: Settings, method: Compressor, known: Sequence[Evidence]) -> list[Evidence]:
    """Return the rows of exactly this method, by any collective.

    Name, fields, memory, dense tensors, and the source of a method that is not built in are equal.
    """
    origin = registry.origin(registry.compressors()[method.name])
    expected = {
        "memory": method.memory,
        "memory_options": dict(method.memory_options),
        "start_step": 0,
        "delay": 0,
        "local_steps": 0,
        "dense_last": settings.dense_last,
        "dense_below": settings.dense_below,
    }

    def fits(one: Evidence) -> bool:
        run = one.row.runs[0]
        name = run.summary.compressor_name, run.summary.compressor
        if name != (method.name, registry.call(method)) or reader.schedules(run.summary):
            return False
        if not all(same_source(each.summary, origin) for each in one.row.runs):
            return False
        return all(run.config.get(key, value) == value for key, value in expected.items())

    return [one for one in known if fits(one)]


def same_source(run: Summary, origin: Mapping[str, str] | None) -> bool:
    """Return whether a run used the code that a method has now.

    `origin` is by `registry.origin`. Built-in methods count as unchanged.
    """
    then = (run.provenance.get("plugins") or {}).get("compressor")
    if not isinstance(then, Mapping) or origin is None:
        return then is origin
    digest = origin["sha256"]  # empty without a source file
    return bool(digest and then.get("sha256") == digest) or then == origin


def _same_mean(method: Compressor, one: str, other: str) -> bool:
    return one == other or not requantizes(method)


def worst(known: Sequence[Evidence], tolerance: Tolerance) -> Evidence:
    """Return the row with the worst verdict; of equal ones, that with the largest upper limit."""

    def badness(one: Evidence) -> tuple[int, bool, float]:
        lost = one.lost
        verdict = evidence.VERDICTS.index(one.judge(tolerance))
        allowed = tolerance.accuracy if one.row.metric == "accuracy" else tolerance.loss
        most = math.inf if lost is None else lost[2] / allowed if allowed else lost[2]
        return verdict, bool(one.row.failed), most

    return max(known, key=badness)


Known = Mapping[tuple[str, str], Losses]
"""(method, collective) -> evidence."""


# ---- the analysis --------------------------------------------------------------------------------


def run(settings: Settings, command: str, observer: progress.Observer, ledger: Ledger) -> Analysis:
    """Rank the methods for a model on a cluster.

    Raises:
        UsageError: see `prediction.prepare`; or a place of results does not exist.
    """
    prepared = prediction.prepare(settings, every=True)
    workers, cluster = settings.workers[0], settings.cluster
    gathered = evidence.gather([Path(place) for place in settings.runs])
    known = {
        key: losses_of(settings, step, gathered.rows, prepared.network.inputs)
        for key, step in prepared.steps.items()
    }
    rows = _rows(settings, prepared, known, cluster)
    for row in rows:
        if row["speedup"] is not None:
            step = prepared.steps[str(row["method"]), str(row["collective"])]
            row |= prepared.pays_fields(step, workers, cluster, settings.margin)
    observer.step(len(settings.compressors))
    title = prediction.title(settings, prepared, f"{workers} workers")
    kernels = "measured, where known" if prepared.by_measured else "the lower bound"
    gain = f"{100 * settings.margin:g} %"
    notes = [
        *prepared.notes,
        f"try: predicted to gain at least {gain} over both fp32 and bf16 with measured encoding "
        f"times, and every 95 % interval that counts excludes a loss above {_allowed(settings)}. "
        "unclear: gains only with faster encoding than measured, encoding not measured, or such a "
        "loss lies within an interval. untested: gains, but no run by this collective. loses too "
        "much: a whole interval lies beyond that loss, or a seed diverged. no gain: gains less.",
        "over fp32, over bf16: time of the uncompressed step divided by the time of this step, "
        f"from measured encoding times to the upper bound; step ms uses {kernels}. Within a "
        f"verdict a simpler method precedes one that is less than {gain} faster. pays on links: "
        f"links between nodes on which it gains {gain}.",
        "accuracy: loss against `none`, paired by seed, with its 95 % interval; the worst row of a "
        "task that reads what the model reads. other inputs: the worst row of other tasks, which "
        "only warns. allgather alone, twoshot alone: measured by that collective only; the "
        "recommended one computes a different mean (two-shot re-encodes it).",
        "all-gather up to: with more workers an all-gather moves more bytes than a ring all-reduce "
        "of fp32.",
        *(f"Refused: {reason}." for reason in prepared.refused.values()),
    ]
    seen = list(_seen(settings, prepared, gathered.rows))
    numel = evidence.count_text(prepared.network.numel)
    return Analysis.of(
        KIND,
        settings,
        command,
        answer=_answers(settings, prepared, rows, known, gathered.rows),
        conclusions=[
            *_coverage(settings, prepared, gathered, seen),
            *_basis(prepared, seen, rows),
            *_other_sources(prepared, gathered.rows),
            *_unknown_rates(seen),
            *_untested(settings, rows),
        ],
        tables=[
            Table(name="methods", title=title, shown=_SHOWN, notes=notes, rows=rows),
            Table(
                name="evidence",
                title=f"Accuracy runs ({prepared.network.title} has {numel} parameters)",
                shown=_SEEN,
                notes=[
                    "lost: difference from `none`, paired by seed, with the 95 % interval of "
                    "Student's t. rate: tuned by the suite's rule, at the edge of the rates tried, "
                    "or untuned. size: parameters of your model divided by those of this one.",
                ],
                rows=seen,
            ),
            Table(
                name="brief",
                brief=True,
                title=f"{prepared.network.title}, {workers} workers, {cluster.name}",
                shown=_BRIEF,
                notes=["* with another collective or on other inputs than your model's."]
                * any("*" in str(row["accuracy_brief"]) for row in rows[:BRIEF]),
                rows=rows[:BRIEF],
            ),
        ],
    )


_SHOWN = [
    Shown(field="method", heading="method"),
    Shown(field="advice", heading="verdict"),
    Shown(field="over_fp32", heading="over\nfp32"),
    Shown(field="over_bf16", heading="over\nbf16"),
    Shown(field="accuracy", heading="accuracy"),
    Shown(field="elsewhere", heading="other inputs"),
    Shown(field="step_seconds", heading="step\nms", scale=1e3),
    Shown(field="collective", heading="by"),
    Shown(field="wire_bytes", heading="wire\nMB", scale=1e-6),
    Shown(field="pays_on", heading="pays on links"),
    Shown(field="results", heading="results"),
    Shown(field="bits", heading="bits per\nelement"),
    Shown(field="gather_limit", heading="all-gather\nup to"),
]
_BRIEF = [
    *(one for one in _SHOWN if one.field in ("method", "advice", "over_bf16")),
    Shown(field="accuracy_brief", heading="accuracy"),
]
_SEEN = [
    Shown(field="method", heading="method"),
    Shown(field="collective", heading="by"),
    Shown(field="task", heading="task"),
    Shown(field="judged_by", heading="counts"),
    Shown(field="network", heading="network"),
    Shown(field="parameters", heading="para-\nmeters"),
    Shown(field="steps", heading="steps"),
    Shown(field="batch", heading="batch"),
    Shown(field="workers", heading="workers"),
    Shown(field="seeds", heading="seeds"),
    Shown(field="lost", heading="lost"),
    Shown(field="lost_low", heading="from"),
    Shown(field="lost_high", heading="to"),
    Shown(field="lost_unit", heading="of"),
    Shown(field="rate", heading="rate"),
    Shown(field="size", heading="size,\ntimes"),
    Shown(field="suite", heading="suite"),
]

_LOST = ("lost", "lost_low", "lost_high")


def _allowed(settings: Settings) -> str:
    return f"{100 * settings.tolerance:g} points of accuracy or {settings.tolerance_loss:g} of loss"


def _rows(
    settings: Settings, prepared: Prepared, known: Known, cluster: Cluster, longer: float = 1.0
) -> list[Row]:
    """Return a row per method, sorted by verdict, and within a verdict by `simplest`.

    Each method has the collective with the best verdict, of these the fastest. `longer`: factor on
    forward and backward.
    """
    best: dict[str, Row] = {}
    for (spec, collective), step in prepared.steps.items():
        row = _judged(settings, prepared, step, known[spec, collective], cluster, longer)
        row["method"] = spec
        if spec not in best or _badness(row) < _badness(best[spec]):
            best[spec] = row
    ranked: list[Row] = []
    for verdict in ORDER:
        left = {spec: row for spec, row in best.items() if row["advice"] == verdict}
        while left:
            gains = {spec: -_badness(row)[1] for spec, row in left.items()}
            ranked.append(left.pop(simplest(gains, settings.margin)))
    return ranked


def _badness(row: Row) -> tuple[int, float]:
    return ORDER.index(str(row["advice"])), -float(row["gain"] or 0)


def _judged(
    settings: Settings,
    prepared: Prepared,
    step: Step,
    losses: Losses,
    cluster: Cluster,
    longer: float,
) -> Row:
    """Return the row of a method by a collective: its gain, its loss of accuracy, the verdict."""
    method, workers, allowed = step.method, settings.workers[0], settings.allowed
    network = prepared.network
    bits = 8 * traffic.gradient_bytes(method, network.shapes) / network.numel
    row: Row = {"method": "", "compressor": registry.call(method), "collective": step.collective}
    gathers = "allgather" in method.legal_collectives() and not settings.sharded
    row |= {"bits": bits, "gather_limit": math.ceil(64 / bits) - 1 if gathers and bits else None}
    row |= {"results": len(losses.counting)}
    row |= dict.fromkeys(("accuracy", "accuracy_brief"), "untested")
    verdict = UNTESTED
    if losses.others:
        shown = worst(evidence.nearest(losses.others, network.inputs).near, allowed)
        row["accuracy"] = f"{shown.row.first.collective} alone: {shown.text(allowed)}"
        row["accuracy_brief"] = f"{shown.text(allowed)} *"
    if losses.counting:
        near, far = evidence.nearest(losses.counting, network.inputs)
        shown = worst(near, allowed)
        if far:
            other = worst(far, allowed)
            row["elsewhere"] = f"{other.row.first.task}: {other.text(allowed)}"
            row["elsewhere_verdict"] = other.judge(allowed)
        verdict = VERDICTS[shown.judge(allowed)]
        text = brief = shown.text(allowed)
        if network.inputs and shown.inputs not in ("", network.inputs):
            text, brief = f"{shown.row.first.task}: {text}", f"{text} *"
        row |= {"accuracy": text, "accuracy_brief": brief, "accuracy_from": shown.setting}
        row["accuracy_task"] = shown.row.first.task
        row["distance"] = shown.distance(network.numel, _examples(settings, prepared))
        if shown.row.metric == "accuracy" and not shown.row.failed and shown.lost:
            middle, low, high = shown.lost
            row |= {"accuracy_difference": -middle, "accuracy_low": -high, "accuracy_high": -low}
    try:
        at = step.at(workers, cluster, measured=prepared.by_measured, longer=longer)
        gains = prepared.gains(step, workers, cluster, longer)
    except UsageError as error:
        return {**row, "advice": REFUSED, "refused": str(error), "speedup": None, "gain": None}
    row |= {key: at[key] for key in ("step_seconds", "wire_bytes", "topology")}
    plain = prepared.plain.seconds(workers, cluster, longer=longer)
    row["speedup"] = plain / float(at["step_seconds"])
    row |= gains.fields()
    row["gain_low"], row["gain_high"] = gains.better
    row["gain"] = gains.sure
    if gains.better[1] < 1 + settings.margin:
        verdict = NO_GAIN
    elif verdict == TRY and (step.measured is None or gains.sure < 1 + settings.margin):
        verdict = UNCLEAR
    row["advice"], row["refused"] = verdict, None
    return row


def _examples(settings: Settings, prepared: Prepared) -> int | None:
    """Return the examples of a step, all workers together; None without a batch."""
    return None if prepared.batch is None else prepared.batch * settings.workers[0]


def _seen(settings: Settings, prepared: Prepared, known: Sequence[Evidence]) -> list[Row]:
    """Return a row per piece of evidence on the methods in question."""
    rows: list[Row] = []
    inputs, numel = prepared.network.inputs, prepared.network.numel
    for spec in dict.fromkeys(spec for spec, _ in prepared.steps):
        counting: dict[int, Evidence] = {}
        for (name, _), step in prepared.steps.items():
            if name == spec:
                losses = losses_of(settings, step, known, inputs)
                counting |= {id(one): one for one in losses.counting}
        near = set(map(id, evidence.nearest([*counting.values()], inputs).near))
        for key, one in counting.items():
            first, config = one.row.first, one.row.runs[0].config
            points = one.row.metric == "accuracy"
            scale = 100.0 if points else 1.0
            lost = {} if one.lost is None else dict(zip(_LOST, one.lost, strict=True))
            rows.append(
                {
                    "method": spec,
                    "collective": first.collective,
                    "task": first.task,
                    "network": (config.get("task_options") or {}).get("network"),
                    "parameters": first.params,
                    "steps": first.steps,
                    "batch": first.batch,
                    "workers": first.workers,
                    "seeds": one.seeds,
                    "failed": len(one.row.failed),
                    # rounding removes what floats leave where two means are equal
                    **{k: round(scale * lost[k], 9) + 0.0 if lost else None for k in _LOST},
                    "lost_unit": "points" if points else "loss",
                    "rate": one.rate,
                    "reads": one.inputs or None,
                    "judged_by": "yes" if key in near else "no",
                    "size": numel / first.params if first.params else None,
                    "suite": one.suite,
                }
            )
    return rows


# ---- the answer ----------------------------------------------------------------------------------


def _answers(
    settings: Settings,
    prepared: Prepared,
    rows: Sequence[Row],
    known: Known,
    gathered: Sequence[Evidence],
) -> list[str]:
    """Return the answer as sentences: what to try, on what basis, what would change it."""
    workers, cluster, margin = settings.workers[0], settings.cluster, settings.margin
    by = {verdict: [row for row in rows if row["advice"] == verdict] for verdict in ORDER}
    free = prepared.free.seconds(workers, cluster)
    fp32, bf16 = (one.seconds(workers, cluster) for one in prepared.baselines)
    bound = f"A free exchange would be {fp32 / free:.3g} times as fast as fp32, "
    bound += f"{bf16 / free:.3g} times as fast as bf16."
    sentences = []
    if by[TRY]:
        best = by[TRY][0]
        sentences += [f"Compression probably pays: try {_speed_text(best)}.", _basis_text(best)]
        if _warns(best):
            sentences[-1] += f" Warning: {best['elsewhere']}."
            if safe := [row for row in by[TRY] if not _warns(row)]:
                gain = f"{safe[0]['over_bf16']} times as fast as bf16"
                sentences[-1] += f" Without a warning: {_by(safe[0])}, {gain}."
    elif min(fp32, bf16) / free < 1 + margin:
        sentences.append(f"Do not compress: the links are not a bottleneck. {bound}")
    elif by[UNCLEAR]:
        best = by[UNCLEAR][0]
        reason = "More seeds could decide."
        if best["gain_low"] is None:
            specs = [str(row["method"]) for row in (*by[UNCLEAR], *by[UNTESTED])]
            reason = f"Its encoding was not measured: {costs.how_to_measure(specs)}."
        elif float(best["gain"] or 0) < 1 + margin:
            reason = f"With measured encoding times it gains less than {100 * margin:g} %."
        sentences.append(f"Unclear: {_speed_text(best)} may pay. {reason}")
        sentences.append(_basis_text(best))
    elif by[UNTESTED]:
        sentences.append(
            "Do not compress yet: no method that gains has accuracy runs with its collective."
        )
    elif by[LOSES]:
        sentences.append(
            f"Do not compress: every method that gains loses more than {_allowed(settings)}."
        )
    else:
        sentences.append(f"Do not compress: no method gains {100 * margin:g} %. {bound}")
    if not by[TRY] and fp32 / bf16 >= 1 + margin:
        sentences.append(_half_text(settings, prepared, fp32 / bf16, gathered))
    if cluster.nodes_of(workers) > 1:

        def answer(there: Cluster, longer: float) -> tuple[str, float]:
            """Return the choice there, and its speedup over reducing in fp32."""
            again = _rows(settings, prepared, known, there, longer)
            plain, cast = (one.seconds(workers, there, longer=longer) for one in prepared.baselines)
            if again[0]["advice"] == TRY:
                low, high = again[0]["over_fp32_low"], again[0]["over_fp32_high"]
                return str(again[0]["method"]), float((high if low is None else low) or 0)
            if plain / cast >= 1 + margin:
                return HALF, plain / cast
            return "none", 1.0

        sentences.append(prediction.sensitivity(prepared, cluster, answer))
    return sentences


def _speed_text(row: Row) -> str:
    """Return a method with its collective and predicted speedup as text."""
    return (
        f"{row['method']} by {row['collective']}, predicted {row['over_bf16']} times as fast as "
        f"reducing in bf16 ({row['over_fp32']} times as fast as in fp32)"
    )


def _basis_text(row: Row) -> str:
    """Return a method's accuracy runs, their distance from the model, and what to do, as text."""
    return (
        f"Accuracy: {row['accuracy']} ({row['accuracy_from']}); {row['distance']}. Verify it on "
        "your model."
    )


def _half_text(
    settings: Settings, prepared: Prepared, gain: float, gathered: Sequence[Evidence]
) -> str:
    """Return the advice to reduce in bf16, with its accuracy runs, as text."""
    accuracy = "untested"
    if rows := of_method(settings, methods.parse("bf16"), gathered):
        shown = worst(evidence.nearest(rows, prepared.network.inputs).near, settings.allowed)
        accuracy = f"{shown.text(settings.allowed)} ({shown.setting})"
    return (
        f"Reduce in bf16 ({BF16[settings.sharded]}): predicted {gain:.3g} times as fast as fp32; "
        f"accuracy of bf16 by gcbench's exchange: {accuracy}."
    )


def _warns(row: Row) -> bool:
    """Return whether results on other inputs leave a loss possible."""
    return row.get("elsewhere_verdict") in (evidence.LOSES, evidence.UNCLEAR)


# ---- the evidence in words -----------------------------------------------------------------------


def _coverage(
    settings: Settings, prepared: Prepared, gathered: evidence.Gathered, seen: Sequence[Row]
) -> list[str]:
    """Return sentences on what was read, and for how many methods it shows the accuracy."""
    if not settings.runs:
        read = f"No results were read: none are packaged, in {ROWS}, or below this folder."
    else:
        read = gathered.summary([bundled.display_name(Path(place)) for place in settings.runs])
    tested = {str(row["method"]) for row in seen}
    if not tested:
        return [
            read,
            "No evidence of accuracy: no run of a suite with a holdout and at least "
            f"{evidence.LEAST_SEEDS} seeds used these methods.",
        ]
    tasks = ", ".join(dict.fromkeys(str(row["task"]) for row in seen))
    total = len({spec for spec, _ in prepared.steps})
    return [read, f"{len(tested)} of {total} methods have accuracy runs, on {tasks}."]


def _basis(prepared: Prepared, seen: Sequence[Row], rows: Sequence[Row]) -> Iterator[str]:
    """Yield sentences on the tasks that decide, and on warnings from others."""
    if not seen:
        return

    def tasks(chosen: Sequence[Row]) -> str:
        reads = {str(row["task"]): str(row["reads"] or "unknown inputs") for row in chosen}
        return ", ".join(f"{task} ({inputs})" for task, inputs in reads.items())

    inputs = prepared.network.inputs
    deciding = [row for row in seen if row["judged_by"] == "yes"]
    alike = [row for row in deciding if not inputs or row["reads"] == inputs]
    others = [row for row in deciding if row not in alike]
    what = f"reads {inputs}" if inputs else "has unknown inputs"
    text = f"{prepared.network.title} {what}: judged by {tasks(alike) or 'no run of such a task'}"
    if others:
        names = ", ".join(dict.fromkeys(str(row["method"]) for row in others))
        text += f"; {names} by {tasks(others)}"
    yield f"{text}. These runs are short: a loss that appears only in long training is not seen."
    warned = [
        f"{row['method']} on {row['elsewhere']}"
        for row in rows
        if row["advice"] in (TRY, UNCLEAR) and _warns(row)
    ]
    if warned:
        yield f"Warnings from other tasks: {'; '.join(warned)}."


def _other_sources(prepared: Prepared, known: Sequence[Evidence]) -> Iterator[str]:
    """Yield a sentence on each method with runs of another version of its source."""
    for method in {step.method.name: step.method for step in prepared.steps.values()}.values():
        origin = registry.origin(registry.compressors()[method.name])
        runs = [run.summary for one in known for run in one.row.runs]
        named = [run for run in runs if run.compressor_name == method.name]
        if others := sum(not same_source(run, origin) for run in named):
            yield f"{others:,} runs of {method.name} used another source and do not count."


def _unknown_rates(seen: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence on rows whose learning rates were chosen by an unknown rule."""
    if names := dict.fromkeys(str(row["suite"]) for row in seen if row["rate"] is None):
        yield (
            f"How the learning rates in {', '.join(names)} were chosen is unknown: if the rate "
            "suits one side better, the difference says little about the method."
        )


def _untested(settings: Settings, rows: Sequence[Row]) -> list[str]:
    """Return sentences on faster methods without accuracy runs, and the commands to run them."""
    tried = [row for row in rows if row["advice"] == TRY]
    least = float(tried[0]["gain"] or 0) if tried else 0.0
    faster = [row for row in rows if row["advice"] == UNTESTED and float(row["gain"] or 0) > least]
    if not faster:
        return []
    names = ", ".join(f"{_by(row)}{' (upper bound)' * (row['gain_low'] is None)}" for row in faster)
    sentences = [f"Predicted faster, but without accuracy runs: {names}."]
    in_suite = [row for row in faster if _in_suite(settings, row)]
    rest = [row for row in faster if row not in in_suite]
    if in_suite:
        specs = dict.fromkeys(methods.parse(str(row["method"])).name for row in in_suite)
        command = shlex.join(
            [*("gcbench", "run", "--suite", SUITE, "--compressor", ",".join(["none", *specs])),
             *("--rows", f"{ROWS}/{SUITE}.parquet")]
        )  # fmt: skip
        sentences.append(
            f"To measure {', '.join(map(_by, in_suite))}: {command}, then repeat this command."
        )
    if rest:
        sentences.append(
            f"To measure {', '.join(map(_by, rest))}: copy the suite {SUITE} (`gcbench list "
            "suites`) to mine.yaml, with none and these methods, collectives and dense tensors as "
            f"entries; run gcbench run --suite mine.yaml --rows {ROWS}/mine.parquet, then repeat "
            "this command."
        )
    return sentences


def _by(row: Row) -> str:
    return f"{row['method']} by {row['collective']}"


@cache
def _entries() -> set[tuple[str, str, str, str]]:
    """Return the methods of the suite: name, expression, memory and collective of each."""
    configs = [point.config for point in suites.load(SUITE).points()]
    return {
        (c.compressor, registry.call(c.make_compressor()), c.memory, c.collective) for c in configs
    }


def _in_suite(settings: Settings, row: Row) -> bool:
    """Return whether the suite contains runs of the method that count for the row's collective."""
    method = methods.parse(str(row["method"]))
    if settings.dense_last or settings.dense_below:
        return False
    return any(
        (call, memory) == (registry.call(method), method.memory)
        and _same_mean(method, collective, str(row["collective"]))
        for name, call, memory, collective in _entries()
        if name == method.name
    )


# ---- the picture ---------------------------------------------------------------------------------

_COLOURS = {TRY: 2, UNCLEAR: 1, UNTESTED: 0, LOSES: 3}
"""Verdict -> index in the colour-blind palette; only methods to try are green."""


def _styles() -> dict[str, dict[str, Any]]:
    """Return colour and marker of each verdict; methods without a gain are grey."""
    import seaborn

    palette = seaborn.color_palette("colorblind")
    styles = figures.styles(ORDER)
    for name, style in styles.items():
        style["color"] = palette[_COLOURS[name]] if name in _COLOURS else "0.6"
    return styles


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the gain of each method, and gain against accuracy where there are runs."""
    rows = [row for row in analysis.table("methods").rows if row["speedup"]]
    settings, styles = analysis.settings, _styles()
    known = [row for row in rows if row.get("accuracy_difference") is not None]
    with figures.canvas(13 if known else 8, max(4.5, 2.2 + 0.32 * len(rows))) as figure:
        widths = (2, 3) if known else (1,)
        axes, *others = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
        for y, row in enumerate(reversed(rows)):
            style, high = styles[str(row["advice"])], float(row["gain_high"] or 0)
            low = high if row["gain_low"] is None else float(row["gain_low"])
            axes.plot([low, high], [y, y], color=style["color"], lw=3, alpha=0.5)
            axes.plot(low, y, style["marker"], color=style["color"], ms=8)
        axes.set_yticks(range(len(rows)), [str(row["method"]) for row in reversed(rows)])
        axes.tick_params(axis="y", labelsize="small")
        axes.axvline(1, color="0.4", lw=1)
        axes.axvline(1 + settings["margin"], color="0.4", ls=(0, (4, 2)), lw=1)
        axes.margins(x=0.1)
        axes.set_xlabel("times as fast as the better of fp32 and bf16,\n"
                        "from measured encoding times to the upper bound")  # fmt: skip
        for name in ORDER:
            if any(row["advice"] == name for row in rows):
                style = styles[name]
                axes.plot([], [], style["marker"], color=style["color"], ms=8, label=name)
        figure.legend(loc="outside lower center", ncols=5, fontsize="small")
        title = analysis.table("methods").title
        figure.suptitle(title if known else title.replace(", batch", ",\nbatch"), fontsize="medium")
        if others:
            marks = _against_accuracy(others[0], known, styles, settings)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            figures.write_labels(others[0], marks)
        figures.save(figure, path)


def _against_accuracy(
    axes: Any,
    known: Sequence[Row],
    styles: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> list[figures.Mark]:
    """Draw gain against accuracy lost, and return the positions for the methods' names."""
    marks = []
    for row in known:
        style, y = styles[str(row["advice"])], float(row["gain"] or 0)
        x, low, high = (
            100 * float(row[f"accuracy_{end}"] or 0) for end in ("difference", "low", "high")
        )
        axes.plot([low, high], [y, y], color=style["color"], lw=1)
        axes.plot(x, y, style["marker"], color=style["color"], ms=9, mec="white", mew=0.7)
        name, half = str(row["method"]), (high - low) / 2
        marks.append(figures.Mark(x, y, 0.0, name, style["color"], across=half))
    axes.axhline(1 + settings["margin"], color="0.4", ls=(0, (4, 2)), lw=1)
    axes.axvline(-100 * settings["tolerance"], color="0.4", ls=(0, (4, 2)), lw=1)
    axes.margins(x=0.15, y=0.12)
    axes.set_xlabel("accuracy against `none`, points,\nwith 95 % interval: the worst result")
    axes.set_ylabel("times as fast, with measured encoding times")
    return marks
