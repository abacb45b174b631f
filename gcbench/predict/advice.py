"""What to do with a training job on a cluster (`gcbench advise`): a plan on one axis.

The axis is examples per hour. The options are one worker alone, an exchange per step in fp32, in
bf16 or by a method, accumulation, local steps, and sharding. Times are predicted (`prediction`);
options whose times differ by less than the error band (`validation`) are not ranked.

A method is judged by the legal collective with the best verdict; among equal ones, by the fastest.
Of methods that are tied the simplest comes first (`steps.SIMPLE`). The loss of accuracy comes from
stored runs (`evidence`) of tasks that read the same inputs as the model, images or text; the worst
of several rows counts. Rows of other tasks only warn; they never decide. The runs trained smaller
models, so the answer is what to try, never a promise. A row by another collective counts if both
compute the same mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from gcbench.core import progress, registry
from gcbench.core.compressor import Compressor, reencodes
from gcbench.core.errors import UsageError
from gcbench.predict import bundled, costs, evidence, prediction, validation
from gcbench.predict.evidence import FITS, LOSES, UNCLEAR, Evidence, Tolerance, count_text
from gcbench.predict.prediction import Prepared
from gcbench.predict.steps import HALF, Plain, Step, simplest
from gcbench.predict.validation import Bands
from gcbench.profile.breakeven import FLOAT
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table
from gcbench.results import reader
from gcbench.results.schema import Summary
from gcbench.results.settings import DEFAULTS, ROLES
from gcbench.training import grid, suites
from gcbench.training.methods import parse

KIND = "advice"
TRY, CANNOT_TELL, UNTESTED = "try", "cannot tell", "untested"
NO_GAIN, REFUSED = "no gain", "refused"
UNKNOWN = (CANNOT_TELL, UNCLEAR, UNTESTED)
"""Verdicts that more measurements could change into `TRY`."""
ORDER = (TRY, CANNOT_TELL, UNCLEAR, UNTESTED, LOSES, NO_GAIN, REFUSED)
SUITE, LANGUAGE = "main", "main-language"
"""The suites that measure the accuracy of methods without evidence, on images and on text."""
ROWS = "results/reference"
"""The folder of reference rows, below the current folder."""
ALONE, FP32, BF16, SHARDED = "one worker", "fp32", "bf16", "sharded, bf16"
"""Options without a method: no exchange, and uncompressed exchanges."""
LOCAL = "local steps"
BASELINE, CHANGES, SLOWER = "baseline", "changes training", "slower than one"
"""Verdicts of options in a plan, in addition to those of methods."""
MOST_ACCUMULATED, MOST_LOCAL = 64, 1024
"""The most batches per exchange that a plan proposes."""
MOST_LAB = 1.0
"""The fastest links, in Gbit/s, that netlab can have between nodes of one machine."""
LEAST_DELAY_US, MOST_LAB_WORKERS = 1000.0, 8
"""The shortest delay, in us, and the most workers of a lab that an answer proposes."""
BRIEF = 2
"""Number of methods in the short plan."""


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

    @property
    def bands(self) -> Bands:
        """The errors of predicted step times."""
        return validation.bands(self.cluster, self.workers[0])


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


def losses_of(settings: Settings, step: Step, rows: Sequence[Evidence], inputs: str) -> Losses:
    """Return the rows of exactly this method, used as in `step`.

    Rows count if their collective computes the same mean (`_same_mean`). A row by all-gather that
    loses too much also counts against a collective that encodes again, because that loses more; one
    that does not lose too much shows nothing about it. With FSDP it is the reverse: a row by
    two-shot, which loses more, counts unless it loses too much. `inputs`: what the model reads; a
    loss on a task with other inputs does not count so.
    """
    matching = of_method(settings, step.method, rows)
    near = set(map(id, evidence.nearest(matching, inputs).near))

    def counts(one: Evidence) -> bool:
        loses = one.judge(settings.allowed) == LOSES
        if _same_mean(step, one.row.first.collective):
            return True
        if step.sharded:
            return not loses
        return loses and id(one) in near and reencodes(step.method, step.collective)

    return Losses(
        [one for one in matching if counts(one)], [one for one in matching if not counts(one)]
    )


def _same_mean(step: Step, collective: str) -> bool:
    """Return whether a run by this collective computes the mean that `step` computes.

    With FSDP each owner keeps the mean of its shard, which is not encoded again.
    """
    if reencodes(step.method, step.collective) and not step.sharded:
        return collective == step.collective
    return not reencodes(step.method, collective)


PLAIN_SETTINGS = {
    *(key for key, role in ROLES.items() if role == "method"),
    "adversaries",
} - {"compressor", "options", "collective", "seed"}
"""Settings with which a run says something about a method only if they have their defaults."""


def of_method(settings: Settings, method: Compressor, rows: Sequence[Evidence]) -> list[Evidence]:
    """Return the rows of exactly this method, by any collective.

    Name, fields, the method's other settings, and the source of a method that is not built in are
    equal, and no worker is an adversary.
    """
    origin = registry.origin(registry.compressors()[method.name])
    expected = {key: value for key, value in DEFAULTS.items() if key in PLAIN_SETTINGS} | {
        "memory": method.memory,
        "memory_options": dict(method.memory_options),
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

    return [one for one in rows if fits(one)]


def same_source(run: Summary, origin: Mapping[str, str] | None) -> bool:
    """Return whether a run used the code that a method has now.

    `origin` is by `registry.origin`. Built-in methods count as unchanged.
    """
    then = (run.provenance.get("plugins") or {}).get("compressor")
    if not isinstance(then, Mapping) or origin is None:
        return then is origin
    digest = origin["sha256"]  # empty without a source file
    return bool(digest and then.get("sha256") == digest) or then == origin


def worst(rows: Sequence[Evidence], tolerance: Tolerance) -> Evidence:
    """Return the row with the worst verdict; of equal ones, that with the largest upper limit."""

    def badness(one: Evidence) -> tuple[int, bool, float]:
        lost = one.lost
        verdict = evidence.VERDICTS.index(one.judge(tolerance))
        allowed = tolerance.accuracy if one.row.metric == "accuracy" else tolerance.loss
        most = math.inf if lost is None else lost[2] / allowed if allowed else lost[2]
        return verdict, bool(one.row.failed), most

    return max(rows, key=badness)


LossesBySteps = Mapping[tuple[str, str], Losses]
"""(method, collective) -> what runs show about its accuracy."""


# ---- the analysis --------------------------------------------------------------------------------


def run(settings: Settings, command: str, observer: progress.Observer, ledger: Ledger) -> Analysis:
    """Return the plan for a model on a cluster, and the methods ranked.

    Raises:
        UsageError: see `prediction.prepare`; or a place of results does not exist, or the cluster's
            topology is one that no hook has.
    """
    prepared = prediction.prepare(settings, every=True)
    workers, cluster = settings.workers[0], settings.cluster
    if cluster.way(workers) == "nodes":
        raise UsageError(
            "topology=nodes: the hooks that advise recommends exchange payloads among all ranks, "
            "not one per node; use topology=best. To predict such an exchange: `gcbench predict "
            "--cluster-set topology=nodes`"
        )
    gathered = evidence.gather([Path(place) for place in settings.runs])
    losses = {
        key: losses_of(settings, step, gathered.rows, prepared.network.inputs)
        for key, step in prepared.steps.items()
    }
    rows = _rows(settings, prepared, losses)
    for row in rows:
        if row["speedup"] is not None:
            step = prepared.steps[str(row["method"]), str(row["collective"])]
            row |= prepared.pays_fields(step, workers, cluster, settings.margin)
    plan = _plan(settings, prepared, rows)
    observer.step(len(settings.compressors))
    title = prediction.title(settings, prepared, f"{workers} workers")
    gaining = [row for row in plan if row["method"] and row["advice"] != NO_GAIN]
    # the most important first: a long answer leaves room for two rows
    brief = [*gaining[:1], *(row for row in plan if row["option"] in (BF16, ALONE))]
    brief += [*gaining[1:BRIEF], *(row for row in plan if row["advice"] == CHANGES)]
    what = unit(prepared).capitalize()
    seen = _evidence_rows(prepared, losses)
    return Analysis.of(
        KIND,
        settings,
        command,
        answer=_answer(settings, prepared, plan, rows, gathered.rows),
        conclusions=[
            *_coverage(settings, prepared, gathered, seen),
            *_other_sources(prepared, gathered.rows),
            *_untested(settings, rows),
        ],
        tables=[
            Table(
                name="methods",
                title=title,
                shown=_METHODS,
                notes=list(_notes(settings, prepared)),
                rows=rows,
            ),
            Table(
                name="evidence",
                title=f"Accuracy runs ({prepared.network.title} has "
                f"{count_text(prepared.network.numel)} parameters)",
                shown=_EVIDENCE,
                notes=[
                    "lost: difference from `none`, paired by seed, with the 95 % interval of "
                    "Student's t. rate: tuned by the suite's rule, at the edge of the rates tried, "
                    "or untuned. size: parameters of your model divided by those of this one.",
                ],
                rows=seen,
            ),
            Table(name="plan", title=f"Plan: {title}", shown=_PLAN, rows=plan),
            Table(
                name="brief",
                brief=True,
                title=f"{what} per hour, {prepared.network.title}, {workers} x {cluster.name}",
                shown=[one for one in _PLAN if one.field not in ("changes", "accuracy")],
                rows=brief,
            ),
        ],
    )


def _notes(settings: Settings, prepared: Prepared) -> Iterator[str]:
    """Yield the assumptions and the footnotes of the table of methods."""
    yield from prepared.notes
    kernels = "measured, where available" if prepared.by_measured else "the lower bound"
    gain = f"{100 * settings.margin:g} %"
    yield (
        f"try: predicted to gain at least {gain} and more than the error band over both fp32 and "
        "bf16 with measured encoding times, and every 95 % interval that counts excludes a loss "
        f"above {_allowed(settings)}. cannot tell: the predicted gain is within the error band. "
        "unclear: encoding not measured, or such a loss lies within an interval, or beyond it "
        "while settings are open. untested: gains, but no run by this collective. loses too much: "
        "a whole interval lies beyond that loss, or a seed diverged. no gain: gains less."
    )
    yield (
        "over fp32, over bf16: time of the uncompressed step divided by the time of this step, "
        f"from measured encoding times to the upper bound; step ms uses {kernels}. pays on links: "
        f"links between nodes on which it gains {gain}."
    )
    yield (
        "accuracy: difference from `none`, paired by seed, with its 95 % interval; the worst row "
        "of a task that reads what the model reads. other inputs: the worst row of other tasks, "
        "which only warns. allgather alone, twoshot alone: measured by that collective only; the "
        "recommended one computes a different mean (two-shot re-encodes it)."
    )
    yield from (f"Refused: {reason}." for reason in prepared.refused.values())


_METHODS = [
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
]
_EVIDENCE = [
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
_PLAN = [
    Shown(field="option", heading="option"),
    Shown(field="rate", heading="per hour"),
    Shown(field="over_alone", heading="times one"),
    Shown(field="advice", heading="verdict"),
    Shown(field="evidence", heading="accuracy\nfrom"),
    Shown(field="accuracy", heading="accuracy"),
    Shown(field="changes", heading="what changes"),
]
_LOST = ("lost", "lost_low", "lost_high")


def _allowed(settings: Settings) -> str:
    loss = f"{settings.tolerance_loss:g} of test loss"
    points = 100 * settings.tolerance
    return f"{points:g} point{'s' * (points != 1)} of accuracy or {loss}"


def _rows(settings: Settings, prepared: Prepared, losses: LossesBySteps) -> list[Row]:
    """Return a row per method, sorted by verdict, and within a verdict by `simplest`.

    Each method has the collective with the best verdict, of these the fastest.
    """
    best: dict[str, Row] = {}
    for (spec, collective), step in prepared.steps.items():
        row = _judge(settings, prepared, step, losses[spec, collective])
        row["method"] = spec
        if spec not in best or _badness(row) < _badness(best[spec]):
            best[spec] = row
    ranked: list[Row] = []
    band = settings.bands.plain
    for verdict in ORDER:
        left = {spec: row for spec, row in best.items() if row["advice"] == verdict}
        while left:
            gains = {spec: -_badness(row)[1] for spec, row in left.items()}
            ranked.append(left.pop(simplest(gains, max(settings.margin, band))))
    return ranked


def _badness(row: Row) -> tuple[int, float]:
    return ORDER.index(str(row["advice"])), -float(row["gain"] or 0)


def _judge(settings: Settings, prepared: Prepared, step: Step, losses: Losses) -> Row:
    """Return the row of a method by a collective: its gain, its loss of accuracy, the verdict."""
    method, workers, allowed = step.method, settings.workers[0], settings.allowed
    network, cluster = prepared.network, settings.cluster
    row: Row = {"method": "", "compressor": registry.call(method), "collective": step.collective}
    row |= {"results": len(losses.counting), "evidence": None}
    row |= dict.fromkeys(("accuracy", "accuracy_brief"), "untested")
    verdict = UNTESTED
    near, far = evidence.nearest(losses.counting, network.inputs)
    others = evidence.nearest(losses.others, network.inputs)
    if others.near:
        shown = worst(others.near, allowed)
        row["accuracy"] = f"{shown.row.first.collective} alone: {shown.text(allowed)}"
        row["accuracy_brief"] = f"{shown.text(allowed)} *"
        row["evidence"] = f"{shown.row.first.task}, {shown.row.first.collective}"
    elif distant := [*far, *others.far]:
        shown = worst(distant, allowed)
        row["accuracy"] = row["accuracy_brief"] = shown.elsewhere(allowed)
        row["evidence"] = f"only {shown.row.first.task}"
    if near:
        shown = worst(near, allowed)
        if far:
            other = worst(far, allowed)
            row["elsewhere"] = f"{other.row.first.task}: {other.text(allowed)}"
            row["elsewhere_verdict"] = other.judge(allowed)
        judged = shown.judge(allowed)
        verdict = TRY if judged == FITS else judged
        row |= {"accuracy": shown.text(allowed), "accuracy_brief": shown.text(allowed)}
        row |= {"accuracy_from": shown.setting, "accuracy_task": shown.row.first.task}
        row["without_momentum"] = shown.without_momentum and step.method.memory != "none"
        row["evidence"] = shown.row.first.task
        examples = None if prepared.batch is None else prepared.batch * workers
        row["distance"] = shown.distance(network.numel, examples, workers)
        if shown.row.metric == "accuracy" and not shown.row.failed and shown.lost:
            middle, low, high = shown.lost
            row |= {"accuracy_difference": -middle, "accuracy_low": -high, "accuracy_high": -low}
    try:
        at = step.at(workers, cluster, measured=prepared.by_measured)
        gains = prepared.gains(step, workers, cluster)
    except UsageError as error:
        return {**row, "advice": REFUSED, "refused": str(error), "speedup": None, "gain": None}
    row |= {key: at[key] for key in ("step_seconds", "wire_bytes", "topology")}
    plain = prepared.plain.seconds(workers, cluster)
    row["speedup"] = plain / float(at["step_seconds"])
    row |= gains.fields()
    row["gain_low"], row["gain_high"] = gains.better
    row["gain"] = gains.sure
    least = max(settings.margin, settings.bands.of(method.name))
    if gains.better[1] < 1 + settings.margin:
        verdict = NO_GAIN
    elif verdict not in (LOSES, UNTESTED) and gains.sure < 1 + least:
        verdict = CANNOT_TELL
    elif verdict == TRY and step.measured is None:
        verdict = UNCLEAR
    row["advice"], row["refused"] = verdict, None
    return row


def _evidence_rows(prepared: Prepared, losses: LossesBySteps) -> list[Row]:
    """Return a row per piece of evidence on the methods in question."""
    rows: list[Row] = []
    counting: dict[str, dict[int, Evidence]] = {}
    for (spec, _), each in losses.items():
        counting.setdefault(spec, {}).update((id(one), one) for one in each.counting)
    inputs, numel = prepared.network.inputs, prepared.network.numel
    for spec, pieces in counting.items():
        near = set(map(id, evidence.nearest([*pieces.values()], inputs).near))
        for key, one in pieces.items():
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


# ---- the plan ------------------------------------------------------------------------------------


def _plan(settings: Settings, prepared: Prepared, methods: Sequence[Row]) -> list[Row]:
    """Return a row per option: its examples per hour, its verdict, and what it changes.

    `over_alone` compares with one worker. A method has the time of measured encoding where that is
    available. Accumulation and local steps use the fewest batches per exchange with which the
    exchange takes at most the share `margin` of the time.
    """
    workers, cluster, compute = settings.workers[0], settings.cluster, prepared.compute
    batch = prepared.batch or 1
    alone = 3600 * batch / compute

    def row(option: str, seconds: float, batches: int = 1, advice: str = BASELINE) -> Row:
        per_hour = 3600 * workers * batch * batches / seconds
        return {
            "option": option,
            "method": None,
            "per_hour": per_hour,
            "rate": count_text(per_hour),
            "over_alone": per_hour / alone,
            "seconds": seconds,
            "advice": SLOWER if per_hour < (1 - 1e-9) * alone else advice,
        }

    plain, half = (one.seconds(workers, cluster) for one in prepared.baselines)
    plan = [{**row(ALONE, workers * compute), "changes": "fewer examples per step"}]
    plan += [row(FP32, plain), row(BF16, half)]
    if not settings.sharded:
        shard = Plain(prepared.network, compute, FLOAT // 2, 0.0, sharded=True)
        sharded = row(SHARDED, shard.seconds(workers, cluster))
        plan.append({**sharded, "changes": "memory per worker"})
        wait = half - compute
        count = _batches(wait, compute, settings.margin, MOST_ACCUMULATED)
        many = row(f"accumulate {count}", count * compute + wait, count, CHANGES)
        examples = f"{workers * batch * count:,} {unit(prepared)} per step"
        blocking = cluster.model_copy(update={"overlap": 0.0, "buckets": None})
        rounds = Plain(prepared.network, compute, FLOAT, 0.0)
        rounds.buffers = 0  # local steps exchange parameters alone
        wait = rounds.seconds(workers, blocking) - compute
        local = _batches(wait, compute, settings.margin, MOST_LOCAL)
        steps = row(f"{LOCAL} {local}", local * compute + wait, local, CHANGES)
        plan += [{**many, "changes": examples}] * (count > 1)
        plan += [{**steps, "changes": "replicas differ between exchanges"}] * (local > 1)
    for method in methods:
        if method["gain"] is None:
            continue
        seconds = min(plain, half) / float(method["gain"])
        option = row(_by(method), seconds, advice=str(method["advice"]))
        option |= {"method": method["method"], "accuracy": method["accuracy_brief"]}
        plan.append(option | {"evidence": method["evidence"]})
    return plan


def _batches(wait: float, compute: float, margin: float, most: int) -> int:
    """Return the least power of 2, up to `most`, that keeps the share of waiting within margin."""
    count = 1
    while count < most and wait > margin * count * compute:
        count *= 2
    return count


def unit(prepared: Prepared) -> str:
    """Return what an hour's work is counted in."""
    return "batches" if prepared.batch is None else prepared.network.examples


# ---- the answer ----------------------------------------------------------------------------------


def _answer(
    settings: Settings,
    prepared: Prepared,
    plan: Sequence[Row],
    methods: Sequence[Row],
    gathered: Sequence[Evidence],
) -> list[str]:
    """Return the answer as sentences: what to try, why, what to run to know, lines to paste."""
    workers, bands = settings.workers[0], settings.bands
    band = bands.plain
    over = {str(row["option"]): float(row["over_alone"] or 0) for row in plan}
    rows = {_by(row): row for row in methods}
    tried = [_by(row) for row in methods if row["advice"] == TRY]
    exact = simplest({"none": over[FP32], HALF: over[BF16]}, max(settings.margin, band))
    baseline = FP32 if exact == "none" else BF16
    errors = {by: bands.of(str(rows[by]["method"]).partition(":")[0]) for by in tried}
    faster = [by for by in tried if over[by] >= 1 + errors[by]]
    choice = faster[0] if faster else max(tried, default=baseline, key=over.__getitem__)
    fastest = max((choice, FP32, BF16), key=over.__getitem__)
    rate = f"{over[fastest]:.2g} times as many {unit(prepared)} per hour as one ({fastest})"
    if over[fastest] < 1 + errors.get(fastest, band):
        unknown = {name: over[name] for name, row in rows.items() if row["advice"] in UNKNOWN}
        maybe = max(unknown, key=unknown.__getitem__, default="")
        how, hint = "an exchange per step", ""
        if unknown.get(maybe, 0.0) > 1 + band:
            choice, row = maybe, rows[maybe]
            bound = "up to " * (row["gain_low"] is None)
            how = "fp32, bf16, or a method known to fit"
            accuracy = f"; accuracy: {row['accuracy']}" * (row["accuracy"] != row["advice"])
            hint = (
                f" {maybe} ({row['advice']}) is predicted at {bound}{over[maybe]:.2g} times one "
                f"worker{accuracy}."
            )
        text = [
            f"Cannot tell whether {workers} workers are faster than one: predicted {rate}.{hint}",
            _how_to_know(settings, choice),
        ]
        # no measured step of a method was faster than predicted by more than the band of fp32
        if over[fastest] < 1 / (1 + band):
            text[0] = (
                f"Do not distribute this job over such links with {how}: {workers} workers "
                f"process {rate}, {over[BF16]:.2g} times with bf16.{hint}"
            )
            text[1] = f"{text[1]} " * bool(hint) + _fewer_exchanges(plan, band)
    elif tried:
        row = rows[choice]
        safe = [name for name in tried if not _warns(rows[name])]
        more = f" The best method without a warning: {safe[0]}." if _warns(row) and safe else ""
        text = [
            f"Try {choice}: predicted {row['over_bf16']} times as fast as bf16, "
            f"{row['over_fp32']} as fp32, {over[choice]:.2g} times one worker.",
            f"{_basis_text(row)}{more} {_how_to_know(settings, choice)} "
            f"{_paste(settings, row, choice)}",
        ]
    else:
        advice = (
            "Do not compress" if baseline == FP32 else "Reduce in bf16, do not compress further"
        )
        text = [
            f"{advice}: {_why_text(settings, prepared, methods)}",
            f"{workers} workers process {rate}. {_paste(settings, None, baseline)}",
        ]
        if baseline == BF16:
            text[1] += f" Accuracy of bf16: {_half_accuracy(settings, prepared, gathered)}."
    text[0] += f" {bands.text}" * bool(bands.text)
    return text


def _fewer_exchanges(plan: Sequence[Row], error: float) -> str:
    """Return what options that change training are predicted to gain, and how to test them."""
    options = {
        str(row["option"]): float(row["over_alone"] or 0)
        for row in plan
        if row["advice"] == CHANGES and float(row["over_alone"] or 0) > 1 + error
    }
    if not options:
        return "Train on one worker: fewer exchanges would not be faster either."
    gains = ", ".join(f"{name} ({gain:.2g} times one worker)" for name, gain in options.items())
    text = (
        f"Fewer exchanges may pay, but change training: {gains}. No stored run measured their "
        "accuracy: train to the same loss with them and with one worker."
    )
    if steps := next((name.split()[-1] for name in options if name.startswith(LOCAL)), None):
        text += (
            f" Try: `rounds = gcbench.local_steps(model, optimizer, 'none', every={steps}, "
            "outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True)`."
        )
    return text


def _how_to_know(settings: Settings, choice: str) -> str:
    """Return how to measure the speed and the accuracy of an option, as text.

    `choice`: an uncompressed option, or "METHOD by COLLECTIVE".
    """
    spec, _, collective = choice.partition(" by ")
    specs = [one for one in dict.fromkeys(("none", BF16, spec)) if one != FP32]
    legal = {one: parse(one).legal_collectives() for one in specs}
    usual = not collective or settings.sharded or collective == legal[spec][0]
    others = [one for one in specs if not usual and collective not in legal[one]]
    cluster, workers = settings.cluster, settings.workers[0]
    link = cluster.inter if cluster.nodes_of(workers) > 1 else cluster.intra
    if link.gbit > MOST_LAB:
        names = dict.fromkeys((collective, *(legal[one][0] for one in others)))
        by = "" if usual else f" --collective {','.join(names)}"
        speed = f"`torchrun ... -m gcbench bandwidth --compressor {','.join(specs)}{by}`"
    else:
        lab = f"gcbench netlab --bandwidth {1e3 * link.gbit:g}mbit"
        if link.latency_us >= LEAST_DELAY_US:
            lab += f" --delay {link.latency_us / 1e3:g}ms"
        if workers <= MOST_LAB_WORKERS:
            lab += f" --workers {workers}"
        same = ",".join(one for one in specs if one not in others)
        runs = [same if usual else f"{same} --collective {collective}"]
        runs += [",".join(others)] if others else []
        speed = " and ".join(f"`{lab} -- run --compressor {words}`" for words in runs)
    train = "train your model with each, over several seeds"
    return f"To measure the speed: {speed}. To measure the accuracy: {train}."


def _why_text(settings: Settings, prepared: Prepared, methods: Sequence[Row]) -> str:
    """Return why no method is recommended."""
    workers, cluster = settings.workers[0], settings.cluster
    free = prepared.free.seconds(workers, cluster)
    base = min(one.seconds(workers, cluster) for one in prepared.baselines)
    if base / free < 1 + settings.margin:
        return (
            "the links are not a bottleneck. An exchange that takes no time would be "
            f"{base / free:.3g} times as fast."
        )
    first = {str(row["advice"]): row for row in reversed(methods)}
    if row := first.get(CANNOT_TELL):
        return (
            f"cannot tell whether {_by(row)} is faster, predicted {row['over_bf16']} times as fast "
            f"as bf16. {_how_to_know(settings, _by(row))}"
        )
    if row := first.get(UNCLEAR):
        reason = "More seeds could decide."
        if row["gain_low"] is None:
            specs = [str(row["method"])]
            reason = f"Its encoding was not measured: {costs.how_to_measure(specs)}."
        return f"unclear whether {_by(row)} pays. {_basis_text(row)} {reason}"
    if row := first.get(UNTESTED):
        inputs = f" on {prepared.network.inputs}" * bool(prepared.network.inputs)
        text = f"no method that gains has accuracy runs{inputs} with its collective"
        if LOSES in first:
            text = (
                f"the methods that gain lose more than {_allowed(settings)}, or have no accuracy "
                f"runs{inputs} with their collective"
            )
        return f"{text}. {_by(row)}, accuracy {row['accuracy']}. {_how_to_train(prepared, row)}"
    if row := first.get(LOSES):
        text = f"every method that gains loses more than {_allowed(settings)}"
        return f"{text} ({_by(row)}, {row['evidence']}: {row['accuracy']})."
    return f"no method gains {100 * settings.margin:g} %."


def _how_to_train(prepared: Prepared, row: Row) -> str:
    """Return how to make the accuracy runs of a method, as text."""
    suite = LANGUAGE if prepared.network.inputs == "text" else SUITE
    step = prepared.steps[str(row["method"]), str(row["collective"])]
    for config in (point.config for point in suites.load(suite).points()):
        counts = step.sharded or _same_mean(step, config.collective)
        if counts and registry.call(config.make_compressor()) == row["compressor"]:
            name = str(row["method"])
            return f"To measure it: `gcbench run --suite {suite} --compressor {name}`."
    return (
        f"To measure it, add it with collective {row['collective']} to a copy of the suite {suite} "
        "(`gcbench help protocol`)."
    )


def _half_accuracy(settings: Settings, prepared: Prepared, gathered: Sequence[Evidence]) -> str:
    """Return what runs show about reducing in bf16."""
    rows = of_method(settings, registry.compressor("bf16"), gathered)
    if not rows:
        return "untested"
    near, far = evidence.nearest(rows, prepared.network.inputs)
    if not near:
        return worst(far, settings.allowed).elsewhere(settings.allowed)
    shown = worst(near, settings.allowed)
    return f"{shown.text(settings.allowed)} ({shown.row.first.task})"


def _basis_text(row: Row) -> str:
    """Return a method's accuracy runs, and their distance from the model, as text."""
    text = f"Accuracy: {row['accuracy']} ({row['accuracy_from']}); {row['distance']}."
    if row.get("without_momentum"):
        text += " Train without momentum, as these runs did: with it error feedback may lose more."
    return f"{text} Warning: {row['elsewhere']}." if _warns(row) else text


def _warns(row: Row) -> bool:
    """Return whether results on other inputs leave a loss possible."""
    return row.get("elsewhere_verdict") in (LOSES, UNCLEAR)


def _paste(settings: Settings, row: Row | None, choice: str) -> str:
    """Return the line for the job, after DDP or FSDP has wrapped the model."""
    if row is None and not settings.sharded:
        if choice == FP32:
            return "No change is needed: DDP reduces in the parameters' dtype, fp32."
        return "Paste: `model.register_comm_hook(None, default_hooks.bf16_compress_hook)`."
    # FSDP reduces in param_dtype without reduce_dtype; the prediction gathers bf16 parameters
    reduced = "bfloat16" if row is None and choice == BF16 else "float32"
    policy = f"MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.{reduced})"
    shard = f"`fully_shard(part, mp_policy={policy})`"
    if row is None:
        return f"Paste: {shard}."
    spec = str(row["method"])
    method, fields = parse(spec), grid.method(spec)[1]
    words = [repr(spec.partition(":")[0])]
    words += [f"{field}={getattr(method, field)!r}" for field in fields]
    hook = "shard_hook" if settings.sharded else "comm_hook"
    words += [f"collective={row['collective']!r}"] * (not settings.sharded)
    words += ["optimizer=optimizer"]
    words += ["dense_last=True"] * settings.dense_last
    words += [f"dense_below={settings.dense_below}"] * bool(settings.dense_below)
    line = f"`hook = gcbench.{hook}({', '.join(words)}).register(model)`"
    return f"Paste: {shard} for each part, then {line}." if settings.sharded else f"Paste: {line}."


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
    return [
        read,
        f"{len(tested)} of {total} methods have accuracy runs, on {tasks}. These runs are short: a "
        "loss that appears only in long training is not seen.",
    ]


def _other_sources(prepared: Prepared, gathered: Sequence[Evidence]) -> Iterator[str]:
    """Yield a sentence on each method with runs of another version of its source."""
    for method in {step.method.name: step.method for step in prepared.steps.values()}.values():
        origin = registry.origin(registry.compressors()[method.name])
        runs = [run.summary for one in gathered for run in one.row.runs]
        named = [run for run in runs if run.compressor_name == method.name]
        if others := sum(not same_source(run, origin) for run in named):
            yield f"{others:,} runs of {method.name} used another source and do not count."


def _untested(settings: Settings, rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence on faster methods without accuracy runs, and how to make these."""
    tried = [float(row["gain"] or 0) for row in rows if row["advice"] == TRY]
    least = max(tried, default=1 + settings.margin)
    faster = [
        f"{_by(row)}{' (upper bound)' * (row['gain_low'] is None)}"
        for row in rows
        if row["advice"] == UNTESTED and float(row["gain"] or 0) > least
    ]
    if faster:
        yield (
            f"Predicted faster, but without accuracy runs: {', '.join(faster)}. To make them, add "
            f"the methods with these collectives to a copy of the suite {SUITE} (`gcbench help "
            "protocol`), then repeat this command."
        )


def _by(row: Row) -> str:
    return f"{row['method']} by {row['collective']}"


# ---- the picture ---------------------------------------------------------------------------------


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the examples per hour of each option of the plan; green bars are methods to try."""
    rows = sorted(analysis.table("plan").rows, key=lambda row: float(row["per_hour"] or 0))
    colours = {TRY: "#2E8B57", BASELINE: "0.4", CHANGES: "#33658F"}
    with figures.canvas(9, max(4.5, 2.2 + 0.32 * len(rows))) as figure:
        axes = figure.subplots()
        rates = [float(row["over_alone"] or 0) for row in rows]
        shades = [colours.get(str(row["advice"]), "0.8") for row in rows]
        axes.barh([str(row["option"]) for row in rows], rates, color=shades)
        axes.axvline(1, color="0.2", lw=1)
        axes.tick_params(axis="y", labelsize="small")
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("predicted work per hour, times that of one worker")
        title = analysis.table("methods").title
        figure.suptitle(title.replace(", batch", ",\nbatch"), fontsize="medium")
        figures.save(figure, path)
