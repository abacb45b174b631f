"""Processes that work together: no door open, no orphan, and the one that failed is named."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import crew
import preloaded
import pytest
import torch
import torch.distributed as dist
from commands import PATIENCE, end, invoke, members, start, wait_for
from safetensors import SafetensorError

from gcbench.core.errors import DivergedError, GcbenchError, Interrupted, PeerLostError, UsageError
from gcbench.core.world import from_bytes, to_bytes
from gcbench.training import captures, engines, fork_server, launch
from gcbench.training import rank as ranks
from gcbench.training.rank import Rank
from gcbench.training.train import Options

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def run_words(results: Path, *more: object, workers: int = 2) -> tuple:
    words = (
        "--task",
        "quadratic",
        "--workers",
        workers,
        "--log-every",
        1,
        "--checkpoint-seconds",
        0,
    )
    return "run", *words, "--progress", "none", "--results", results, "--json", *more


def records(results: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in results.glob("*/metrics.jsonl"))


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def launching(session: int) -> list[tuple[int, list[str]]]:
    """Return (pid, arguments) of the processes of a session that run the workers' script."""
    result = []
    for pid in members(session):
        with contextlib.suppress(OSError):  # ended meanwhile
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if fork_server.__file__ in words:
                result.append((pid, words[words.index(fork_server.__file__) + 1 :]))
    return result


def workers(session: int) -> list[list[str]]:
    """Return [pid, folder, rank] of the local workers of a session, by rank."""
    names = {}
    for pid, words in launching(session):
        with contextlib.suppress(OSError):
            names[Path(f"/proc/{pid}/comm").read_text().strip()] = str(pid), words[0]
    ranks = [rank for rank in range(len(names)) if fork_server.name_of_worker(rank) in names]
    return [[*names[fork_server.name_of_worker(rank)], str(rank)] for rank in ranks]


# -- the launcher ----------------------------------------------------------------------------------


def test_each_worker_knows_its_place_and_hears_no_terminal():
    words = ["one", 2.5, None, {"three": [3]}]
    result = launch.in_processes(3, 2, crew.tell, words)
    assert [each["member"] for each in result] == [[0, 3, 0, 3], [1, 3, 1, 3], [2, 3, 2, 3]]
    assert all(each["words"] == words for each in result)
    for rank, each in enumerate(result):
        assert each["environment"] == {
            "RANK": str(rank),
            "OMP_NUM_THREADS": "2",
            "GLOO_SOCKET_IFNAME": launch.LOOPBACK,
        }
        assert each["mode"] == oct(0o40700)
        assert each["blocked"] == [signal.SIGHUP, signal.SIGINT]
        assert not Path(each["folder"]).exists()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("exit", GcbenchError, "worker 1 ended with exit code 7 and without a report"),
        ("kill", GcbenchError, "worker 1 was ended by SIGKILL: often out of memory"),
        ("late", GcbenchError, "worker 1 was ended by SIGKILL: often out of memory"),
        ("after", GcbenchError, "worker 1 was ended by SIGKILL: often out of memory"),
        ("leave", GcbenchError, "worker 1: SystemExit(3)"),
        ("known", GcbenchError, "worker 1 has something to say"),
        ("usage", UsageError, "worker 1 cannot do this"),
        ("diverged", DivergedError, "not finite in worker 1 at step 4"),
        ("unknown", GcbenchError, "worker 1: ValueError('not me')"),
        ("interrupted", Interrupted, "stopped after step 5"),
    ],
)
def test_who_failed_first_is_named_and_no_one_waits(tmp_path, how, error, message):
    """late, after: worker 0 reports the lost peer earlier or later, but is not the cause."""
    began = time.monotonic()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with pytest.raises(GcbenchError) as raised:
        launch.in_processes(3, 1, crew.fail, [how, str(tmp_path)])
    assert (type(raised.value), str(raised.value)) == (error, message)
    assert how != "diverged" or raised.value.step == 4
    assert time.monotonic() - began < crew.LONG / 2
    assert {s: signal.getsignal(s) for s in handlers} == handlers
    saved = sorted(path.name for path in tmp_path.glob("saved-*"))
    assert saved == (["saved-0", "saved-2"] if how == "interrupted" else [])


@pytest.mark.parametrize("times", [1, 2, 4])
def test_the_first_ctrl_c_asks_and_the_second_ends(tmp_path, times):
    """More than one: the workers do not listen to what they are asked."""
    began = time.monotonic()
    with pytest.raises(Interrupted, match="stopped by the user"):
        launch.in_processes(3, 1, crew.interrupt, [times, str(tmp_path), os.getpid()])
    assert time.monotonic() - began < crew.LONG / 2


def test_only_what_can_be_imported_is_handed_on():
    def closure():
        pass

    assert launch.named(launch.name_of(crew.tell)) is crew.tell
    for function in (closure, lambda: None, Path.exists):
        with pytest.raises(UsageError, match="importable"):
            launch.name_of(function)


def test_every_option_reaches_the_workers():
    """One that is added and not handed on would count in a simulation alone."""
    plan = captures.Plan((1, 2), "fc*")
    options = Options(Path("data"), 1.5, "plain", crew.tell, plan, ("tensorboard",), 3, 5)
    texts = json.loads(json.dumps(engines._options_to_json(options)))
    assert engines._options_from_json(texts) == options
    for field in dataclasses.fields(Options):
        assert getattr(options, field.name) != field.default, f"{field.name} is not tried here"


@pytest.mark.parametrize("text", ["0", "abc", "nan", "inf", "-5", "1e9"])
def test_a_timeout_that_is_none_is_refused_before_anything_starts(monkeypatch, tmp_path, text):
    monkeypatch.setenv(launch.TIMEOUT, text)
    done = invoke(*run_words(tmp_path, "--engine", "spawn", "--steps", 1))
    assert done.code == 2
    assert (
        f"{launch.TIMEOUT}={text!r} in the environment: expected seconds from 1 to 86400"
        in done.err
    )


def test_the_timeout_is_what_the_environment_says(monkeypatch):
    monkeypatch.delenv(launch.TIMEOUT, raising=False)
    assert launch.collective_timeout() == timedelta(minutes=10)
    monkeypatch.setenv(launch.TIMEOUT, "2.5")
    assert launch.collective_timeout() == timedelta(seconds=2.5)


# -- no orphan -------------------------------------------------------------------------------------


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-P", *sys.argv[1:], str(os.getpid()), "9"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's service is Linux's")
def test_a_worker_is_tied_to_its_parent_before_it_imports_anything(tmp_path):
    """It waits for its job, which is a pipe here, when its parent is killed."""
    os.mkfifo(tmp_path / "job.json")
    words = [sys.executable, "-c", PARENT, fork_server.__file__, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        wait_for(lambda: "fifo" in Path(f"/proc/{child}/wchan").read_text() or waits(child))
        parent.kill()
        parent.wait()
        try:
            wait_for(lambda: not alive(child))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def waits(pid: int) -> bool:
    """Whether a process sleeps in the system call that opens a file."""
    number = Path(f"/proc/{pid}/syscall").read_text().split()[0]
    return number in ("257", "56")  # openat on x86-64 and on arm64


def test_a_worker_whose_parent_is_gone_ends_at_once(tmp_path):
    """It has a valid job, but this test is not a child of process 1."""
    words = [sys.executable, "-P", fork_server.__file__, str(tmp_path)]
    done = subprocess.run([*words, "1", "9"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    words += [str(os.getpid()), "9"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert "job.json" in done.stderr  # this one looked for its job


def imports_torch(pid: int) -> bool:
    """Whether a process is past the start, where it looks whether its parent still lives."""
    with contextlib.suppress(OSError):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return False


@pytest.mark.parametrize(
    ("when", "sign"), [("importing", signal.SIGHUP), ("training", signal.SIGTERM)]
)
def test_no_worker_outlives_a_launcher_that_ends(tmp_path, sign, when):
    process = start(*run_words(tmp_path, "--engine", "spawn", "--steps", 10**6))
    if when == "importing":
        wait_for(lambda: [pid for pid, _ in launching(process.pid) if imports_torch(pid)], process)
    else:
        wait_for(lambda: records(tmp_path) >= 3, process)
    os.killpg(process.pid, sign)  # as a terminal that is closed, and a batch system, do
    process.wait(PATIENCE)
    wait_for(lambda: not members(process.pid))
    done = end(process)
    assert done.code == 130
    assert "Traceback" not in done.err


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's service is Linux's")
def test_workers_end_with_the_process_that_forked_them(tmp_path):
    process = start(*run_words(tmp_path, "--engine", "spawn", "--steps", 10**6))
    wait_for(lambda: records(tmp_path) >= 3, process)
    ranks = {int(pid) for pid, _, _ in workers(process.pid)}
    (parent,) = {pid for pid, _ in launching(process.pid)} - ranks
    assert len(ranks) == 2
    os.kill(parent, signal.SIGKILL)
    done = end(process)
    wait_for(lambda: not members(process.pid))
    assert done.code == 1
    assert "was ended by SIGKILL" in done.err.splitlines()[-1]


# -- no door ---------------------------------------------------------------------------------------


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """Return (address, port) of every TCP socket on which these processes listen."""
    inodes = set()
    for path in [path for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir()]:
        with contextlib.suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
    result = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                place, port = words[1].split(":")
                raw = bytes.fromhex(place)
                if sys.byteorder == "little":  # words of 32 bits in the machine's order
                    raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                result.append((socket.inet_ntop(family, raw), int(port, 16)))
    return result


def stores(doors: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return where a peer can write a key to a store of torch that serves there, within seconds."""
    result = []

    def write(address: str, port: int) -> None:  # torch waits for its greeting without an end
        with contextlib.suppress(RuntimeError):
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=2))
            store.set("torch.rendezvous.x", "y")
            if store.get("torch.rendezvous.x") == b"y":
                result.append((address, port))

    peers = [threading.Thread(target=write, args=door, daemon=True) for door in doors]
    for peer in peers:
        peer.start()
    patience = time.monotonic() + 3
    for peer in peers:
        peer.join(max(0.0, patience - time.monotonic()))
    return result


def test_the_probe_finds_a_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    result = [port for _, port in listening([os.getpid()])]
    assert store.port in result
    assert stores([("127.0.0.1", store.port)]) == [("127.0.0.1", store.port)]


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are read from Linux's /proc")
@pytest.mark.filterwarnings("ignore")
def test_a_running_job_listens_on_loopback_alone_and_serves_no_store(tmp_path):
    """Connecting to all of its ports does not harm it.

    Then one worker is killed: it is named, by one line, and torch's banner is not shown.
    """
    process = start(*run_words(tmp_path, "--engine", "spawn", "--steps", 10**6))
    wait_for(lambda: records(tmp_path) >= 3, process)
    jobs = workers(process.pid)
    assert [rank for _, _, rank in jobs] == ["0", "1"]
    assert {Path(folder).stat().st_mode for _, folder, _ in jobs} == {0o40700}
    doors = listening(members(process.pid))
    assert len(doors) >= 2  # gloo's, one a worker: the test sees what there is
    assert {address for address, _ in doors} <= {"127.0.0.1", "::1"}
    assert stores(doors) == []
    for address, port in doors:
        with socket.create_connection((address, port), timeout=5) as peer:
            peer.sendall(pickle.dumps(print) * 10)
    before = records(tmp_path)
    wait_for(lambda: records(tmp_path) >= before + 3, process)
    os.kill(int(jobs[1][0]), signal.SIGKILL)
    done = end(process)
    wait_for(lambda: not members(process.pid))
    message = "gcbench: worker 1 was ended by SIGKILL: often out of memory"
    assert (done.code, done.out, done.err.splitlines()[-1]) == (1, "", message)
    assert len(done.err.splitlines()) == 2  # the other one says what is run


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_what_workers_tell_each_other_is_never_unpickled(tmp_path):
    data = pickle.dumps(Evil(tmp_path / "mark"))
    for spoiled in (data, b"{}\n" + data, b'{"tensor": "0"}\n' + data):
        with pytest.raises((ValueError, SafetensorError)):
            from_bytes(spoiled)
    assert not (tmp_path / "mark").exists()
    pickle.loads(data)
    assert (tmp_path / "mark").exists()  # it would have been


@pytest.mark.parametrize("value", [Path("x"), {1: 2}, {"a": [object()]}, {1.5}, b"x"])
def test_what_is_no_plain_value_is_refused(value):
    with pytest.raises(TypeError):
        to_bytes(value)


def test_values_arrive_as_they_were_sent():
    x = torch.arange(6.0)
    value = {"views": [x[:4], x[2:]], "grown": x.view(2, 3).t(), "tensor": {"dict": 1}}
    result = from_bytes(to_bytes(value))
    assert result["tensor"] == {"dict": 1}
    assert torch.equal(result["grown"], x.view(2, 3).t())
    assert all(torch.equal(a, b) for a, b in zip(result["views"], value["views"], strict=True))
    with preloaded.forking():
        result = launch.in_processes(2, 1, crew.meet, [])
    expected = [
        {
            "text": "ä" * rank,
            "numbers": [rank, 0.1 * rank, float("inf"), None, True],
            "empty": [0, 3],
            "half": ["torch.bfloat16", *[[rank, rank]] * rank],
            "scalar": rank,
        }
        for rank in range(2)
    ]
    assert result == [expected] * 2


# -- workers that stand still ----------------------------------------------------------------------


def test_a_worker_that_stands_still_is_named_after_the_timeout(monkeypatch):
    """The roll call tells it from the third one, which waits like the first."""
    monkeypatch.setenv(launch.TIMEOUT, "4")
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    with preloaded.forking(), pytest.raises(GcbenchError) as raised:
        launch.in_processes(3, 1, crew.stand_still, [])
    message = "because worker 1 ended or stopped responding; the limit is 4 s"
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


# -- torchrun --------------------------------------------------------------------------------------


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_place_in_the_job_of_torchrun(torchrun):
    torchrun.setenv("RANK", "1")
    assert ranks.from_torchrun() == Rank(1, 2, 0, 2)
    assert not ranks.leads()
    torchrun.delenv("TORCHELASTIC_RUN_ID")
    assert ranks.from_torchrun() is None
    assert ranks.leads()


@pytest.mark.parametrize("name", [name for name in TORCHRUN if name != "TORCHELASTIC_RUN_ID"])
@pytest.mark.parametrize("command", ["run", "bandwidth"])
def test_a_half_set_environment_is_one_line(torchrun, tmp_path, command, name):
    torchrun.delenv(name)
    done = invoke(command, "--results", tmp_path)
    assert done.code == 2
    assert f"{name} is not. Start" in done.err
    assert done.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "abc", "RANK='abc' in the environment: expected a number"),
        ("WORLD_SIZE", "-2", "WORLD_SIZE='-2' in the environment: expected a number"),
        ("RANK", "2", "RANK=2 of WORLD_SIZE=2"),
        ("LOCAL_RANK", "7", "LOCAL_RANK=7 of LOCAL_WORLD_SIZE=2"),
    ],
)
def test_numbers_that_no_worker_has_are_one_line(torchrun, tmp_path, name, value, message):
    torchrun.setenv(name, value)
    done = invoke("run", "--results", tmp_path)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("rank", ["1", "abc"])
def test_a_rank_outside_torchrun_means_nothing(monkeypatch, tmp_path, rank):
    """It neither passes the lock by nor keeps the result from being printed."""
    monkeypatch.setenv("RANK", rank)
    command = run_words(tmp_path, "--steps", 2)
    assert invoke(*command).json["steps"] == 2
    (folder,) = tmp_path.iterdir()
    with engines.Run(folder).locked():
        done = invoke(*command, "--force")
    assert done.code == 1
    assert "is being written by another gcbench process" in done.err


def test_an_agent_that_is_gone_is_not_waited_for(torchrun):
    with socket.create_server(("127.0.0.1", 0)) as server:
        torchrun.setenv("MASTER_PORT", str(server.getsockname()[1]))
        torchrun.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        engines._require_agent(Rank(0, 2, 0, 2))
    with pytest.raises(PeerLostError, match="torchrun's agent at 127"):
        engines._require_agent(Rank(0, 2, 0, 2))


def attempt(store, size: int, pause: float) -> set[str]:
    """Return what the workers of one attempt find at a key of theirs; worker 0 comes last."""
    result, failed = [], []

    def work(rank: int) -> None:
        try:
            time.sleep(0 if rank else pause)
            local = engines.fresh(store, Rank(rank, size, rank, size), timedelta(seconds=20))
            assert not local.check([f"key-{rank}"])
            local.set(f"key-{rank}", str(rank))
            result.append(tuple(local.get(f"key-{each}").decode() for each in range(size)))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(result) == size
    return set(result)


def test_an_attempt_finds_no_key_of_an_earlier_one(tmp_path):
    """Worker 0 comes late: the others find the name of the earlier attempt before its own."""
    store = dist.FileStore(str(tmp_path / "store"), 3)
    store.set_timeout(timedelta(seconds=20))
    for _ in range(3):
        assert attempt(store, 3, 0.2) == {("0", "1", "2")}


def test_a_worker_0_that_never_comes_is_named(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    store.set("gcbench/attempt", "before")
    with pytest.raises(PeerLostError, match="worker 1: worker 0 did not connect within 1 s"):
        engines.fresh(store, Rank(1, 2, 1, 2), timedelta(seconds=1))


LATE = """
import os, time
if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and os.environ.get("RANK") == "0":
    time.sleep(2)
"""


def children(pid: int) -> dict[str, int]:
    """Return the workers of torchrun's agent, by RANK."""
    result = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = path.joinpath("stat").read_text().rpartition(")")[2].split()[1]
            environment = path.joinpath("environ").read_text().split("\0")
            rank = [word[5:] for word in environment if word.startswith("RANK=")]
            if int(parent) == pid and rank:
                result[rank[0]] = int(path.name)
    return result


def test_a_killed_worker_is_restarted_and_ends_in_the_same_parameters(tmp_path):
    """Worker 0 comes late to the second attempt, when the first one's keys are still there.

    In the end the agent is killed, and no worker outlives it.
    """
    (tmp_path / "sitecustomize.py").write_text(LATE)
    parts = tmp_path / "parts"

    def launched_by_torchrun(workers, *words):
        job = ("--max-restarts", 1, "--nproc-per-node", workers, "-m", "gcbench", *words)
        environment = {"OMP_NUM_THREADS": "1", "path": str(tmp_path), launch.TIMEOUT: "60"}
        return start(*job, module="torch.distributed.run", **environment)

    process = launched_by_torchrun(2, *run_words(parts, "--steps", 400))
    wait_for(lambda: records(parts) >= 10 and any(parts.glob("*/checkpoint.pt")), process)
    os.kill(children(process.pid)["1"], signal.SIGKILL)
    done = end(process)
    assert "resuming from checkpoint" in done.err
    assert "gcbench: worker 0: a collective failed after" in done.err
    assert "because worker 1" in done.err
    expected = invoke(*run_words(tmp_path / "whole", "--steps", 400)).json
    assert done.json["params_sha256"] == expected["params_sha256"]
    assert records(parts) == records(tmp_path / "whole")

    words = run_words(tmp_path / "orphans", "--steps", 10**6, workers=1)
    process = launched_by_torchrun(1, *words)
    wait_for(lambda: records(tmp_path / "orphans") >= 1, process)
    left = children(process.pid)["0"]
    process.kill()
    wait_for(lambda: not alive(left))
    end(process)
