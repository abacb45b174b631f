"""Progress of a run on stderr: a bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, Protocol

Mode = Literal["auto", "bar", "plain", "none"]
WIDE = 90
"""In a terminal of at least this many columns the bar also shows the latest numbers."""
ANNOUNCE_SECONDS = 5.0
"""After this many seconds of steps the duration of the grid is estimated and announced."""
DELAY_SECONDS = 1.0
"""Reading files shows its progress if it takes longer than this."""
PLAIN_SECONDS = 10.0
"""Seconds between lines in a pipe; evaluations are always printed."""


class Observer(Protocol):
    """Shows progress: is called at every step, and with every record."""

    def step(self, step: int, text: str = "") -> None: ...  # noqa: D102

    def record(self, record: Mapping[str, Any]) -> None: ...  # noqa: D102

    def say(self, text: str) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


class Silent:
    """Shows nothing."""

    def step(self, step: int, text: str = "") -> None:  # noqa: D102
        pass

    def record(self, record: Mapping[str, Any]) -> None:  # noqa: D102
        pass

    def say(self, text: str) -> None:  # noqa: D102
        pass

    def close(self) -> None:  # noqa: D102
        pass


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


class Plain:
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
            self._print(f"{step}/{self.steps}  {text}{time_left}")

    def record(self, record: Mapping[str, Any]) -> None:  # noqa: D102
        if record["kind"] == "eval" or time.monotonic() - self.last >= PLAIN_SECONDS:
            step = min(record["step"], self.steps)
            self._print(f"step {step}/{self.steps}  {_words(record)}")

    def say(self, text: str) -> None:
        """Print a line at once."""
        self._print(text)

    def _print(self, line: str) -> None:
        self.last = time.monotonic()
        print(f"{self.name}  {line}", file=sys.stderr, flush=True)

    def close(self) -> None:  # noqa: D102
        pass


class Bar:
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
        done = min(step, self.steps)
        if text:
            self.bar.update(self.task, completed=done, text=text)
        else:
            self.bar.update(self.task, completed=done)

    def record(self, record: Mapping[str, Any]) -> None:  # noqa: D102
        self.numbers[record["kind"]] = _words(record, short=True)
        text = "  ".join(filter(None, self.numbers.values()))
        self.bar.update(self.task, text=text)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.bar.console.print(text, highlight=False, markup=False)

    def close(self) -> None:  # noqa: D102
        self.bar.stop()


class Announcing:
    """Announces once, ANNOUNCE_SECONDS after the first step, how long run and grid will take.

    The estimate assumes the pace of this run for all: others of the grid may be slower or faster.
    """

    def __init__(self, inner: Observer, steps: int, after: int) -> None:
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

    def say(self, text: str) -> None:  # noqa: D102
        self.inner.say(text)

    def close(self) -> None:  # noqa: D102
        self.inner.close()


class Delayed:
    """Shows nothing in the first DELAY_SECONDS, and then what `make` returns: short work is silent.

    `make` is called at the first step after that time.
    """

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

    def say(self, text: str) -> None:  # noqa: D102
        if self.inner is not None:
            self.inner.say(text)

    def close(self) -> None:  # noqa: D102
        if self.inner is not None:
            self.inner.close()


def observer(mode: Mode, name: str, steps: int, after: int = 0) -> Observer:
    """Return the observer for `mode`; "auto" is a bar if stderr is a terminal, else plain lines.

    `name` and `steps` are the run's; `after` is how many steps the runs that follow have together:
    if there are some, the duration of the whole grid is announced.
    """
    shown = _observer(mode, name, steps)
    return Announcing(shown, steps, after) if after else shown


def _observer(mode: Mode, name: str, steps: int) -> Observer:
    if mode == "auto":
        mode = "bar" if sys.stderr.isatty() else "plain"
    if mode == "none":
        return Silent()
    return Bar(name, steps) if mode == "bar" else Plain(name, steps)
