"""Labs with real namespaces, links and torchrun; skipped where they cannot be created."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import invoke

from gcbench.core.errors import GcbenchError, UsageError
from gcbench.netlab import Settings, launcher, split, summarize
from gcbench.netlab.links import parse_delay, parse_rate

RUN = ("run", "--task", "quadratic", "--steps", "40", "--batch", "4")
PATIENCE = 60.0
"""Seconds until a lab that should have ended counts as left behind."""


@pytest.fixture(scope="module")
def lab():
    """Skip where this machine cannot create a lab."""
    try:
        launcher.isolate()
    except UsageError as error:
        pytest.skip(str(error))


def job(*arguments: object, rate: float | None = 1e8, nodes: int = 2) -> dict[str, object]:
    place = {"nodes": nodes, "workers_per_node": 1}
    link = {"bits_per_second": rate, "delay": 0.0, "loss": 0.0}
    return {**place, **link, "arguments": list(map(str, arguments))}


def processes(marker: str) -> list[int]:
    """Return the PIDs of processes with this text in their command line."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return [pid for pid in pids if pid != os.getpid()]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("text", "rate"), [("100mbit", 1e8), ("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("unlimited", None)]
)
def test_rates(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "100", "0mbit", "-1mbit", "fast", "1mb"])
def test_a_wrong_rate_is_refused(text):
    with pytest.raises(UsageError, match="--bandwidth"):
        parse_rate(text)


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("5ms", 0.005), ("50us", 5e-5)])
def test_delays(text, seconds):
    assert parse_delay(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "words",
    [[], ["compare"], ["run", "--workers", "4"], ["run", "--json"], ["run", "--capture=0"]],
)
def test_a_command_that_the_lab_cannot_run_is_refused(words):
    with pytest.raises(UsageError):
        split(words)


def test_the_compressors_are_taken_out_of_the_command():
    assert split(["run", "--compressor", "none,topk:ratio=0.1", "--lr", "1"]) == (
        ["none", "topk:ratio=0.1"],
        ["--lr", "1"],
    )


def test_the_compressors_are_those_of_the_config_without_the_flag(tmp_path):
    """They were terngrad whatever the file said, and its workers were those of the lab."""
    file = tmp_path / "c.yaml"
    for text, compressors in (
        ("lr: 1", ["terngrad"]),
        ("compressor: topk:ratio=0.1", ["topk:ratio=0.1"]),
        ("compressor: [none, topk]", ["none", "topk"]),
    ):
        file.write_text(text)
        for words in (["--config", str(file)], [f"--config={file}"]):
            assert split(["run", *words]) == (compressors, words)
            assert split(["run", "--compressor", "int8", *words]) == (["int8"], words)
    file.write_text("workers: 8")
    with pytest.raises(UsageError, match="workers"):
        split(["run", "--config", str(file)])


def test_workers_that_do_not_fit_the_nodes_are_refused():
    for words in (
        ["--workers", "3", "--workers-per-node", "2"],
        ["--nodes", "2", "--workers", "3"],
    ):
        done = invoke("netlab", *words, "--", *RUN)
        assert done.code == 2, done
        assert "3" in done.err


def test_the_table_compares_with_fp32_and_bf16_on_the_same_link():
    settings = Settings(
        bandwidth=["100mbit"], compressors=["none", "bf16", "terngrad"], arguments=[]
    )
    record = {
        "achieved": 9.5e7,
        "round_trip": 1e-4,
        "communicate_seconds": 0.01,
        "counted_bytes": 1448_000,
        "interface_bytes": 1514_000,
        "test_accuracy": 0.5,
        "seconds": 1.0,
        "steps": 10,
        "params_sha256": "",
    }
    seconds = {"none": 0.8, "bf16": 0.4, "terngrad": 0.2}
    records = {
        f"100 Mbit/s/{name}": {**record, "step_seconds": value} for name, value in seconds.items()
    }
    rows = {row["method"]: row for row in summarize(settings, "", records).table("steps").rows}
    assert [rows[name]["over_fp32"] for name in seconds] == pytest.approx([1, 2, 4])
    assert [rows[name]["over_bf16"] for name in seconds] == pytest.approx([0.5, 1, 2])
    assert rows["none"]["excess"] == pytest.approx(0)

    shared = settings.model_copy(update={"workers_per_node": 2})
    assert {row["excess"] for row in summarize(shared, "", records).table("steps").rows} == {None}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--seed", "0,1"), "--seed 0,1"),
        (("--stesp", "3"), "--stesp"),
        (("steps", "3"), "steps"),
        (("--batch", "many"), "many"),
        (("--optimizer", "lion"), "lion"),
        (("--set", "clip=2"), "clip"),  # of terngrad alone
        (("--network", "a", "--task-set", "network=b"), "--network"),
    ],
)
def test_what_run_refuses_or_makes_several_runs_of_needs_no_lab(words, error, monkeypatch):
    monkeypatch.setattr(launcher, "measure", pytest.fail)
    done = invoke("netlab", "--", *RUN, "--compressor", "terngrad,bf16", *words)
    assert done.code == 2, done
    assert error in done.err


def test_a_finished_lab_is_repeated_only_with_force_or_other_files(monkeypatch, tmp_path):
    jobs = []
    summary = {"step_seconds": 1.0, "phase_seconds": {"communicate": 0.5}, "steps": 2}
    summary |= {"wire_bytes": {"total": 9}, "seconds": 2.0, "params_sha256": ""}
    record = {"link": {"bits_per_second": 1e8, "round_trip": 1e-4}, "sent": [9, 9]}
    monkeypatch.setattr(launcher, "isolate", lambda: ())
    measure = lambda job: jobs.append(job) or {**record, "summary": summary}  # noqa: E731
    monkeypatch.setattr(launcher, "measure", measure)
    config = tmp_path / "c.yaml"
    words = ("netlab", "--bandwidth", "1gbit", "--results", tmp_path / "a")

    def measured(*more):
        before = len(jobs)
        done = invoke(*words, *more, "--", *RUN, "--compressor", "none,bf16", "--config", config)
        assert done.code == 0, done
        return len(jobs) - before

    config.write_text("lr: 0.1")
    assert [measured(), measured("--details"), measured("--force")] == [2, 0, 2]
    config.write_text("lr: 0.2")
    assert [measured(), measured("--json")] == [2, 0]
    memory = tmp_path / "held.py"
    code = 'from gcbench import Memory\n\n\nclass Held(Memory):\n    name = "held"\n'
    memory.write_text(code)
    config.write_text(f"memory: {memory}")
    assert [measured(), measured()] == [2, 0]
    memory.write_text(f"{code}    # edited\n")
    assert measured() == 2


@pytest.mark.parametrize("script", ["measure", "tables"])
@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("method", 2)])
def test_a_wrong_word_measures_nothing_and_help_shows_the_commands(
    script, word, code, monkeypatch, capsys
):
    folder = Path(__file__).parents[2] / "results/netlab"
    before = sorted(filter(Path.is_file, folder.iterdir()))
    monkeypatch.setattr(launcher, "measure", lambda job: pytest.fail("measured"))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", word])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(folder / f"{script}.py"), run_name="__main__")
    assert ended.value.code == code
    done = capsys.readouterr()
    assert "methods" in done.out + done.err
    assert sorted(filter(Path.is_file, folder.iterdir())) == before


@pytest.fixture
def measuring(tmp_path, monkeypatch):
    """results/netlab/measure.py in an empty folder; a measurement is the number of them so far."""
    folder = Path(__file__).parents[2] / "results/netlab"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "tables", raising=False)
    spec = importlib.util.spec_from_file_location("measure", folder / "measure.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delitem(sys.modules, "tables")
    count = itertools.count(1)
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "measure", lambda *_: {"number": next(count)})
    return module


def test_a_measurement_that_cannot_be_written_leaves_the_others(measuring, tmp_path):
    measuring.collect("methods", ["50mbit"])
    file = tmp_path / "methods.json"
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises((GcbenchError, OSError)):
            measuring.collect("methods", ["100mbit"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before
    measuring.collect("methods", ["100mbit"])
    records = json.loads(file.read_text())["records"]
    assert len(records) == 2 * len(json.loads(before)["records"])
    assert records.items() >= json.loads(before)["records"].items()


def test_measurements_of_two_machines_are_not_mixed(measuring, tmp_path, monkeypatch):
    file = tmp_path / "transport.json"
    measuring.collect("transport", ["50mbit"])
    before = file.read_text()
    monkeypatch.setattr(measuring.configuration, "machine", lambda: {"cpu": "another"})
    measuring.collect("transport", ["50mbit"])  # nothing is missing
    with pytest.raises(GcbenchError, match="another"):
        measuring.collect("transport", ["100mbit"])
    assert file.read_text() == before


def test_two_processes_that_measure_write_one_after_the_other(measuring, tmp_path):
    thread = threading.Thread(target=measuring.collect, args=("transport", ["50mbit"]))
    with measuring.locked():
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert not (tmp_path / "transport.json").exists()
    thread.join()
    assert len(json.loads((tmp_path / "transport.json").read_text())["records"]) == 4


def test_each_link_has_a_name_of_its_own_and_is_measured_once():
    settings = Settings(
        bandwidth=["100mbit", "0.1gbit"],
        delay=["0", "5ms"],
        loss=[0.0, 0.0001, 0.00011],
        compressors=["none"],
        arguments=[],
    )
    names = [link.name for link in settings.links()]
    assert len(set(names)) == len(names) == 6


def test_the_link_has_its_rate_and_the_interfaces_confirm_the_counted_bytes(
    lab, tmp_path, monkeypatch
):
    """64 KiB of gradients in 40 steps; the rest is headers, rendezvous and evaluation."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    words = ("--compressor", "none", "--workers", "2", "--results", tmp_path, "--json")
    record = launcher.measure(job(*RUN, *words, "--task-set", "dimension=16384"))
    assert 0.7e8 < record["link"]["bits_per_second"] < 1.1e8
    counted = record["summary"]["wire_bytes"]["total"]
    assert counted <= sum(record["sent"]) < 1.1 * counted + 500_000
    assert list(scratch.iterdir()) == []


def test_two_nodes_of_two_workers_and_engine_ddp(lab, tmp_path):
    done = invoke(
        *("netlab", "--nodes", "2", "--workers-per-node", "2", "--bandwidth", "unlimited"),
        *("--results", tmp_path, "--json", "--", *RUN, "--compressor", "none", "--engine", "ddp"),
    )
    (row,) = done.json["tables"][0]["rows"]
    assert row["steps"] == 40
    assert row["interface_bytes"] > 0


def test_a_job_that_fails_names_its_node_and_error(lab, tmp_path):
    words = ("--compressor", "none", "--workers", "5", "--results", tmp_path)
    with pytest.raises(GcbenchError, match="5 workers"):
        launcher.measure(job(*RUN, *words))


def test_nothing_is_left_of_labs_whose_launchers_are_killed_or_interrupted(lab, tmp_path):
    """Two labs run side by side, with the same addresses."""
    code = "import json, sys; from gcbench.netlab import launcher; "
    code += "launcher.measure(json.loads(sys.argv[1]))"
    words = ("--compressor", "none", "--workers", "2", "--steps", "100000000", "--results")
    launchers = {}
    for number in (signal.SIGKILL, signal.SIGINT):
        marker = str(tmp_path / number.name)
        long = json.dumps(job("run", "--task", "quadratic", *words, marker))
        command = [sys.executable, "-c", code, long]
        launchers[number, marker] = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _, marker in launchers:
            wait_until(lambda marker=marker: len(processes(marker)) >= 5)
            # the launcher, unshare, the inside, two agents
        for (number, marker), process in launchers.items():
            assert process.poll() is None
            process.send_signal(number)
            process.wait(PATIENCE)
            wait_until(lambda marker=marker: not processes(marker))
    finally:
        for process in launchers.values():
            process.kill()


def test_a_system_without_namespaces_is_named(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="darwin"):
        launcher.isolate()
