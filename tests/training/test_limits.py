"""What a command may take is bounded before anything starts: one line, and how to insist."""

from __future__ import annotations

import pytest
from commands import invoke

from gcbench.core.errors import UsageError
from gcbench.training import configuration, engines, limits, store

INSIST = "set GCBENCH_NO_LIMITS=1 in the environment to lift the limit"
GRID = ("--seed", ",".join(map(str, range(500))), "--lr", ",".join(f"0.{i + 1}" for i in range(9)))
ASKED = {
    "threads": (("--threads", 100_000), "--threads 100000: at most 1024 threads"),
    "workers": (
        ("--workers", 10**12, "--batch", 10**12),
        f"--workers 1000000000000: at most 4096 simulated workers; {INSIST}",
    ),
    "processes": (
        ("--workers", 1000, "--batch", 1000, "--engine", "spawn"),
        f"--workers 1000: at most 16 processes on 2 core(s); {INSIST}",
    ),
    "grid": (GRID, f"a grid of 4500 configurations: at most 2000 of them; {INSIST}"),
}


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch):
    monkeypatch.setattr(configuration, "cores", lambda: 2)
    monkeypatch.delenv(limits.INSIST, raising=False)


@pytest.fixture
def idle(monkeypatch):
    """Nothing may be trained, and nothing written."""

    def refuse(*words, **more):
        raise AssertionError("something was begun")

    for engine in engines.ENGINES:
        monkeypatch.setitem(engines.ENGINES, engine, refuse)
    monkeypatch.setattr(store.Run, "create", refuse)


@pytest.mark.parametrize("what", ASKED)
def test_what_is_too_much_is_one_line_before_anything_starts(tmp_path, idle, what):
    words, message = ASKED[what]
    done = invoke("run", "--task", "quadratic", *words, "--results", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [f"gcbench: usage: {message}"]
    assert not list(tmp_path.iterdir())


def test_a_grid_with_one_run_that_is_too_large_begins_none(tmp_path, idle):
    done = invoke("run", "--task", "quadratic", "--threads", "1,100000", "--results", tmp_path)
    assert "at most 1024 threads" in done.err


def test_who_insists_gets_it(monkeypatch):
    monkeypatch.setenv(limits.INSIST, "1")
    limits.check_workers(10**6, processes=True, cores=2)
    limits.check_grid(10**6)
    with pytest.raises(UsageError, match=r"at most 1024 threads$"):
        limits.check_threads(1025)
    monkeypatch.setenv(limits.INSIST, "0")
    with pytest.raises(UsageError, match=INSIST):
        limits.check_grid(limits.CONFIGURATIONS + 1)
    limits.check_grid(limits.CONFIGURATIONS)


def test_bandwidth_is_bounded_too(tmp_path):
    done = invoke("bandwidth", "--workers", 1000, "--results", tmp_path)
    assert (done.code, "at most 16 processes on 2 core(s)" in done.err) == (2, True)
    done = invoke("bandwidth", "--threads", 100_000, "--results", tmp_path)
    assert (done.code, "at most 1024 threads" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--compressor", "nope"), "unknown compressor 'nope'"),
        (("--seed", "a"), "seed"),
        (("--capture", "-3"), "--capture"),
    ],
)
def test_histogram_looks_at_its_words_before_it_trains(tmp_path, idle, words, message):
    done = invoke("histogram", *words, "--results", tmp_path)
    assert done.code == 2
    assert message in done.err
