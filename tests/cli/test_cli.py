"""The command line: what it prints where, its exit codes, and that a failure loses nothing."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pyarrow.parquet as pq
import pytest
import torch
from builders import summary, write
from commands import files_of_at_most, invoke

from gcbench import get_compressor
from gcbench import run as run_from_python
from gcbench.checks import properties, verify
from gcbench.checks.calls import FUNCTIONS, Covered
from gcbench.cli import main
from gcbench.core import registry
from gcbench.core.compressor import Compressor
from gcbench.core.errors import GcbenchError
from gcbench.integrations.scheme import stages
from gcbench.report import listings
from gcbench.results.schema import METRIC_COLUMNS
from gcbench.training.store import Run

QUICK = ("--task", "quadratic", "--workers", 2, "--steps", 12, "--progress", "none")
KEYS = {
    "task",
    "compressor",
    "workers",
    "collective",
    "engine",
    "seed",
    "steps",
    "test_accuracy",
    "test_loss",
    "train_loss",
    "params",
    "payload_bytes_up",
    "payload_bytes_down",
    "wire_bytes",
    "nominal_ratio",
    "payload_ratio_up",
    "payload_ratio_down",
    "phase_seconds",
    "skipped_steps",
    "params_sha256",
    "config_hash",
    "provenance",
}


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a quick task with more words."""

    def go(*words):
        return invoke("run", *QUICK, "--results", tmp_path, *words)

    return go


def content(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refused(done, code, *parts):
    """Check for one clear line on stderr, and nothing else."""
    lines = [line for line in done.err.splitlines() if line.startswith("gcbench: ")]
    assert done.code == code, done.err
    assert len(lines) == 1, done.err
    assert "Traceback" not in done.err
    for part in parts:
        assert part in lines[0]


# -- what comes out --------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [("--json", "--format", "csv"), ("--format", "csv", "--json")])
def test_two_formats_are_refused(flags):
    for command in ("compare", "watch"):
        done = invoke(command, *flags, *(["--", "true"] if command == "watch" else []))
        assert done.code == 2
        assert "--json and --format csv" in done.err


def test_what_the_encoding_of_stdout_lacks_is_a_question_mark(tmp_path):
    path, shown = write(tmp_path, summary(), summary("terngrad")), io.BytesIO()
    argv = ["gcbench", "compare", str(path)]
    out = io.TextIOWrapper(shown, "ascii")
    with (
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        main()
    out.flush()
    expected = invoke("compare", path).out
    assert not expected.isascii()
    assert shown.getvalue() == expected.encode("ascii", "replace")


def test_one_document_on_stdout_and_the_rest_on_stderr(gcbench, tmp_path):
    done = gcbench("run", "--task", "digits", "--steps", 30, "--results", tmp_path, "--json")
    summary = done.json
    assert set(summary) >= KEYS
    assert summary["compressor"] == (
        "TernGrad(clip=2.5, scale='clipped-max', share=True, granularity='tensor')"
    )
    terngrad = registry.compressor_class("terngrad")
    assert eval(summary["compressor"], {"TernGrad": terngrad}) == terngrad()
    assert (summary["task"], summary["engine"], summary["seed"]) == ("digits", "simulate", 0)
    assert (summary["workers"], summary["collective"], summary["steps"]) == (4, "twoshot", 30)
    assert summary["params"] == 9610
    assert 0.6 < summary["test_accuracy"] <= 1
    assert summary["nominal_ratio"] == pytest.approx(20.19, abs=0.01)
    assert 15.5 < summary["payload_ratio_up"] < 16
    assert 7.5 < summary["payload_ratio_down"] < 8
    up = 4 * 9610 * 30 / summary["payload_ratio_up"]
    assert summary["payload_bytes_up"] == pytest.approx(up)
    wire = summary["wire_bytes"]
    assert wire["total"] == 4 * wire["per_worker"] > 0
    assert len(summary["params_sha256"]) == 64
    assert "digits-terngrad" in done.err
    assert "test accuracy" in done.err

    (folder,) = tmp_path.iterdir()
    assert folder.name == f"digits-terngrad-{summary['config_hash']}"
    files = {path.name for path in folder.iterdir()}
    assert files == {
        "config.json",
        "metrics.jsonl",
        "metrics.parquet",
        "provenance.json",
        "summary.json",
    }
    assert json.loads((folder / "summary.json").read_text()) == summary
    table = pq.read_table(folder / "metrics.parquet")
    assert tuple(table.column_names) == METRIC_COLUMNS
    assert table.num_rows == len(Run(folder).records()) == 4

    provenance = summary["provenance"]
    assert provenance["versions"]["torch"] == torch.__version__
    assert {"command", "started", "finished", "commit", "machine"} <= set(provenance)
    again = invoke(*shlex.split(provenance["command"])[1:], "--results", tmp_path, "--json")
    assert "finished before, skipped" in again.err
    assert again.json == summary


def test_a_table_without_json(run):
    done = run("--compressor", "none,terngrad")
    assert done.code == 0
    assert "none" in done.out
    assert "terngrad" in done.out
    assert "gcbench compare" in done.err
    assert done.out.count("\n") < 8


def test_finished_runs_are_skipped_unless_forced(run, tmp_path):
    first = run("--json").json
    (folder,) = tmp_path.iterdir()
    before = content(tmp_path)
    second = run("--json")
    assert second.json == first
    assert "finished before, skipped (--force runs it again)" in second.err
    assert content(tmp_path) == before
    forced = run("--json", "--force")
    assert "skipped" not in forced.err
    assert forced.json["params_sha256"] == first["params_sha256"]
    assert forced.json["seconds"] != first["seconds"]
    assert len(list(tmp_path.iterdir())) == 1
    assert not (folder / "lock").exists()


def test_a_grid_is_a_list_and_goes_on_where_it_was(run, tmp_path):
    assert run("--seed", 1, "--compressor", "terngrad").code == 0
    done = run("--seed", "0,1", "--compressor", "none,terngrad", "--set", "clip=2.5,0", "--json")
    assert [(s["compressor_name"], s["seed"]) for s in done.json] == [
        ("none", 0),
        ("none", 1),
        *[("terngrad", seed) for seed in (0, 0, 1, 1)],
    ]
    assert len({summary["params_sha256"] for summary in done.json}) == 6
    assert "[6/6]" in done.err
    assert len(list(tmp_path.iterdir())) == 7  # no options and clip=2.5 are two configs


def test_a_file_of_settings(run, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("compressor: none\nlr: 5e-2\nsteps: 1000000\n")
    summary = run("--config", path, "--json").json
    assert summary["config"]["lr"] == 0.05
    assert (summary["compressor"], summary["steps"]) == ("NoCompression()", 12)


def test_listings():
    """One row a method: what the source quotes, and what four workers hand over and get back."""
    rows = {row["name"]: row for row in invoke("list", "compressors", "--json").json}
    terngrad = rows["terngrad"]
    assert terngrad["collectives"] == ["twoshot", "allreduce", "allgather"]
    assert terngrad["source"] == "built-in"
    assert terngrad["fields"]["clip"] == 2.5
    assert terngrad["paper"] == "Wen et al., NeurIPS 2017, arXiv:1705.07878"
    assert terngrad["nominal_bits"] == pytest.approx(1.585, abs=1e-3)
    assert terngrad["measured_bits"] == {"up": 2.007, "down": 4.007}
    assert (terngrad["two_way"], terngrad["unbiased"], terngrad["memory"]) == (True, True, "none")
    assert rows["none"]["measured_bits"] == {"up": 32.0, "down": 32.0}
    for row in rows.values():
        assert set(row["measured_bits"]) == {"up", "down"}
        assert 0 < row["measured_bits"]["up"] <= 32
    assert {row["name"] for row in invoke("list", "tasks", "--json").json} >= {"digits", "mnist"}
    assert invoke("list", "backends", "--json").json[0]["name"] == "reference"
    assert "terngrad" in invoke("list").out
    assert "backends" in invoke("info").out


def test_info_tells_what_can_run_here():
    document = invoke("info", "--json").json
    assert document["versions"]["torch"] == torch.__version__
    assert document["engines"]["spawn (gloo)"] == "available"
    usable = torch.distributed.is_nccl_available() and torch.cuda.is_available()
    assert (document["engines"]["spawn (nccl)"] == "available") == usable


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--task", "quadratik"], ["unknown task 'quadratik'", "'quadratic'", "Known: "]),
        (["--compressor", "tern"], ["unknown compressor 'tern'", "Known: "]),
        (["--set", "klip=2"], ["unknown field", "'klip'", "'clip'"]),
        (["--workers", "3"], ["batch 32 does not divide", "try --batch 33"]),
        (["--steps", "ten"], ["steps='ten'"]),
        (["--lr", "nan"], ["lr='nan'", "valid number"]),
        (["--set", "share=false", "--collective", "twoshot"], ["Legal: allgather"]),
        (["--config", "no/such.yaml"], ["no/such.yaml", "No such file"]),
        (["--device", "gpu"], ["device 'gpu'", "'cpu', 'cuda'"]),
        (["--batch", "2048", "--workers", "2"], ["batch 2048 is larger than the 1024"]),
    ],
)
def test_usage_errors_exit_with_2_and_one_line(run, tmp_path, words, parts):
    done = run(*words)
    refused(done, 2, "gcbench: usage: ", *parts)
    assert done.out == ""
    assert not list(tmp_path.glob("*/summary.json"))


@pytest.mark.parametrize("text", ["{}, ", ""])
@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("run --compressor none", "--compressor"),
        ("bandwidth --compressor int8", "--compressor"),
        ("bandwidth --collective allgather", "--collective"),
        ("bandwidth --plain all_reduce", "--plain"),
        ("bandwidth --sizes 4K", "--sizes"),
        ("predict --compressor int8", "--compressor"),
        ("predict --workers 8", "--workers"),
        ("predict --links --workers 8", "--workers"),
        ("advise --workers 8", "--workers"),
        ("histogram --compressor int8", "--compressor"),
        ("bounds --methods int8", "--methods"),
        ("netlab --bandwidth 1gbit -- run", "--bandwidth"),
        ("netlab --delay 1ms -- run", "--delay"),
        ("netlab --loss 1% -- run", "--loss"),
        ("netlab -- run --compressor none", "--compressor"),
        ("compare --columns accuracy", "--columns"),
    ],
)
def test_a_list_with_an_empty_item_is_refused(command, flag, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = command.split()
    place = words.index(flag) + 1
    words[place] = text.format(words[place])
    refused(invoke(*words), 2, f"gcbench: usage: {flag} {words[place]!r}: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there(run):
    refused(run("--device", "cuda"), 2, "device 'cuda': torch sees no CUDA device")


@pytest.mark.parametrize("words", [["--stepz", "3"], ["--checkpoint-seconds", "-1"], ["--steps"]])
def test_unknown_flags_exit_with_2(run, words):
    done = run(*words)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert words[0] in done.err


def test_no_command_shows_the_help_and_debug_the_traceback(gcbench, monkeypatch):
    monkeypatch.delenv("GCBENCH_DEBUG", raising=False)
    assert "Usage" in invoke("--help").out
    assert invoke("--version").out.startswith("gcbench 0.")
    done = gcbench("--debug", "run", "--task", "quadratik")
    assert done.code == 1
    assert "Traceback" in done.err
    assert "unknown task 'quadratik'" in done.err


def test_a_gradient_that_explodes(run, tmp_path):
    absurd = ("--lr", 1e30, "--compressor", "none")
    refused(run(*absurd), 1, "non-finite gradient in layer x of worker 0 at step", "Lower --lr")
    (folder,) = tmp_path.iterdir()
    document = json.loads((folder / "summary.json").read_text())
    assert document["failed"]["step"] == 2
    assert document["test_loss"] is None
    refused(run(*absurd), 1, "at step 2", "--force runs it again")
    summary = run(*absurd, "--on-nonfinite", "skip", "--json").json
    assert 0 < summary["skipped_steps"] < 12
    assert summary["test_loss"] is None  # infinite: JSON has no number for it
    sent = (12 - summary["skipped_steps"]) * 4 * summary["params"]
    assert summary["payload_bytes_up"] == sent + 12 * 4  # the workers agree at every step


def test_one_failure_of_a_grid_does_not_stop_the_others(run):
    done = run("--compressor", "none", "--lr", "1e30,0.1", "--json")
    assert done.code == 1
    (summary,) = json.loads(done.out)
    assert summary["config"]["lr"] == 0.1
    assert "non-finite gradient" in done.err


def test_missing_data_without_a_network(tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("GCBENCH_DATA", str(empty))
    done = invoke("run", "--task", "mnist", "--results", tmp_path / "runs")
    refused(done, 1, str(empty))
    assert list((tmp_path / "runs").iterdir()) == [], "`compare` would call it unfinished"


@pytest.mark.parametrize(
    ("error", "code"), [(GcbenchError("no data"), 1), (KeyboardInterrupt, 130)]
)
@pytest.mark.parametrize("finished", [True, False])
def test_force_keeps_the_earlier_results_until_the_first_step(
    tmp_path, monkeypatch, finished, error, code
):
    """`--force` with unreadable data, or Ctrl-C, loses neither a summary nor a checkpoint."""
    settings = ["run", "--task", "digits", "--steps", 6, "--log-every", 1, "--results", tmp_path]
    with monkeypatch.context() as patch:
        if not finished:
            patch.setattr("gcbench.training.train.Trainer._pause", lambda *_: "stop")
        assert invoke(*settings).code == (0 if finished else 130)
    (run,) = tmp_path.iterdir()

    def files():
        return {path.relative_to(run): path.read_bytes() for path in run.rglob("*.*")}

    before = files()
    assert Path("summary.json" if finished else "checkpoint.pt") in before

    def before_the_first_step(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("gcbench.training.train.Trainer.resume", before_the_first_step)
        assert invoke(*settings, "--force").code == code
        assert files() == before
        (run / "earlier").mkdir()  # as a process leaves it that was killed before its first step
        for name in before:
            (run / name).rename(run / "earlier" / name)
        (run / "provenance.json").write_text("{}")
        assert invoke(*settings, "--force").code == code
        assert files() == before
    assert invoke(*settings, "--force").code == 0
    assert not (run / "earlier").exists()
    assert (run / "summary.json").exists()


def test_a_run_that_fails_later_keeps_its_records(tmp_path, monkeypatch):
    settings = ("run", "--task", "digits", "--steps", "4", "--log-every", "1")

    def full_disk(*_):
        raise GcbenchError("no space left")

    monkeypatch.setattr("gcbench.training.store.Run.finish", full_disk)
    refused(invoke(*settings, "--results", tmp_path / "runs"), 1, "no space left")
    (run,) = (tmp_path / "runs").iterdir()
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 4


def test_a_run_from_python_looks_where_the_environment_says(tmp_path, monkeypatch):
    """`data_dir` counts more than GCBENCH_DATA, whose missing data set is named."""
    monkeypatch.setenv("GCBENCH_DATA", str(tmp_path / "named"))
    asked = {"task": "mnist", "steps": 2, "results": tmp_path / "runs"}
    for place, arguments in (("named", {}), ("given", {"data_dir": tmp_path / "given"})):
        (tmp_path / place).mkdir()
        with pytest.raises(GcbenchError, match=str(tmp_path / place)):
            run_from_python(**asked, **arguments)


def test_where_a_data_set_lies(tmp_path):
    asked = ("data", "path", "mnist", "--data-dir", tmp_path)
    assert invoke(*asked).out == f"{tmp_path / 'mnist'}\n"
    document = {"name": "mnist", "folder": str(tmp_path / "mnist"), "found": False}
    assert invoke(*asked, "--json").json == document
    (tmp_path / "mnist").mkdir()
    assert invoke(*asked, "--json").json == document | {"found": True}


def test_a_data_set_that_is_none(tmp_path):
    for command in ("get", "path"):
        done = invoke("data", command, "mnits", "--data-dir", tmp_path)
        refused(done, 2, "Did you mean 'mnist'? Known: cifar10, mnist, shakespeare.")


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_a_results_folder_that_cannot_be_made(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    done = invoke("run", *QUICK, "--results", tmp_path / below)
    refused(done, 1, "cannot write", "choose another folder with --results")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("nbytes", "file", "words"),
    [
        (100, "config.json", ()),
        (2500, "metrics.jsonl", ("--log-every", 1, "--steps", 100)),
        (2500, "checkpoint.pt", ("--checkpoint-seconds", 0)),
    ],
)
def test_a_full_disk_loses_nothing(run, tmp_path, nbytes, file, words):
    finished = run("--compressor", "none", "--json").json
    before = content(tmp_path)
    with files_of_at_most(nbytes):
        done = run(*words)
    refused(done, 1, "cannot write", f"{file}: File too large", "--results")
    after = content(tmp_path)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if name.endswith(".part")]
    assert run("--compressor", "none", "--json").json == finished
    whole = run(*words, "--json").json
    (metrics,) = tmp_path.glob("*terngrad*/metrics.jsonl")
    records = Run(metrics.parent).records()
    assert len(records) == len(metrics.read_text().splitlines())
    assert records[-1]["step"] == whole["steps"]


def test_a_checkpoint_survives_a_disk_that_fills_later(run, tmp_path):
    steps = ("--steps", 80, "--log-every", 1, "--checkpoint-seconds", 0)
    with files_of_at_most(13_500):
        refused(run(*steps), 1, "metrics.jsonl: File too large")
    (path,) = tmp_path.glob("*/checkpoint.pt")
    step = Run(path.parent).checkpoint()["step"]
    assert 10 < step < 80
    done = run(*steps, "--json")
    assert "resuming from checkpoint" in done.err
    assert [r["step"] for r in Run(path.parent).records() if "lr" in r] == list(range(1, 81))


# -- damaged folders -------------------------------------------------------------------------------


LONGER = ("--steps", 80, "--log-every", 1)


@pytest.fixture(scope="module")
def failed(tmp_path_factory) -> Path:
    """Make a run that failed and left a checkpoint; return its folder."""
    results = tmp_path_factory.mktemp("failed")
    with files_of_at_most(13_500):
        invoke("run", *QUICK, "--results", results, *LONGER, "--checkpoint-seconds", 0)
    (folder,) = results.iterdir()
    assert (folder / "checkpoint.pt").exists()
    return folder


@pytest.fixture
def interrupted(failed, tmp_path) -> Path:
    """Return a copy of the failed run among the results of `run`."""
    return Path(shutil.copytree(failed, tmp_path / failed.name))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"12"])
def test_a_corrupt_summary(run, tmp_path, text):
    expected = run("--json").json
    (path,) = tmp_path.glob("*/summary.json")
    path.write_bytes(text)
    refused(run(), 1, str(path), "run again with --force")
    assert path.read_bytes() == text
    assert run("--force", "--json").json["params_sha256"] == expected["params_sha256"]


@pytest.mark.parametrize("name", ["checkpoint.pt", "config.json", "provenance.json"])
@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_a_damaged_interrupted_run(run, interrupted, tmp_path, name, damage):
    path = interrupted / name
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"\x80\x04noise")
    if name == "checkpoint.pt":  # the one before it serves, unless it is damaged, too
        (interrupted / "checkpoint.previous.pt").write_bytes(b"")
    before = content(tmp_path)
    refused(run(*LONGER), 1, str(path), "cannot be read", "with --force")
    assert content(tmp_path) == before
    assert run(*LONGER, "--force").code == 0


@pytest.mark.parametrize("state", [{}, {"step": 3, "parameters": [], "ema": []}])
def test_a_checkpoint_of_something_else(run, interrupted, state):
    Run(interrupted).save(state)
    refused(run(*LONGER), 1, "does not match this run", "--force")


def test_a_checkpoint_of_an_older_gcbench(run, interrupted):
    """A setting that is missing there has its default; with another value the run starts over."""
    path, steps = interrupted / "config.json", []
    config = json.loads(path.read_text())
    for stored in ({**config, "hook": "torch"}, {k: config[k] for k in config if k != "hook"}):
        copy = Path(shutil.copytree(interrupted, interrupted.with_name("copy")))
        path.write_text(json.dumps(stored))
        done = run(*LONGER)
        assert done.code == 0
        assert "checkpoint" in done.err
        steps.append("starts over at step 0" in done.err)
        shutil.rmtree(interrupted)
        copy.rename(interrupted)
    assert steps == [True, False]


def test_a_folder_that_another_process_writes(run, tmp_path):
    assert run().code == 0
    (folder,) = tmp_path.iterdir()
    with Run(folder).locked():
        before = content(tmp_path)
        refused(run("--force"), 1, "is being written by another gcbench process; wait for it")
        assert content(tmp_path) == before
    assert run("--force").code == 0


def test_the_file_of_a_lock_holds_nobody(run, tmp_path):
    assert run().code == 0
    (folder,) = tmp_path.iterdir()
    (folder / "lock").touch()  # what a killed process leaves
    assert run("--force").code == 0


def test_a_run_that_was_cut_in_the_middle_of_a_line(run, interrupted):
    with (interrupted / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "train", "st\xff')
    assert run(*LONGER).code == 0
    assert [r["step"] for r in Run(interrupted).records() if "lr" in r] == list(range(1, 81))


def test_an_unexpected_error_is_one_line_too(run, monkeypatch):
    class Buggy(Compressor):
        def encode(self, x, ctx):
            raise ZeroDivisionError("first\nsecond")

        def decode(self, payload, ctx):
            raise NotImplementedError

    entry = registry.Entry("buggy", "test", lambda: Buggy)
    monkeypatch.setitem(registry.compressors(), "buggy", entry)
    refused(run("--compressor", "buggy"), 1, "ZeroDivisionError: first", "--debug")


# -- verify ----------------------------------------------------------------------------------------


def test_verify_prints_a_table_and_its_exit_code_is_the_verdict(monkeypatch):
    monkeypatch.setattr(verify, "process_state", lambda: None)
    for name in ("searched", "listed", "_memory_rows"):  # once for both formats
        monkeypatch.setattr(verify, name, functools.cache(getattr(verify, name)))
    done = invoke("verify", "none", "--no-processes", "--details")
    assert done.code == 0
    for word in ("check", "measured", "bound", "verdict", "corrupt payloads", "holds"):
        assert word in done.out
    assert re.search(r"^none: \d+ hold, 0 fail, \d+ not declared$", done.err, re.MULTILINE)
    rows = invoke("verify", "none", "--no-processes", "--json").json
    assert {row["configuration"] for row in rows} == {"default"}
    names = [row["check"] for row in rows]
    assert names[: len(properties.CHECKS)] == list(properties.CHECKS)
    others = names[len(properties.CHECKS) :]
    searched = {n.removeprefix("search: ") for n in others if n.startswith("search: ")}
    assert {"encode", "decode", "mean", "merge", "decode_sum"} <= searched <= {*FUNCTIONS}
    assert all(name.startswith(("search: ", "memory: ")) for name in others)


def test_verify_takes_fields_as_other_commands_do(monkeypatch):
    """topk:ratio=0.1 was an unknown compressor."""
    asked = []
    monkeypatch.setattr(verify, "verify", lambda *words, **_: asked.append(words) or iter([]))
    invoke("verify", "topk:ratio=0.1", "--set", "values=range")
    assert asked == [("topk", {"ratio": 0.1, "values": "range"})]
    done = invoke("verify", "topk:ratio=0.1", "--set", "ratio=0.2")
    assert (done.code, len(asked)) == (2, 1)
    assert "ratio" in done.err


def test_verify_answers_in_25_lines_of_80_columns(capsys):
    """Ten configurations, and every function that one method may have: not both of the last two."""
    functions = FUNCTIONS[:-1]
    largest = Covered(13_966, 17_346_000, 40_000, 1_500, 2**32 - 1, -126, 127)
    covered = dict.fromkeys(functions, largest)
    rows = [{"configuration": "a", "check": "b", "verdict": "holds"}] * 30
    results = [verify.Verified("a=1 b=2", rows, covered, 3000, 1.0, 0)] * 10
    listings.show_verified(results, verify.together(results))
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 25
    assert max(map(len, out.splitlines())) <= 80
    assert all(function in out for function in functions)


def test_verify_shows_each_configuration_before_it_is_checked(monkeypatch):
    name, checks = "bf16", ("buffers", "unbiased")
    result = SimpleNamespace(holds=True, measured=1, bound=1, note="")
    choices = {check: lambda method: result for check in checks}
    monkeypatch.setattr(properties, "CHECKS", choices)
    search = SimpleNamespace(covered={}, findings=[], inputs=0, left_out=0, run=list)
    monkeypatch.setattr(verify, "Search", lambda method, effort, before: search)
    monkeypatch.setattr(verify, "_memory_rows", lambda method, carried: [])
    texts = [text or "default" for text, _ in properties.configurations(name)]
    assert len(texts) > 1
    words = ("verify", name, "--no-processes")
    quiet, plain = (invoke(*words, "--progress", how) for how in ("none", "plain"))
    assert quiet.code == plain.code == 0
    assert quiet.err.startswith(f"{name}: ")
    assert ", 0 fail, " in quiet.err
    shown = [
        f"verify {name}  {i}/{len(texts)}  2 checks and a search of {t}"
        for i, t in enumerate(texts)
    ]
    assert plain.err.splitlines() == [*shown, *quiet.err.splitlines()]
    document = [
        invoke(*words, "--json", "--progress", how).json for how in ("none", "plain", "bar")
    ]
    assert document[0] == document[1] == document[2]


def test_verify_refuses_what_it_cannot_check():
    refused(invoke("verify", "nune"), 2, "Did you mean 'none'?")
    refused(invoke("verify", "none", "--set", "a=1"), 2, "has no fields")
    refused(invoke("verify", "terngrad", "--set", "clip=1,2"), 2, "verify takes no grid")


# -- words, files, completion, the time of a grid --------------------------------------------------


def test_compare_shows_the_files_that_it_reads_if_that_takes_long(tmp_path, monkeypatch):
    from gcbench.core import progress

    for name in ("a", "b"):
        write(tmp_path, summary("none" if name == "a" else "topk", 0))
    folders = sorted(path.name for path in tmp_path.iterdir())
    silent = invoke("compare", tmp_path, "--progress", "plain")
    assert silent.code == 0
    assert "reading" not in silent.err, "it took less than a second"
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    shown = invoke("compare", tmp_path, "--progress", "plain")
    assert shown.out == silent.out
    document = [line.split("  ") for line in shown.err.splitlines() if line.startswith("compare")]
    assert [line[:3] for line in document] == [
        ["compare", f"{i}/2", f"reading {name}"] for i, name in enumerate(folders)
    ]
    quiet = invoke("compare", tmp_path, "--progress", "none")
    assert (quiet.out, quiet.err) == (silent.out, silent.err)
    documents = [invoke("compare", tmp_path, "--json", "--progress", how).json for how in HOW]
    assert all(document == documents[0] for document in documents)


HOW = ("auto", "bar", "plain", "none")


@pytest.mark.parametrize(
    "command",
    [
        *(["run"], ["compare"], ["verify"], ["data", "get"], ["advise"], ["bandwidth"], ["bounds"]),
        *(["histogram"], ["predict"]),
    ],
)
def test_what_may_take_long_has_progress(command):
    method = ["none"] * (command[-1] in ("verify", "get"))
    done = invoke(*command, *method, "--progress", "x")
    assert done.code == 2
    assert "'x' is not one of 'auto', 'bar', 'plain', 'none'" in done.err


COMMANDS = [
    *([], ["run"], ["compare"], ["verify"], ["list"], ["info"], ["kernels"], ["histogram"]),
    *(["bounds"], ["bandwidth"], ["predict"]),
    *(["advise"], ["report"], ["data"], ["data", "get"]),
]


def broken_words(command, width, monkeypatch):
    """Return the words of a command's help that a width breaks or cuts."""

    def words(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERMINAL_WIDTH", str(columns))
        done = invoke(*command, "--help")
        assert done.code == 0
        return set(done.out.split())

    return words(width) - words(1000)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: "-".join(words) or "gcbench")
def test_help_breaks_no_word(command, width, monkeypatch):
    assert broken_words(command, width, monkeypatch) == set()


def test_a_broken_word_is_found(monkeypatch):
    from gcbench.commands import helptext

    def by_letters(text, width, indent=""):
        return "\n".join(text[at : at + 20] for at in range(0, len(text), 20))

    wrapped = helptext.wrapped
    monkeypatch.setattr(
        helptext, "wrapped", lambda t, w, i="": by_letters(t, w) if w < 100 else wrapped(t, w, i)
    )
    assert broken_words(["run"], 60, monkeypatch)


MINE = """
from dataclasses import dataclass

import torch

import gcbench


@dataclass(frozen=True)
class Halves(gcbench.Compressor):
    most: float = 65504.0

    def encode(self, x, ctx):
        return x.clamp(-self.most, self.most).half()

    def decode(self, payload, ctx):
        return gcbench.check_finite(payload.parts[0].float())

    def layout(self, segments, count=1):
        return ((torch.float16, segments.numel),)
"""


@pytest.fixture
def mine(tmp_path, forget):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.mark.usefixtures("forked")
def test_a_compressor_may_be_a_file(mine, tmp_path):
    """In the grid, with a field, in real processes; its row names the file that makes it again."""
    words = ["--steps", 3, "--workers", 2, "--progress", "none", "--results", tmp_path / "r"]
    rows = invoke("run", "--compressor", f"none,{mine}:most=2.0", *words, "--json").json
    assert [row["compressor_name"] for row in rows] == ["none", "mine"]
    assert rows[1]["compressor"] == "Halves(most=2.0)"
    assert rows[1]["payload_ratio_up"] == 2
    assert f"--compressor {mine} " in rows[1]["provenance"]["command"]
    real = invoke("run", "--compressor", mine, "--engine", "spawn", *words, "--json")
    assert real.json["payload_ratio_up"] == 2
    done = invoke("verify", mine, "--no-processes")
    assert done.err.startswith("mine: ") or "mine: " in done.err
    from gcbench.training import methods

    assert repr(methods.parse(f"{mine}:most=1.0")) == "Halves(most=1.0)"
    for created in (get_compressor(str(mine), most=1.0), stages(str(mine), {"most": 1.0})[0]):
        assert repr(created) == "Halves(most=1.0)"


def test_rows_of_a_file_serve_in_another_folder(mine, forget, tmp_path, monkeypatch):
    """They name no folder of the machine that made them, and are known to be of the same source."""
    words = ["run", "--compressor", "./mine.py", "--steps", 3, "--workers", 2]
    words += ["--progress", "none", "--rows", "rows.parquet"]
    monkeypatch.chdir(tmp_path)
    created = invoke(*words, "--json").json["provenance"]
    assert "--compressor ./mine.py " in created["command"]
    assert created["plugins"]["compressor"]["distribution"] == "file mine.py"
    assert str(tmp_path) not in json.dumps(created)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("mine.py", "rows.parquet"):
        (tmp_path / name).rename(elsewhere / name)
    monkeypatch.chdir(elsewhere)
    for change, code, message in (
        ("", 0, "its row is in rows.parquet, skipped"),
        ("# mended", 1, "was made with another compressor: file mine.py (source "),
    ):
        with open("mine.py", "a") as file:
            file.write(change)
        forget()
        done = invoke(*words)
        assert done.code == code
        assert message in done.err
    (option,) = re.findall(r"another (--\w+) ", done.err)
    assert invoke(*words, option, "other.parquet").code == 1, "the row is still in the first file"
    words[words.index(option) + 1] = "other.parquet"
    assert invoke(*words).code == 0


def test_a_suite_names_and_chooses_the_file_of_a_compressor(mine, tmp_path):
    """`--compressor ./mine.py` chooses the suite's run of that file, and its name does, too."""
    suite = tmp_path / "own.yaml"
    suite.write_text(
        "title: own\nsource: own\nplace: a table\ndiffers: nothing.\n"
        f"config: {{task: digits, steps: 2}}\nentries:\n"
        f"  - config: {{compressor: [none, {mine}]}}\n"
    )
    words = ["--progress", "none", "--results", tmp_path / "r", "--json"]
    by_file = invoke("run", "--suite", suite, "--compressor", mine, *words).json
    by_name = invoke("run", "--suite", suite, "--compressor", "mine", *words).json
    assert by_file["compressor"] == by_name["compressor"] == "Halves(most=65504.0)"


def test_settings_tell_a_changed_method_from_the_one_before(mine, forget):
    """Of a file, and of a built-in method: the digest is that of its own file."""
    from gcbench.profile.bandwidth import settings
    from gcbench.training import methods

    def created() -> dict[str, str]:
        arguments = dict.fromkeys(("collectives", "plain", "engine", "threads"))
        words = f"topk,{mine}:most=2.0"
        return settings.make(compressors=words, sizes=(4096,), workers=2, **arguments).sources

    before = created()
    assert before == methods.sources(methods.all_of(f"topk,{mine}:most=2.0"))
    source = Path(sys.modules["gcbench.compressors.topk"].__file__).read_bytes()
    assert before["topk"] == hashlib.sha256(source).hexdigest()[:10]
    mine.write_text(MINE.replace("self.most)", "self.most / 2)"))
    forget()
    after = created()
    assert after["topk"] == before["topk"]
    assert after[f"{mine}:most=2.0"] != before[f"{mine}:most=2.0"]


def test_files_that_are_no_compressor(mine, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    two = tmp_path / "two.py"
    two.write_text(MINE + MINE.replace("Halves", "Others").replace("import", "import", 1))
    taken = tmp_path / "topk.py"
    taken.write_text(MINE)
    renamed = tmp_path / "renamed.py"
    renamed.write_text(MINE.replace("    most:", '    name = "int8"\n    most:'))
    strange = tmp_path / "a b.py"
    strange.write_text(MINE)
    for path, code, message in [
        (tmp_path / "gone.py", 2, "no such file"),
        (taken, 2, "the name 'topk' is taken by built-in; rename the file"),
        (strange, 2, "letters, digits, _ and -"),
        (two, 1, "defines Halves, Others"),
        (renamed, 1, "its class Halves sets name = 'int8'"),
        (broken, 1, "cannot be loaded: ZeroDivisionError"),
    ]:
        refused(invoke("run", "--compressor", path, "--steps", 1), code, message)


def test_a_class_has_one_name():
    """The message had blamed a `name` that the registry itself had set."""
    from gcbench.core import registry
    from gcbench.core.errors import GcbenchError

    entry = registry.compressors()["int8"]
    entries = {"int8": entry, "eight": entry}
    registry.named("compressor", entries, "int8")
    with pytest.raises(GcbenchError, match="is registered as 'int8', too"):
        registry.named("compressor", entries, "eight")


def test_a_compressor_brings_its_fields(tmp_path):
    from gcbench.training import grid

    result = grid.expand(
        {
            **{"options": {}, "task_options": {}, "memory_options": {}},
            "compressor": ["topk:ratio=0.05", "topk:ratio=0:0.25/100:0.01", "none"],
        },
        None,
    )
    assert [config.options for config in result] == [
        {"ratio": 0.05},
        {"ratio": {0: 0.25, 100: 0.01}},
        {},
    ]
    refused(
        invoke("run", "--compressor", "topk:ratio=0.1", "--set", "ratio=0.2"), 2, "give it once"
    )
    refused(invoke("run", "--compressor", "topk:rat=0.1"), 2, "Did you mean 'ratio'?")
    refused(invoke("run", "--compressor", "topk:0.1"), 2, "expected NAME=VALUE")


def test_the_shell_completes_names(monkeypatch):
    from gcbench import commands
    from gcbench.cli import app

    assert "terngrad" in commands.completed("compressors")("ter")
    assert commands.completed("compressors")("none,ter") == ["none,terngrad"]
    assert commands.completed("tasks")("dig") == ["digits"]
    assert "main" in commands.completed("suites")("ma")
    for word, completed in (("dig", ["digits"]), ("nosuch", [])):
        monkeypatch.setenv("_GCBENCH_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", f"gcbench run --task {word}")
        monkeypatch.setenv("COMP_CWORD", "3")
        done = invoke(main=lambda: app(prog_name="gcbench"))
        assert done.out.split() == completed


def test_the_time_of_a_grid_is_announced(monkeypatch, capsys, run):
    """Once, some seconds after the first step; by hand: 2 s a step, 8 and 18 steps left."""
    from gcbench.core import progress

    seconds = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds[0])
    shown = progress.observer("plain", "a-run", 12, after=10)
    for step in range(1, 13):
        shown.step(step)
        seconds[0] += 2.0
    document = [line for line in capsys.readouterr().err.splitlines() if "of the grid" in line]
    assert len(document) == 1
    assert "about 0:00:16 left of this run, 0:00:36 of the grid (10 steps after it)" in document[0]
    assert isinstance(progress.observer("plain", "alone", 12), progress.Plain)
    monkeypatch.undo()
    done = run("--compressor", "none,terngrad", "--steps", 7)
    assert "2 runs, 14 steps in total" in done.err
    assert "runs, " not in run("--compressor", "none,terngrad", "--steps", 7).err


def test_progress_ends_at_its_end(monkeypatch, capsys):
    from gcbench.core import progress

    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    plain = progress.Plain("x", 10)
    plain.step(3, "a")
    plain.step(12, "b")
    plain.record({"kind": "train", "step": 13, "train_loss": 1.0})
    message = capsys.readouterr().err
    assert "3/10" in message
    assert message.count("10/10") == 2
    assert "-1 day" not in message
    bar = progress.Bar("x", 10)
    bar.step(12)
    assert bar.bar.tasks[0].completed == 10
    bar.close()
