"""The command line: parses, calls, prints. Heavy imports wait until a command needs them."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gcbench import studies
from gcbench.commands import (
    RUNS,
    DataDir,
    Format,
    Formatted,
    Json,
    Progress,
    Shown,
    print_json,
    say,
    watched,
)
from gcbench.commands.advise import advise
from gcbench.commands.bandwidth import bandwidth
from gcbench.commands.bounds import bounds
from gcbench.commands.helptext import make_plain
from gcbench.commands.histogram import histogram
from gcbench.commands.report import report
from gcbench.commands.scale import app as scale_app
from gcbench.core import output
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.reporting import foreign

if TYPE_CHECKING:
    from gcbench.reporting.compare import Row
    from gcbench.training.runner import Runner
    from gcbench.training.suites import Suite

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
    help="Compare gradient compressors: bytes counted as they are sent, accuracy from training.",
)
data_app = typer.Typer(no_args_is_help=True, help="Fetch data sets, or say where they are.")
app.add_typer(data_app, name="data")

TIMINGS = Path("results/kernels.json")
INTERRUPTED = 130
"""The exit code after Ctrl-C."""


class Kind(StrEnum):
    """What to list."""

    compressors = "compressors"
    tasks = "tasks"
    suites = "suites"
    words = "words"
    backends = "backends"
    analyses = "analyses"


class KernelFormat(StrEnum):
    """The formats in which timings are printed."""

    table = "table"
    markdown = "markdown"
    json = "json"


class Width(StrEnum):
    """Columns of a paper that a picture may span."""

    single = "single"
    double = "double"


S = str | None
DataName = Annotated[str, typer.Argument(help="A data set: the name of a task that needs one.")]
SUITE = "A paper's table or figure, see `gcbench list suites`, or a YAML file."
RUN = "What is compared"
TRAIN = "Training (the task's defaults unless given)"
WHERE = "Where it runs"
KEEP = "Gradients for `gcbench histogram`, before memory and compression; results stay the same"


def _names(kind: str) -> list[str]:
    """Return the names of compressors, tasks or suites, for completion in a shell."""
    from gcbench.core import registry

    if kind == "suites":
        from gcbench.training import suites

        return suites.names()
    return list(registry.tasks() if kind == "tasks" else registry.compressors())


def _completed(kind: str) -> Callable[[str], list[str]]:
    """Return a function that completes the last name of a comma-separated list."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in _names(kind) if name.startswith(last)]

    return complete


def _opt(text: str, panel: str, complete: str = "") -> Any:
    return typer.Option(
        help=text,
        rich_help_panel=panel,
        show_default=False,
        autocompletion=_completed(complete) if complete else None,
    )


@app.command()
def run(
    suite: Annotated[
        S, _opt(SUITE + " Other flags select some of its runs.", RUN, complete="suites")
    ] = None,
    task: Annotated[
        S, _opt("Task; default digits. See `gcbench list tasks`.", RUN, complete="tasks")
    ] = None,
    compressor: Annotated[
        S,
        _opt(
            "Compressor(s), with fields after colons, or files: topk:ratio=0.05,./mine.py; "
            "default terngrad.",
            RUN,
            complete="compressors",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A compressor's field, e.g. clip=2.0; by step: ratio=0:0.25/100:0.01.",
            rich_help_panel=RUN,
        ),
    ] = None,
    task_set: Annotated[
        list[str] | None,
        typer.Option(help="A task's field, e.g. network=resnet20.", rich_help_panel=RUN),
    ] = None,
    network: Annotated[S, _opt("Short for --task-set network=...", RUN)] = None,
    workers: Annotated[S, _opt("Number of workers; default 4.", RUN)] = None,
    engine: Annotated[
        S, _opt("simulate, spawn or ddp; torchrun is detected; default simulate.", RUN)
    ] = None,
    collective: Annotated[
        S, _opt("allreduce, allgather or twoshot; default the method's.", RUN)
    ] = None,
    memory: Annotated[
        S, _opt("none, residual, momentum, dgc, ef21, loco; default the method's own.", RUN)
    ] = None,
    memory_set: Annotated[
        list[str] | None,
        typer.Option(help="A memory's field, e.g. decay=0.9.", rich_help_panel=RUN),
    ] = None,
    start_step: Annotated[
        S, _opt("First step that is compressed; those before are in fp32; default 0.", RUN)
    ] = None,
    delay: Annotated[
        S, _opt("1: apply each mean one step late (double buffering); default 0.", RUN)
    ] = None,
    rebroadcast_every: Annotated[
        S, _opt("Steps between broadcasts of worker 0's parameters; default 0: none.", RUN)
    ] = None,
    local_steps: Annotated[
        S,
        _opt(
            "Optimizer steps of each worker before the difference of parameters is exchanged; "
            "default 0: gradients at every step.",
            RUN,
        ),
    ] = None,
    outer_lr: Annotated[
        S,
        _opt("Learning rate of the outer step; default 1: plain averaging. DiLoCo: 0.7.", RUN),
    ] = None,
    outer_momentum: Annotated[
        S, _opt("Momentum of the outer step; default 0. DiLoCo: 0.9.", RUN)
    ] = None,
    outer_nesterov: Annotated[
        bool | None, _opt("Nesterov momentum in the outer step, as in DiLoCo.", RUN)
    ] = None,
    hook: Annotated[
        S,
        _opt(
            "With --engine ddp: gcbench, or torch for torch's own hook of this method; default "
            "gcbench.",
            RUN,
        ),
    ] = None,
    bucket_mb: Annotated[
        S, _opt("With --engine ddp: MiB of fp32 gradients in a bucket; default 25.", RUN)
    ] = None,
    dense_last: Annotated[
        bool | None,
        _opt("Exchange the last (classifier) layer in fp32; default the task's.", RUN),
    ] = None,
    dense_below: Annotated[
        S, _opt("Exchange tensors below this many elements in fp32; default 0.", RUN)
    ] = None,
    seed: Annotated[S, _opt("Seed(s); default 0.", RUN)] = None,
    holdout: Annotated[
        S, _opt("Training examples kept for validation; default 0: none.", TRAIN)
    ] = None,
    test: Annotated[
        bool | None,
        typer.Option(
            "--test/--no-test",
            help="Evaluate the test split, too; with --holdout after the last step only.",
            rich_help_panel=TRAIN,
            show_default=False,
        ),
    ] = None,
    steps: Annotated[S, _opt("Training steps.", TRAIN)] = None,
    batch: Annotated[S, _opt("Examples a step, over all workers.", TRAIN)] = None,
    optimizer: Annotated[S, _opt("sgd, adam or adamw, applied to the decoded mean.", TRAIN)] = None,
    lr: Annotated[S, _opt("Learning rate.", TRAIN)] = None,
    momentum: Annotated[S, _opt("Momentum of sgd.", TRAIN)] = None,
    nesterov: Annotated[bool | None, _opt("Nesterov momentum.", TRAIN)] = None,
    betas: Annotated[S, _opt("Adam's betas, e.g. 0.9/0.999.", TRAIN)] = None,
    eps: Annotated[S, _opt("Adam's epsilon.", TRAIN)] = None,
    schedule: Annotated[S, _opt("constant, poly, step or cosine.", TRAIN)] = None,
    schedule_power: Annotated[S, _opt("Power of poly.", TRAIN)] = None,
    schedule_steps: Annotated[
        S, _opt("Milestones of step: 500/750, or 0.5/0.75 of all.", TRAIN)
    ] = None,
    schedule_gamma: Annotated[S, _opt("Factor at each milestone.", TRAIN)] = None,
    schedule_floor: Annotated[
        S, _opt("Last rate of cosine, as a share of the first; default 0.", TRAIN)
    ] = None,
    warmup: Annotated[
        S,
        _opt("Steps in which the rate rises linearly; below 1: a fraction; default 0.", TRAIN),
    ] = None,
    weight_decay: Annotated[S, _opt("L2 factor.", TRAIN)] = None,
    decay: Annotated[
        S, _opt("Where L2 is added. loss: before compression; update: after decoding.", TRAIN)
    ] = None,
    clip_norm: Annotated[
        S, _opt("Largest 2-norm of the gradient that is applied; default 0: no limit.", TRAIN)
    ] = None,
    ema: Annotated[
        S, _opt("Decay of the parameters' moving average, which is evaluated; 0: none.", TRAIN)
    ] = None,
    eval_every: Annotated[S, _opt("Steps between evaluations; 0: only at the end.", TRAIN)] = None,
    log_every: Annotated[S, _opt("Steps between records; default 10.", TRAIN)] = None,
    on_nonfinite: Annotated[S, _opt("stop or skip at a NaN gradient; default stop.", TRAIN)] = None,
    gradients: Annotated[
        S, _opt("loop: worker by worker; batched: one pass for all; default loop.", WHERE)
    ] = None,
    device: Annotated[S, _opt("cpu or cuda; default cpu.", WHERE)] = None,
    backend: Annotated[S, _opt("auto, reference, cpu or cuda; default auto.", WHERE)] = None,
    threads: Annotated[
        S,
        _opt(
            "Threads of each worker; default cores/workers. Another number gives other bits.",
            WHERE,
        ),
    ] = None,
    link_gbit: Annotated[
        S, _opt("Gbit/s of the link that communication is modelled for; default 10.", WHERE)
    ] = None,
    link_latency_us: Annotated[
        S, _opt("Latency of that link in microseconds; default 50.", WHERE)
    ] = None,
    capture: Annotated[
        S, _opt("Keep the workers' gradients of these steps, counted from 0: 0,100,399.", KEEP)
    ] = None,
    capture_layers: Annotated[
        str, _opt("Only these parameters, e.g. 'fc*,conv1.weight'; default all.", KEEP)
    ] = "*",
    sink: Annotated[
        S, typer.Option(help="Also write the records for: tensorboard (in the run's folder).")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of settings; flags override it.")
    ] = None,
    data_dir: DataDir = None,
    results: Annotated[Path, typer.Option(help="Folder for the runs.")] = RUNS,
    rows: Annotated[
        list[Path] | None,
        typer.Option(
            help="Parquet file with one row a run: runs that are in it are skipped, others added. "
            "May be given several times: others are added to the first. A suite that shares runs "
            "with another one (`gcbench list suites` says so) takes that one's file, too."
        ),
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds between checkpoints.")
    ] = 60.0,
    force: Annotated[bool, typer.Option(help="Repeat finished runs.")] = False,
    progress: Shown = Progress.auto,
    json: Json = False,
) -> None:
    """Train a task with N workers whose gradients are compressed.

    Comma-separated lists make a grid: --compressor none,terngrad --seed 0,1,2

    Finished runs are skipped, interrupted ones are resumed.
    """
    settings = {
        key: value
        for key, value in locals().items()
        if value is not None and key not in _NOT_SETTINGS
    }
    from gcbench.reporting import catalog
    from gcbench.training import captures, grid, rank, runner, sinks, suites

    if suite is not None and config is not None:
        raise UsageError("--suite and --config are two files of settings: give one of them")
    given = {
        "options": grid.pairs("--set", set_),
        "task_options": grid.pairs("--task-set", task_set),
        "memory_options": grid.pairs("--memory-set", memory_set),
    }
    if network is not None:
        given["task_options"]["network"] = grid.value(network)
    for key, text in settings.items():
        given[key] = grid.value(text) if isinstance(text, str) else text
    chosen = None if suite is None else suites.load(suite)
    plan = None if capture is None else captures.Plan(captures.steps(capture), capture_layers)
    made = runner.Runner(
        results,
        data_dir,
        checkpoint_seconds,
        progress.value,
        force=force,
        capture=plan,
        sink_names=() if sink is None else sinks.names(sink),
        rows_files=rows or (),
        suite="" if chosen is None else chosen.label(),
        show=catalog.show_runs,
    )
    if chosen is not None and rank.leads():
        for path in rows[:1] if rows else ():
            if adopted := chosen.adopt(path):
                say(f"{adopted} rows of other versions of suite {chosen.name} serve as they are")
        for name in () if force else chosen.shares:
            _say_shared(made, chosen, name, given)
    if chosen is None or not chosen.tunes:
        configs = grid.expand(given, config) if chosen is None else chosen.configs(given)
        made.all(configs, json=json)
    else:
        if rank.by_torchrun():
            raise UsageError(
                f"suite {chosen.name!r} chooses settings by trials, which only the process of "
                "worker 0 knows: run it without torchrun (--engine spawn has real processes)"
            )
        points = chosen.points(given)
        made.after = sum(point.config.steps for point in points)
        made.work(chosen.runs(given), len(points), json=json, tuned=True)
    if suite is not None and rank.leads():
        places = shlex.join(map(str, rows or [results]))
        say(f"as the suite's table: gcbench compare {places} --suite {suite}")


def _say_shared(made: Runner, suite: Suite, other: str, given: Mapping[str, Any]) -> None:
    """Say which runs of a suite another one's rows have, if these were not given."""
    from gcbench.training import suites

    path = suites.ROWS / f"{other}.parquet"
    twice = made.stored_elsewhere(suite.runs(given), path)
    steps = sum(config.steps for config in twice)
    if twice:
        say(
            f"suite {suite.name} shares runs with suite {other}, whose rows were not given: "
            f"{len(twice)} of its runs and trials ({steps:,} steps) are made again; to take them "
            f"from there: Ctrl-C, and once more with a last --rows {path}"
        )
    elif not path.exists():
        say(
            f"suite {suite.name} shares runs with suite {other}: whoever has its file of rows "
            f"({path} in gcbench's folder) gives it as a last --rows, so that they are not made "
            "again"
        )


_NOT_SETTINGS = {
    "suite",
    "set_",
    "task_set",
    "memory_set",
    "network",
    "capture",
    "capture_layers",
    "sink",
    "config",
    "data_dir",
    "results",
    "rows",
    "checkpoint_seconds",
    "force",
    "progress",
    "json",
}


@app.command()
def compare(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs, folders of runs, or files of rows (.json, .parquet)."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(help="Only rows with this setting, e.g. workers=4 or compressor=none,topk."),
    ] = None,
    by: Annotated[
        S, typer.Option(help="Print a table for each value of a setting, e.g. task.")
    ] = None,
    target: Annotated[
        S,
        typer.Option(
            help="Show steps and bytes to this accuracy, e.g. 0.9 (or to this test loss); fp32: "
            "to where `none` ends."
        ),
    ] = None,
    trials: Annotated[
        bool, typer.Option(help="Also show the trials that chose learning rates.")
    ] = False,
    format_: Formatted = Format.table,
    suite: Annotated[
        S, typer.Option(help=SUITE + " Only its runs, beside the published numbers.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw accuracy against bytes, or a suite with its paper's numbers (.png, .svg, "
            ".pdf)."
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            help="Sort rows by accuracy, loss, difference, payload, wire, bits, ratio, step, "
            "target or method, the best first; with a minus (-payload) the worst first.",
            show_default=False,
        ),
    ] = "",
    columns: Annotated[
        S,
        typer.Option(
            help="Only columns whose headings begin with these words: accuracy,vs none,payload."
        ),
    ] = None,
    width: Annotated[
        Width | None,
        typer.Option(help="Make picture and LaTeX as wide as one or two columns of a paper."),
    ] = None,
    progress: Shown = Progress.auto,
    json: Json = False,
) -> None:
    """Compare finished runs: accuracy over seeds, bytes, time by phase."""
    from gcbench.reporting import compare as comparing
    from gcbench.reporting import figures, published, reader
    from gcbench.training import suites

    conditions = {}
    for word in where or ():
        key, equals, values = word.partition("=")
        if not (key and equals and values) or key in conditions:
            raise UsageError(f"--where {word!r}: SETTING=VALUE[,VALUE] expected, each setting once")
        conditions[key] = values.split(",")
    if plot is not None:
        figures.check(plot)
    asked = comparing.Asked(
        conditions,
        target,
        by,
        "json" if json else format_.value,
        sort,
        tuple(filter(None, (word.strip() for word in (columns or "").split(",")))),
        width.value if width is not None else "",
    )
    wanted = [suites.load(suite)] if suite is not None else []
    watch = partial(watched, progress, "compare")
    faults: reader.Faults = []
    groups = published.by_suite(reader.load(folders or [RUNS], watch, faults), *wanted)
    made = [run for name, group in groups.items() if name for run in group]
    if suite is not None:
        made += groups.get("", [])
        groups = {suite: made}
    elif len(groups.keys() - {""}) > 1 and not (where or by or target or trials or plot or columns):
        output.emit(published.index(groups, folders or [RUNS], asked.format))
        _end_with(faults)
        return
    elif len(groups) > 1 and (json or plot is not None or format_ is Format.csv):
        raise UsageError(
            f"rows of {len(groups)} suites here, which are no one table or picture: choose with "
            f"--suite {' or '.join(filter(None, groups))}"
        )
    shown: list[Row] = []
    for name, runs in groups.items():
        tested = not trials and any(not run.is_trial for run in runs)
        beside = published.beside(suites.load(name), made) if name and tested else None
        if beside is not None:
            runs = beside.runs
        elif not trials:
            runs = reader.without_trials(runs)
        title = ""
        if beside is None:
            rows = comparing.chosen(runs, asked)
        else:
            rows = comparing.chosen(runs, asked, beside.suite.choices, beside.rows)
            title = f"Suite {beside.suite.name}: {beside.suite.title}" if suite is None else ""
        output.emit(("\n" if shown else "") + comparing.told(rows, asked, title))
        if beside is not None and beside.missing:
            say("\n  ".join(beside.unmade()))
        shown += rows
    if plot is not None:
        from gcbench.reporting import paper_plot, run_plots, tier_plot

        name = next(iter(groups))
        if name and paper_plot.has_published(shown):
            paper_plot.draw_suite(shown, suites.load(name).title, plot, asked.width)
        elif width is not None:
            paper_plot.draw(shown, plot, asked.width)
        elif any(row.tier is not None for row in shown):
            tier_plot.draw(shown, suites.load(name).title, plot)
        else:
            run_plots.draw([run for row in shown for run in row.runs], plot)
        say(f"wrote {plot}")
    _end_with(faults)


def _end_with(faults: Sequence[GcbenchError]) -> None:
    """Print the errors of rows that were left out, if there are any, and exit with code 1."""
    for fault in faults[:MOST_FAULTS]:
        say(f"gcbench: left out: {_message(str(fault))}")
    if len(faults) > MOST_FAULTS:
        say(f"gcbench: left out: {len(faults) - MOST_FAULTS} more, with errors like these")
    if faults:
        raise typer.Exit(1)


MOST_FAULTS = 20
"""Errors of rows that are printed."""


@app.command()
def verify(
    name: Annotated[
        str,
        typer.Argument(
            help="A compressor, see `gcbench list compressors`, or a file: ./mine.py.",
            autocompletion=_completed("compressors"),
        ),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A field, e.g. clip=2.0; without any, all declared variants are checked."
        ),
    ] = None,
    processes: Annotated[
        bool, typer.Option(help="Also compare the simulation with real processes.")
    ] = True,
    memory: Annotated[
        S, typer.Option(help="A memory to check beside it; default: the method's own.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="A reference in numpy to compare with: decoded(x, segments)."),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Print every check.")] = False,
    progress: Shown = Progress.auto,
    json: Json = False,
) -> None:
    """Check a compressor against its declarations; exit code 1 if one does not hold."""
    from gcbench.checks import verify as verifying
    from gcbench.core import registry
    from gcbench.reporting import catalog
    from gcbench.studies import conformance
    from gcbench.training import grid
    from gcbench.training import progress as showing

    options = grid.pairs("--set", set_)
    for field, value in options.items():
        if isinstance(value, list | dict):
            raise UsageError(f"--set {field}: one value expected; verify takes no grid")
    name = registry.add_file(name)
    results: list[verifying.Verified] = []
    texts = [" ".join(f"{key}={value}" for key, value in options.items())]
    if not options:
        texts = [text or "default" for text, _ in conformance.configurations(name)]
    running = verifying.verify(
        name, options, processes=processes, carried=memory or "", reference=against
    )
    for number, text in enumerate(texts):
        # A bar is closed before the table is printed, as it draws over what else comes to a screen.
        shown = showing.observer(progress.value, f"verify {name}", len(texts))
        try:
            shown.step(number, f"{len(conformance.CHECKS)} checks and a search of {text}")
            results.append(next(running))
        finally:
            shown.close()
        if details and not json:
            catalog.show_verdicts(results[-1].rows)
    rows = [row for result in results for row in result.rows]
    if json:
        print_json(rows)
    elif not details:
        catalog.show_verified(results, verifying.together(results))
    verdicts = [row["verdict"] for row in rows]
    hold, fail = verdicts.count("holds"), verdicts.count("fails")
    say(f"{name}: {hold} hold, {fail} fail, {len(rows) - hold - fail} not declared")
    if not conformance.claims_anything(name, options):
        say(
            f"{name} claims nothing of what arrives (unbiased, contractive, signs, exact_for): no "
            "check says whether its values are right"
        )
    if fail:
        raise typer.Exit(1)


@app.command(name="list")
def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")] = Kind.compressors,
    json: Json = False,
) -> None:
    """List compressors, tasks, suites, backends, analyses, or the words of the tables."""
    from gcbench.reporting import catalog

    listed = studies.listed if kind is Kind.analyses else catalog.ROWS[kind.value]
    rows = listed()
    if json:
        print_json(rows)
    else:
        catalog.show(rows)


@app.command()
def info(json: Json = False) -> None:
    """Show versions, devices, and backends with the reason where one is missing."""
    from gcbench.reporting import catalog

    found = catalog.info()
    if json:
        print_json(found)
    else:
        catalog.show_info(found)


@app.command()
def kernels(
    file: Annotated[Path, typer.Argument(help="What `make bench` wrote.")] = TIMINGS,
    op: Annotated[
        S, typer.Option(help="Only operations and methods whose name contains this.")
    ] = None,
    backend: Annotated[
        S, typer.Option(help="Only backends whose name begins with this, e.g. cpu.")
    ] = None,
    size: Annotated[S, typer.Option(help="Only this size, e.g. 25e6 or resnet50.")] = None,
    threads: Annotated[S, typer.Option(help="Only this number of threads.")] = None,
    format_: Annotated[
        KernelFormat, typer.Option("--format", help="How to print.")
    ] = KernelFormat.table,
    json: Json = False,
) -> None:
    """Show saved kernel timings, beside copy_, eager torch and the fewest bytes that must move."""
    from gcbench.reporting import kernel_timings as timing

    timings = timing.load(file)
    rows = timing.select(timings.rows, size=size, threads=threads, op=op, backend=backend)
    output.emit(timing.render(timings, rows, "json" if json else format_.value))


app.command()(histogram)
app.command()(bounds)
app.command()(bandwidth)
app.add_typer(scale_app, name="scale")
app.command()(advise)
app.command()(report)


def _print_folder(name: str, folder: Path, *, as_json: bool) -> None:
    if as_json:
        print_json({"name": name, "folder": str(folder), "found": folder.is_dir()})
    else:
        output.emit(str(folder))


@data_app.command("get")
def data_get(
    name: DataName,
    data_dir: DataDir = None,
    progress: Shown = Progress.auto,
    as_json: Json = False,
) -> None:
    """Download a data set, or check the files if they are there, and print its folder."""
    from gcbench.core import data
    from gcbench.training import progress as showing

    folder = data.get(name, data_dir, partial(showing.observer, progress.value))
    _print_folder(name, folder, as_json=as_json)


@data_app.command("path")
def data_path(name: DataName, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Print the folder in which a data set is looked for."""
    from gcbench.core import data

    _print_folder(name, data.path(name, data_dir), as_json=as_json)


def _version(asked: bool) -> None:
    if asked:
        from gcbench._version import __version__

        print(f"gcbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    if debug:
        os.environ["GCBENCH_DEBUG"] = "1"


make_plain(app)


def _leave() -> None:
    """Exit with code 0 without the interpreter's teardown, in a worker that torchrun started.

    Threads of torch's process group may still run during the teardown, and occasionally abort it.
    torchrun would take that for a failure, and kill the other workers before they have printed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


LONGEST_MESSAGE = 4000
"""Characters of an error message that are printed: a plug-in may raise an error of any length."""


def _message(text: str) -> str:
    """Return an error message as it is printed: without control sequences, and of limited length.

    The middle is left out: the beginning says what came, the end what to do.
    """
    text = foreign.printable(text)
    if len(text) <= LONGEST_MESSAGE:
        return text
    half = LONGEST_MESSAGE // 2
    left = len(text) - 2 * half
    return f"{text[:half]} [... {left} characters left out ...] {text[-half:]}"


def main(interrupts: Any = None, run: Callable[[], None] = app) -> None:
    """Run a command-line app; exit code 2 for usage, 1 for failures, 130 when interrupted.

    `interrupts`: the handler of Ctrl-C from here on; None: the present one.
    """
    from gcbench.training import fork_server, rank

    # torch's import makes many objects and no garbage: a short run took 2.4 s, and takes 2.1 s.
    gc.set_threshold(10_000)
    if rank.by_torchrun():  # before torch is imported, which takes seconds
        fork_server.die_with_parent(os.getppid())
    try:
        if interrupts is not None:
            signal.signal(signal.SIGINT, interrupts)
        run()
    except SystemExit as done:
        if rank.by_torchrun() and done.code in (None, 0):
            _leave()
        if done.code == INTERRUPTED:  # typer has caught Ctrl-C and printed nothing
            say("gcbench: interrupted")
        raise
    except GcbenchError as error:
        if os.environ.get("GCBENCH_DEBUG"):
            raise
        prefix = "usage: " if isinstance(error, UsageError) else ""
        say(f"gcbench: {prefix}{_message(str(error))}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stdout = None  # the reader of the pipe has ended: flushing would raise again
        sys.exit(1)
    except KeyboardInterrupt:
        say("gcbench: interrupted")
        sys.exit(INTERRUPTED)
    except Exception as error:  # whatever was not foreseen: one line, and how to see the traceback
        if os.environ.get("GCBENCH_DEBUG"):
            raise
        said = _message((str(error).splitlines() or [""])[0])
        say(f"gcbench: {type(error).__name__}: {said} (`gcbench --debug ...` shows where)")
        sys.exit(1)
