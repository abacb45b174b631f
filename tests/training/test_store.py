"""The folder of a run holds what gcbench wrote there: no link leads out of it, no pipe stops it."""

from __future__ import annotations

import fcntl
import os

import pytest

from gcbench.core.errors import GcbenchError
from gcbench.core.writing import open_own, write_atomically
from gcbench.report.analysis import Ledger
from gcbench.results import run_folder
from gcbench.training.store import Run

REFUSED = "is a symbolic link, or no regular file"


@pytest.fixture
def run(tmp_path):
    created = Run(tmp_path / "run")
    created.create()
    return created


@pytest.fixture
def precious(tmp_path):
    """A file outside of all runs."""
    path = tmp_path / "precious"
    path.write_text("mine")
    return path


def lock(run):
    with run.locked():
        pass


WRITES = {
    "lock": lock,
    "config.json.part": lambda run: run.start({}, {}),
    "checkpoint.pt.part": lambda run: run.save({}),
    "metrics.jsonl": lambda run: run.append({"step": 1}),
    "ledger.jsonl": lambda run: Ledger(run.folder).open().__enter__(),
}
READS = {
    "metrics.jsonl": lambda run: run.records(),
    "summary.json": lambda run: run.summary,
    "provenance.json": lambda run: run.read_provenance(),
    "checkpoint.pt": lambda run: run.checkpoint(),
}


@pytest.mark.parametrize(("name", "act"), [*WRITES.items(), *READS.items()])
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_a_link_or_a_pipe_is_refused(run, precious, name, act, kind):
    path = run.folder / name
    match kind:
        case "link":
            path.symlink_to(precious)
        case "dangling":
            path.symlink_to(precious.with_name("nowhere"))
        case "pipe":
            os.mkfifo(path)
    if kind == "dangling" and act in READS.values() and name != "provenance.json":
        assert not act(run)  # nothing is there
    else:
        with pytest.raises(GcbenchError, match=REFUSED):
            act(run)
    assert precious.read_text() == "mine"
    assert not precious.with_name("nowhere").exists()
    assert path.is_symlink() == (kind != "pipe")


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run").symlink_to(elsewhere)
    with pytest.raises(GcbenchError, match=REFUSED):
        Run(tmp_path / "run").create()
    results = tmp_path / "results"
    results.symlink_to(elsewhere)  # a folder of runs may lie on another disk
    Run(results / "run").create()
    assert (elsewhere / "run").is_dir()


def test_files_are_opened_as_open_does(tmp_path):
    path = tmp_path / "file"
    for mode, text, expected in (("w", "ab", "ab"), ("a", "c", "abc"), ("w", "d", "d")):
        with open_own(path, mode) as file:
            file.write(text)
        with open_own(path, "r") as file:
            assert file.read() == expected
    with pytest.raises(FileNotFoundError):
        open_own(tmp_path / "nowhere", "r")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_lock_that_its_last_holder_removed_is_none(run, monkeypatch):
    """Between opening and locking, another process ends and a third one begins."""
    taken = fcntl.flock

    def flock(file, operation):
        taken(file, operation)
        (run.folder / run_folder.LOCK).unlink()
        (run.folder / run_folder.LOCK).touch()

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(GcbenchError, match="is being written by another gcbench process"):
        lock(run)
    monkeypatch.undo()
    lock(run)


def test_records_after_the_checkpoint_are_made_again(run):
    """They would stand in the metrics twice."""
    for step in (10, 20, 20, 30):
        run.append({"kind": "train", "step": step})
    run.rewind(20)
    assert [record["step"] for record in run.records()] == [10, 20, 20]
