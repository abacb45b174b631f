"""The command line: parses, calls, prints. Heavy imports wait until a command needs them."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from gcbench.commands import (
    DataDir,
    Json,
    Progress,
    Shown,
    completed,
    message,
    print_json,
    say,
)
from gcbench.commands.advise import advise
from gcbench.commands.bandwidth import bandwidth
from gcbench.commands.bounds import bounds
from gcbench.commands.bundle import bundle
from gcbench.commands.compare import compare
from gcbench.commands.help import help_
from gcbench.commands.helptext import make_plain
from gcbench.commands.histogram import histogram
from gcbench.commands.listing import info, kernels, list_
from gcbench.commands.netlab import netlab
from gcbench.commands.predict import predict
from gcbench.commands.report import report
from gcbench.commands.run import run
from gcbench.commands.watch import watch
from gcbench.core import output
from gcbench.core.errors import GcbenchError, UsageError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
    help="Compare gradient compressors: bytes as sent, accuracy from training.",
)
data_app = typer.Typer(no_args_is_help=True, help="Download data sets, or print their folders.")
app.add_typer(data_app, name="data")

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


S = str | None
DataName = Annotated[str, typer.Argument(help="A data set, such as cifar10.")]

app.command()(run)
app.command()(compare)
app.command()(bundle)


@app.command()
def verify(
    name: Annotated[
        str,
        typer.Argument(
            help="A compressor, see `gcbench list compressors`, or a file: ./mine.py. Fields "
            "may follow: topk:ratio=0.1.",
            autocompletion=completed("compressors"),
        ),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A field, e.g. clip=2.0. Default: all declared variants."),
    ] = None,
    processes: Annotated[
        bool, typer.Option(help="Also compare the simulation with real processes.")
    ] = True,
    memory: Annotated[
        S, typer.Option(help="A memory to check with it, or a file; default: the method's memory.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="A reference in numpy to compare with: decoded(x, segments)."),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Print every check.")] = False,
    progress: Shown = Progress.auto,
    json: Json = False,
) -> None:
    """Check what a compressor declares; exit code 1 if a check fails."""
    from gcbench.checks import adversary, properties
    from gcbench.checks import verify as verifying
    from gcbench.core import progress as showing
    from gcbench.core import registry
    from gcbench.report import listings
    from gcbench.training import grid

    options = grid.pairs("--set", set_)
    name, fields = grid.method(name)
    if both := fields.keys() & options.keys():
        raise UsageError(f"--set {min(both)}: {name} has it already; remove one of them")
    options = {**fields, **options}
    for field, value in options.items():
        if isinstance(value, list | dict):
            raise UsageError(f"--set {field}: one value expected; verify takes no grid")
    carried = registry.add_file(memory, "memory") if memory else ""
    results: list[verifying.Verified] = []
    texts = [" ".join(f"{key}={value}" for key, value in options.items())]
    if not options:
        texts = [text or "default" for text, _ in properties.configurations(name)]
    running = verifying.verify(
        name, options, processes=processes, carried=carried, reference=against
    )
    for number, text in enumerate(texts):
        # A bar is closed before the table is printed, as it draws over what else comes to a screen.
        shown = showing.observer(progress.value, f"verify {name}", len(texts))
        try:
            shown.step(number, f"{len(properties.CHECKS)} checks and a search of {text}")
            results.append(next(running))
        finally:
            shown.close()
        if details and not json:
            listings.show_verdicts(results[-1].rows)
    rows = [row for result in results for row in result.rows]
    if json:
        print_json(rows)
    elif not details:
        listings.show_verified(results, verifying.together(results))
    verdicts = [row["verdict"] for row in rows]
    hold, fail = verdicts.count("holds"), verdicts.count("fails")
    say(f"{name}: {hold} hold, {fail} fail, {len(rows) - hold - fail} not declared")
    for result in (each for each in results if each.left_out):
        say(
            f"{name}, {result.configuration}: {result.left_out} inputs of 66,000 tensors were left "
            f"out, because the first took more than {adversary.PATIENCE:g} s of CPU time. Does it "
            "loop over segments in Python?"
        )
    if not properties.claims_anything(name, options):
        say(
            f"{name} makes no claims about its output (unbiased, contractive, signs, exact_for): "
            "no check tests whether its values are right"
        )
    if properties.unclaimed_rule(name, options):
        say(
            f"{name}: its update rule was not compared with any optimizer. Declare the claim "
            "`uncompressed`"
        )
    if fail:
        raise typer.Exit(1)


app.command(name="list")(list_)
app.command()(info)
app.command()(kernels)
app.command()(histogram)
app.command()(bounds)
app.command()(bandwidth)
app.command()(predict)
app.command()(advise)
app.command()(netlab)
app.command()(watch)
app.command()(report)
app.command(name="help")(help_)


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
    """Download a data set, or check its files, and print its folder."""
    from gcbench.core import data

    folder = data.get(name, data_dir, progress.value)
    _print_folder(name, folder, as_json=as_json)


@data_app.command("path")
def data_path(name: DataName, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Print the folder of a data set."""
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
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
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
        say(f"gcbench: {prefix}{message(str(error))}")
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
        text = message((str(error).splitlines() or [""])[0])
        say(f"gcbench: {type(error).__name__}: {text} (`gcbench --debug ...` shows where)")
        sys.exit(1)
