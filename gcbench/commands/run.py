"""`gcbench run`: its flags are the fields of `gcbench.results.settings.Settings`."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from gcbench.commands import (
    RUNS,
    SUITE,
    DataDir,
    Json,
    Progress,
    Shown,
    completed,
    option,
    say,
    with_flags,
)
from gcbench.core.errors import UsageError
from gcbench.core.values import text
from gcbench.results.settings import COMPARED, SET_FLAGS, TRAINING, Settings

if TYPE_CHECKING:
    from gcbench.training.runner import Runner
    from gcbench.training.suites import Suite

CAPTURED = "Gradients before memory and compression, for `gcbench histogram`"
COMPLETED = {"task": "tasks", "compressor": "compressors"}
"""Settings whose values a shell completes -> what they name."""


def _flag(name: str, field: Any) -> inspect.Parameter | None:
    """Return the flag of a setting; None if it has none.

    A flag's value is text, as it may be a list for a grid; that of a true-or-false setting is a
    pair of flags, and that of a mapping may be given several times.
    """
    extra: dict[str, Any] = field.json_schema_extra
    if not extra["panel"]:
        return None
    help, default = field.description, field.default
    kind = field.annotation
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    names: list[str] = [extra["flag"]] if extra["flag"] else []
    type_: Any = str | None
    if kind is bool:
        type_ = bool | None
        flag = name.replace("_", "-")
        names = [f"--{flag}/--no-{flag}"]
    elif name in SET_FLAGS:
        type_ = list[str] | None
    elif "Default" not in help and extra["panel"] != TRAINING and not field.is_required():
        help += f" Default: {text(default)}."
    described = option(
        help,
        extra["panel"],
        *names,
        show_default=False,
        autocompletion=completed(COMPLETED[name]) if name in COMPLETED else None,
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=Annotated[type_, described])


def derived(function: Callable[..., None]) -> Callable[..., None]:
    """Return the command whose parameters are the settings' flags and those of `function`.

    `function` gets the settings that were given as one mapping, name -> text, flag or list of
    NAME=VALUE, before its own parameters.
    """
    _, *others = inspect.signature(function, eval_str=True).parameters.values()
    flags = [_flag(name, field) for name, field in Settings.model_fields.items()]
    flags_by_name = {flag.name: flag for flag in flags if flag is not None}

    def call(**values: Any) -> None:
        settings = {name: values.pop(name) for name in flags_by_name}
        function({k: v for k, v in settings.items() if v is not None}, **values)

    first = [one for one in others if one.name in ("suite", "network")]
    rest = [one for one in others if one not in first]
    return with_flags(call, [*first, *flags_by_name.values(), *rest], function)


def values_of(settings: Mapping[str, Any], network: str | None) -> dict[str, Any]:
    """Return the settings of the flags as `grid.expand` takes them.

    `settings`: see `derived`. `network`: the text of --network.

    Raises:
        UsageError: a text that cannot be parsed, or --network beside --task-set network=...
    """
    from gcbench.training import grid

    options: dict[str, Any] = {
        key: grid.pairs(flag, settings.get(key)) for key, flag in SET_FLAGS.items()
    }
    if network is not None:
        if "network" in options["task_options"]:
            raise UsageError(
                f"--network {network} and --task-set network=...: both set the task's network; "
                "leave one of them out"
            )
        options["task_options"]["network"] = grid.flag("network", network)
    for key, value in settings.items():
        if key not in SET_FLAGS:
            options[key] = grid.flag(key, value) if isinstance(value, str) else value
    return options


@derived
def run(
    settings: Mapping[str, Any],
    *,
    suite: Annotated[
        str | None,
        option(
            SUITE + " Other flags select some of its runs.",
            COMPARED,
            autocompletion=completed("suites"),
        ),
    ] = None,
    network: Annotated[str | None, option("Short for --task-set network=...", COMPARED)] = None,
    capture: Annotated[
        str | None,
        option("Save the workers' gradients of these steps, counted from 0: 0,100,399.", CAPTURED),
    ] = None,
    capture_layers: Annotated[
        str,
        option(
            "Only these parameters, e.g. 'fc*,conv1.weight'; default all.",
            CAPTURED,
            show_default=False,
        ),
    ] = "*",
    sink: Annotated[
        str | None,
        option("Also write the records for: tensorboard (in the run's folder)."),
    ] = None,
    config: Annotated[Path | None, option("YAML file of settings; flags override it.")] = None,
    data_dir: DataDir = None,
    results: Annotated[Path, option("Folder for the runs.")] = RUNS,
    rows: Annotated[
        list[Path] | None,
        option(
            "Parquet file with one row per run. Runs that it contains are skipped; new ones go to "
            "the first such file. Add the file of another suite to reuse its runs."
        ),
    ] = None,
    checkpoint_seconds: Annotated[float, option("Seconds between checkpoints.", min=0)] = 60.0,
    force: Annotated[bool, option("Repeat finished runs.")] = False,
    progress: Shown = Progress.auto,
    json: Json = False,
) -> None:
    """Train a task with compressed gradients.

    Comma-separated lists make a grid: --compressor none,terngrad --seed 0,1,2

    Finished runs are skipped, interrupted ones are resumed.
    """
    from gcbench.core import settings_file
    from gcbench.report import listings
    from gcbench.results.suites import FOLDER
    from gcbench.training import captures, grid, rank, runner, sinks, suites

    if suite is not None and config is not None:
        raise UsageError("--suite and --config are two files of settings: give one of them")
    if capture is None and capture_layers != "*":
        raise UsageError(
            f"--capture-layers {capture_layers!r} without steps to capture; add --capture 0,100"
        )
    for path in rows or ():
        if path.suffix != ".parquet":
            raise UsageError(
                f"--rows {path}: expected a name that ends in .parquet, by which `gcbench compare` "
                "recognizes a file of rows"
            )
    options = values_of(settings, network)
    file = {} if config is None else settings_file.read(config)
    if suite is None and "workers" not in file and (member := rank.from_torchrun()) is not None:
        options.setdefault("workers", member.size)
    chosen = None if suite is None else suites.load(suite)
    if chosen is not None:
        builtin = FOLDER / f"{chosen.name}.yaml"
        if builtin.exists() and not builtin.samefile(chosen.file):
            raise UsageError(
                f"--suite {suite}: rows carry the name of their suite, and {chosen.name} is a "
                "built-in one; rename the file"
            )
    plan = None if capture is None else captures.Plan(captures.steps(capture), capture_layers)
    runner_ = runner.Runner(
        results,
        data_dir,
        checkpoint_seconds,
        progress.value,
        force=force,
        capture=plan,
        sink_names=() if sink is None else sinks.names(sink),
        rows_files=rows or (),
        suite="" if chosen is None else chosen.label(),
        show=listings.show_runs,
    )
    if chosen is not None and rank.leads():
        for path in rows[:1] if rows else ():
            if adopted := chosen.adopt(path):
                say(f"{adopted} rows of other versions of suite {chosen.name} serve as they are")
        for name in () if force else chosen.shares:
            _say_shared(runner_, chosen, name, options)
    if chosen is None or not chosen.tunes:
        configs = (
            grid.expand(options, config)
            if chosen is None
            else [point.config for point in chosen.points(options)]
        )
        for sentence in grid.without_effect({*options, *file}, configs) if rank.leads() else ():
            say(f"note: {sentence}")
        runner_.all(configs, json=json)
    else:
        if rank.by_torchrun():
            raise UsageError(
                f"suite {chosen.name!r} chooses settings by trials, which only the process of "
                "worker 0 knows: run it without torchrun (--engine spawn has real processes)"
            )
        points = chosen.points(options)
        runner_.after = sum(point.config.steps for point in points)
        runner_.work(chosen.runs(options), len(points), json=json, tuned=True)
    if suite is not None and rank.leads():
        places = shlex.join(map(str, rows or [results]))
        say(f"as the suite's table: gcbench compare {places} --suite {suite}")


def _say_shared(runner: Runner, suite: Suite, other: str, options: Mapping[str, Any]) -> None:
    """Say which runs of a suite another one's rows have, if these were not given."""
    from gcbench.training import suites

    path = suites.ROWS / f"{other}.parquet"
    twice = runner.stored_elsewhere(suite.runs(options), path)
    steps = sum(config.steps for config in twice)
    if twice:
        say(
            f"suite {suite.name} shares runs with suite {other}, whose rows were not given: "
            f"{len(twice)} of its runs and trials ({steps:,} steps) are made again; to take them "
            f"from there: Ctrl-C, and once more with a last --rows {path}"
        )
    elif not path.exists():
        say(
            f"suite {suite.name} shares runs with suite {other}. To reuse its rows, add its file "
            f"({path} in gcbench's folder) as the last --rows"
        )
