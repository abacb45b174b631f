"""Progress of a run on stderr: a bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

Mode = Literal["auto", "bar", "plain", "none"]
WIDE = 90
"""In a terminal of at least this many columns the bar also shows the latest numbers."""
ANNOUNCE_SECONDS = 5.0
"""After this many seconds of steps the duration of the grid is estimated and announced."""
DELAY_SECONDS = 1.0
"""Reading files shows its progress if it takes longer than this."""
PLAIN_SECONDS = 10.0
"""Seconds between lines in a pipe; evaluations are always printed."""


class Observer:
    """Receives every step and record of a run. This one shows nothing; its subclasses do."""

    def step(self, step: int, text: str = "") -> None:
        """Show that `step` is reached; `text` describes what follows."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Show the numbers of a record."""

    def close(self) -> None:
        """Finish."""


def _words(record: Mapping[str, Any], *, short: bool = False) -> str:
    if record["kind"] == "train":
        loss = record["train_loss"]
        return "loss not finite" if loss is None else f"loss {loss:.4f}"
    split = "test" if "test_loss" in record else "validation"
    accuracy, loss = record[f"{split}_accuracy"], record[f"{split}_loss"]
    if short:
        figure = loss if accuracy is None else 100 * accuracy
        unit = "" if accuracy is None else " %"
        return f"{split} loss not finite" if figure is None else f"{split} {figure:.4g}{unit}"
    parts = [] if accuracy is None else [f"{split} accuracy {100 * accuracy:.2f} %"]
    parts.append(f"{split} loss not finite" if loss is None else f"{split} loss {loss:.4g}")
    return ", ".join(parts)


class Plain(Observer):
    """Prints a line every PLAIN_SECONDS, and at every evaluation."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps
        self.last = 0.0
        self.first: tuple[int, float] | None = None

    def step(self, step: int, text: str = "") -> None:
        """Print `text`, if there is anything, with the remaining time estimated from the pace."""
        now = time.monotonic()
        if self.first is None:
            self.first = step, now
        done = step - self.first[0]
        if text and now - self.last >= PLAIN_SECONDS:
            step = min(step, self.steps)
            left = (now - self.first[1]) / done * (self.steps - step) if done else None
            time_left = "" if left is None else f"  {timedelta(seconds=round(left))} left"
            self.say(f"{step}/{self.steps}  {text}{time_left}")

    def record(self, record: Mapping[str, Any]) -> None:  # noqa: D102
        if record["kind"] == "eval" or time.monotonic() - self.last >= PLAIN_SECONDS:
            step = min(record["step"], self.steps)
            self.say(f"step {step}/{self.steps}  {_words(record)}")

    def say(self, text: str) -> None:
        """Print a line at once."""
        self.last = time.monotonic()
        print(f"{self.name}  {text}", file=sys.stderr, flush=True)


class Bar(Observer):
    """Draws a bar with the remaining time and the latest numbers."""

    def __init__(self, name: str, steps: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
        )
        from rich.progress import TimeRemainingColumn as Remaining

        self.name, self.steps, self.numbers = name, steps, {"train": "", "eval": ""}
        console = Console(stderr=True)
        columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn(16)]
        columns += [MofNCompleteColumn(), Remaining(compact=True)]
        if console.width >= WIDE:
            columns.append(TextColumn("{task.fields[text]}"))
        self.bar = Progress(*columns, console=console)
        short = name if console.width >= WIDE else name.rsplit("-", 1)[0]
        self.task = self.bar.add_task(short, total=steps, text="")
        self.bar.start()

    def step(self, step: int, text: str = "") -> None:  # noqa: D102
        shown: dict[str, Any] = {"text": text} if text else {}
        self.bar.update(self.task, completed=min(step, self.steps), **shown)

    def record(self, record: Mapping[str, Any]) -> None:  # noqa: D102
        self.numbers[record["kind"]] = _words(record, short=True)
        text = "  ".join(filter(None, self.numbers.values()))
        self.bar.update(self.task, text=text)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.bar.console.print(text, highlight=False, markup=False)

    def close(self) -> None:  # noqa: D102
        self.bar.stop()


class Announcing(Observer):
    """Announces once, ANNOUNCE_SECONDS after the first step, how long run and grid will take.

    The estimate assumes the pace of this run for all: others of the grid may be slower or faster.
    """

    def __init__(self, inner: Plain | Bar, steps: int, after: int) -> None:
        self.inner, self.steps, self.after = inner, steps, after
        self.first: tuple[int, float] | None = None
        self.announced = False

    def step(self, step: int, text: str = "") -> None:  # noqa: D102
        self.inner.step(step, text)
        now = time.monotonic()
        if self.first is None:
            self.first = step, now
        seconds, done = now - self.first[1], step - self.first[0]
        if self.announced or seconds < ANNOUNCE_SECONDS or not done:
            return
        self.announced = True
        pace = seconds / done
        here, whole = (
            timedelta(seconds=round(pace * left))
            for left in (self.steps - step, self.steps - step + self.after)
        )
        self.inner.say(
            f"about {here} left of this run, {whole} of the grid ({self.after:,} steps after it) "
            "by this run's pace; Ctrl-C keeps what is done"
        )

    def record(self, record: Mapping[str, Any]) -> None:  # noqa: D102
        self.inner.record(record)

    def close(self) -> None:  # noqa: D102
        self.inner.close()


class Delayed(Observer):
    """Shows nothing in the first DELAY_SECONDS, then what `make()` shows: short work is silent."""

    def __init__(self, make: Callable[[], Observer]) -> None:
        self.make, self.began = make, time.monotonic()
        self.inner: Observer | None = None

    def step(self, step: int, text: str = "") -> None:  # noqa: D102
        if self.inner is None and time.monotonic() - self.began >= DELAY_SECONDS:
            self.inner = self.make()
        if self.inner is not None:
            self.inner.step(step, text)

    def record(self, record: Mapping[str, Any]) -> None:  # noqa: D102
        if self.inner is not None:
            self.inner.record(record)

    def close(self) -> None:  # noqa: D102
        if self.inner is not None:
            self.inner.close()


def observer(mode: Mode, name: str, steps: int, after: int = 0) -> Observer:
    """Return the observer for `mode`; "auto" is a bar if stderr is a terminal, else plain lines.

    `name` and `steps` are the run's; `after` is the number of steps of all following runs. If there
    are some, the duration of the whole grid is announced.
    """
    if mode == "none":
        return Observer()
    bar = mode == "bar" or (mode == "auto" and sys.stderr.isatty())
    shown: Plain | Bar = Bar(name, steps) if bar else Plain(name, steps)
    return Announcing(shown, steps, after) if after else shown
