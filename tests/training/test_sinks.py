"""Sinks: every record arrives once, whatever happens to the run, and nothing else changes."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import invoke
from test_engines import Crash, config, crash_at_twenty

from gcbench.core import registry
from gcbench.core.errors import GcbenchError
from gcbench.core.world import Link, SimulatedWorld
from gcbench.results.schema import METRIC_COLUMNS
from gcbench.training import configuration, engines, sinks
from gcbench.training.store import Run
from gcbench.training.train import Options, Trainer

pytestmark = pytest.mark.usefixtures("forked")

QUICK = ("--task", "quadratic", "--workers", 2, "--steps", 12, "--log-every", 3, "--eval-every", 4)


class Lines(sinks.Sink):
    """Keeps what it hears in a file; a list of what happened to it serves the tests."""

    received: list = []  # noqa: RUF012

    def open(self, folder, config, provenance):
        self.path = folder / "lines"
        self.path.unlink(missing_ok=True)
        self.received.append(("open", config["workers"], provenance["commit"]))

    def record(self, record):
        if record["step"] == 6 and "full" in self.received:
            raise OSError("no room")
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def close(self):
        self.received.append("close")


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setitem(sinks.registered(), "lines", registry.Entry("lines", "test", lambda: Lines))
    monkeypatch.setattr(Lines, "received", [])
    return Lines.received


@pytest.fixture
def run(tmp_path):
    def go(*words):
        return invoke("run", *QUICK, "--progress", "none", "--results", tmp_path, *words)

    return go


@pytest.fixture
def trainer(tmp_path):
    """Return a function that makes a trainer on one folder, with these sinks."""
    worlds = []

    def make(*message: str, **options) -> Trainer:
        created = config(eval_every=7)
        worlds.append(SimulatedWorld(2, torch.device("cpu"), Link(10, 50), 1, 1))
        run = Run(tmp_path / created.run_name)
        run.create()
        if not (run.folder / "config.json").exists():
            run.start(created.model_dump(mode="json"), configuration.provenance(created))
        return Trainer(created, worlds[-1], run, Options(sinks=message, **options))

    yield make
    for world in worlds:
        world.close()


def the_run(results: Path) -> Run:
    (folder,) = results.iterdir()
    return Run(folder)


def received(run: Run) -> list[dict]:
    return [json.loads(line) for line in (run.folder / "lines" / "lines").read_text().splitlines()]


# -- what every sink hears -------------------------------------------------------------------------


def test_a_sink_hears_every_record_and_changes_nothing(run, tmp_path, lines):
    plain = run("--json").json
    listened = run("--sink", "lines", "--force", "--json").json
    for key in ("config", "config_hash", "params_sha256", "wire_bytes"):
        assert plain[key] == listened[key]
    assert plain.keys() == listened.keys()
    result = the_run(tmp_path)
    assert received(result) == result.records()
    assert [(r["kind"], r["step"]) for r in received(result)] == [
        ("train", 3),
        ("eval", 4),
        ("train", 6),
        ("eval", 8),
        ("train", 9),
        ("train", 12),
        ("eval", 12),
    ]
    assert lines == [("open", 2, listened["provenance"]["commit"]), "close"]


def test_a_resumed_run_tells_each_record_once(trainer, lines):
    """Also those of a part without the sink, and not those that a crash took back."""
    with pytest.raises(Crash):
        trainer(checkpoint_seconds=0, on_bucket=lambda step, *_: step == 9 and crash()).fit()
    with pytest.raises(Crash):  # the last checkpoint is of step 9, the last record of step 20
        trainer("lines", on_bucket=crash_at_twenty).fit()
    again = trainer("lines")
    assert received(again.run)[-1]["step"] == 20
    again.fit()
    records = received(again.run)
    assert records == again.run.records()
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 31))
    assert lines.count("close") == 2


def crash():
    raise Crash


def unreadable(*_):
    raise GcbenchError("no such data")


def test_a_finished_run_tells_its_stored_records(run, tmp_path, lines):
    first = run("--json").json
    assert not (the_run(tmp_path).folder / "lines").exists()
    done = run("--sink", "lines", "--json")
    assert done.json == first
    assert "sent its stored records to lines" in done.err
    assert received(the_run(tmp_path)) == the_run(tmp_path).records()


def test_stored_records_of_a_run_with_a_row_are_sent_again(tmp_path, lines):
    runs, file = tmp_path / "runs", tmp_path / "rows.parquet"
    words = ("run", *QUICK, "--progress", "none", "--results", runs, "--rows", file)
    assert invoke(*words).code == 0
    assert "sent its stored records to lines" in invoke(*words, "--sink", "lines").err
    assert received(the_run(runs)) == the_run(runs).records()
    shutil.rmtree(runs)
    done = invoke(*words, "--sink", "lines")
    assert (done.code, "sent nothing to lines" in done.err) == (0, True)


def test_repeated_commands_pile_up_nothing(accumulator, run, tmp_path):
    for _ in range(2):
        run("--sink", "tensorboard")
        assert len(files(the_run(tmp_path))) == 1
        assert scalars(accumulator(the_run(tmp_path))) == expected(the_run(tmp_path))


def test_a_run_that_starts_again_keeps_nothing_of_the_old_one(run, tmp_path, lines, monkeypatch):
    """From its first step on: an attempt that fails before deletes nothing."""
    run("--sink", "lines")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "resume", unreadable)
        assert run("--force").code == 1
    assert received(the_run(tmp_path)) == the_run(tmp_path).records()
    run("--force")
    assert not (the_run(tmp_path).folder / "lines").exists()


def test_a_sink_that_fails_says_so_and_costs_nothing(run, tmp_path, lines):
    lines.append("full")
    done = run("--sink", "lines")
    assert done.code == 1
    (output,) = [line for line in done.err.splitlines() if line.startswith("gcbench: ")]
    assert "sink 'lines' failed: OSError('no room')" in output
    assert "without --sink lines" in output
    assert lines[-1] == "close"
    assert [r["step"] for r in the_run(tmp_path).records()] == [3, 4, 6]
    assert run("--json").json["steps"] == 12


def test_unknown_sinks_are_refused_before_anything_runs(run, tmp_path, lines):
    for text, output in (("lines,boards", "Known: lines, tensorboard"), ("", "unknown sink ''")):
        done = run("--sink", text)
        assert (done.code, output in done.err) == (2, True), done.err
    assert list(tmp_path.iterdir()) == []
    assert lines == []


@pytest.mark.parametrize("name", ["captures", "earlier", "lock"])
def test_a_sink_takes_nothing_that_the_run_has(run, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sinks.registered(), name, registry.Entry(name, "test", lambda: Lines))
    done = run("--sink", name)
    assert (done.code, f"sink {name!r}" in done.err) == (2, True), done.err
    assert list(tmp_path.iterdir()) == []


def test_every_column_has_its_place_in_tensorboard():
    tags = [tag for kind in sinks.TensorBoard.TAGS.values() for tag in kind.items()]
    assert {column for column, _ in tags} == {*METRIC_COLUMNS} - {"kind", "step"}
    assert len({tag for _, tag in tags}) == len(tags)


def test_without_the_package_nothing_runs(run, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    done = run("--sink", "tensorboard")
    assert done.code == 2
    assert "pip install 'gcbench[tensorboard]'" in done.err
    assert list(tmp_path.iterdir()) == []


# -- TensorBoard -----------------------------------------------------------------------------------


@pytest.fixture
def accumulator():
    """TensorBoard's own reader of a run's folder."""
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing import event_accumulator

    def read(run: Run):
        sizes = {event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}  # keep all
        return event_accumulator.EventAccumulator(str(run.folder / "tensorboard"), sizes).Reload()

    return read


def scalars(read) -> dict[str, list[tuple[int, float]]]:
    tags = read.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in tags}


def expected(run: Run) -> dict[str, list[tuple[int, float]]]:
    """Return the records of a run as TensorBoard should show them, in its float32."""
    result: dict[str, list[tuple[int, float]]] = {}
    for record in run.records():
        for column, tag in sinks.TensorBoard.TAGS[record["kind"]].items():
            if record.get(column) is not None:
                value = float(np.float32(record[column]))
                result.setdefault(tag, []).append((record["step"], value))
    return result


def files(run: Run) -> list[Path]:
    return list((run.folder / "tensorboard").iterdir())


def test_tensorboard_shows_the_records(accumulator, tmp_path):
    """Every value at its step, at the time of the run's steps; config and provenance as text."""
    words = ("--task", "digits", "--workers", 2, "--steps", 6, "--log-every", 2, "--eval-every", 3)
    summary = invoke(
        "run",
        *words,
        "--sink",
        "tensorboard",
        "--results",
        tmp_path,
        "--json",
        "--progress",
        "none",
    ).json
    run = the_run(tmp_path)
    read = accumulator(run)
    shown = scalars(read)
    assert shown == expected(run)
    assert len(shown) == 8
    assert [step for step, _ in shown["loss/test"]] == [3, 6]
    assert shown["accuracy/test"][-1][1] == pytest.approx(summary["test_accuracy"])
    assert shown["bytes/payload_up"][-1] == (6, pytest.approx(summary["payload_bytes_up"]))
    started = datetime.fromisoformat(summary["provenance"]["started"]).timestamp()
    (last,) = [record for record in run.records() if record["kind"] == "train"][-1:]
    assert read.Scalars("lr")[-1].wall_time == pytest.approx(started + last["seconds"], abs=1e-3)
    (text,) = read.Tensors("config/text_summary")
    message = text.tensor_proto.string_val[0].decode().strip("`\n")
    assert json.loads(message) == summary["config"]
    assert "provenance/text_summary" in read.Tags()["tensors"]


def test_events_outlive_a_crash_and_are_not_doubled(accumulator, trainer, monkeypatch):
    """Each is in the file at once; after a resume a reader that looks on forgets the old ones."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    write = RecordWriter.write
    monkeypatch.setattr(  # it is a thread's, and what is not waited for comes too late
        RecordWriter, "write", lambda self, data: (time.sleep(0.002), write(self, data))
    )
    seen = {}

    def look(step, rank, bucket):
        if (step, rank) == (15, 0):
            seen.update(scalars(accumulator(created.run)))
        crash_at_twenty(step, rank, bucket)

    created = trainer("tensorboard", checkpoint_seconds=0, on_bucket=look)
    with pytest.raises(Crash):
        created.fit()
    assert [step for step, _ in seen["lr"]] == list(range(1, 16))
    (first,) = files(created.run)  # names are by the second: the next one would not be a later one
    first.rename(first.with_name("events.out.tfevents.1700000000.before"))
    reader = accumulator(created.run)
    assert [step for step, _ in scalars(reader)["lr"]] == list(range(1, 21))
    again = trainer("tensorboard")
    again.fit()
    for read in (accumulator(again.run), reader.Reload()):
        assert scalars(read) == expected(again.run)
    assert [step for step, _ in scalars(reader)["lr"]] == list(range(1, 31))


def test_one_process_of_many_writes(accumulator, tmp_path):
    created = config(engine="spawn", steps=6, eval_every=3)
    run = Run(tmp_path)
    run.start(created.model_dump(mode="json"), configuration.provenance(created))
    engines.spawn(created, run, Options(sinks=("tensorboard",)))
    assert len(files(run)) == 1
    shown = scalars(accumulator(run))
    assert shown == expected(run)
    assert [step for step, _ in shown["loss/test"]] == [3, 6]
    assert "accuracy/test" not in shown  # a quadratic has none


def test_what_is_not_finite_is_shown_so(accumulator, tmp_path):
    provenance = {"started": "2026-01-02T03:04:05+00:00"}
    run = Run(tmp_path)
    sink = sinks.Sinks(["tensorboard"], run, {}, provenance)
    bytes_ = dict.fromkeys(("payload_bytes_up", "payload_bytes_down", "wire_bytes"), 1.0)
    sink.record({"kind": "train", "step": 1, "train_loss": None, "lr": 1, **bytes_, "seconds": 0})
    sink.record({"kind": "eval", "step": 1, "test_accuracy": None, "test_loss": None, "seconds": 0})
    sink.close()
    shown = scalars(accumulator(run))
    assert math.isnan(shown["loss/train"][0][1])
    assert math.isnan(shown["loss/test"][0][1])
    assert "accuracy/test" not in shown


def test_a_folder_that_cannot_be_written(tmp_path, lines):
    with pytest.raises(GcbenchError, match="sink 'lines' failed: FileNotFoundError"):
        sinks.Sinks(["lines"], Run(tmp_path / "gone"), {}, {})
