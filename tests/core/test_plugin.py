"""A third party's package: installed with pip, found by its entry points, held to our rules."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
from commands import gcbench, invoke

from gcbench.core import registry
from gcbench.core.clock import Clock
from gcbench.core.compressor import Segments
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.memory import Memory
from gcbench.core.world import Link, SimulatedWorld
from gcbench.report import listings

pytestmark = pytest.mark.usefixtures("forked")

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "somebodys-methods"
version = "1.0"

[project.entry-points."gcbench.compressors"]
theirs = "somebodys:Theirs"
drifting = "somebodys:Drifting"
heir = "somebodys:Heir"
broken = "somebodys.nowhere:Lost"
number = "somebodys:NUMBER"
terngrad = "somebodys:Theirs"
"up/there" = "somebodys:Theirs"

[project.entry-points."gcbench.tasks"]
theirs = "somebodys:Line"

[project.entry-points."gcbench.memories"]
estimates = "somebodys:EF21"

[project.entry-points."gcbench.sinks"]
lines = "somebodys:Lines"

[tool.hatch.build.targets.wheel]
only-include = ["somebodys.py"]
"""

MODULE = '''
"""Every value rounded to halves, in bytes. Nobody publishes it."""

import os
from dataclasses import dataclass
from typing import ClassVar

import torch

import gcbench
from gcbench.core.compressor import Compressor
from gcbench.core.memory import Memory
from gcbench.training.sinks import Sink
from gcbench.core.task import Batch, Split, Task

NUMBER = 3


@dataclass(frozen=True)
class Theirs(Compressor):
    steps: float = 64.0  # levels in a unit

    def encode(self, x, ctx):
        return (x * self.steps).round().clamp(-127, 127).to(torch.int8)

    def decode(self, payload, ctx):
        return payload.parts[0].float() / self.steps


class Drifting(Theirs):
    """Decodes differently in every process."""

    def decode(self, payload, ctx):
        return super().decode(payload, ctx) + 1e-3 * int(os.environ.get("RANK", 0))


class Heir(type(gcbench.get_compressor("terngrad"))):
    """TernGrad under another name."""


@dataclass(frozen=True)
class Line(Task):
    examples: int = 64

    def defaults(self):
        return {"batch": 8, "steps": 20, "lr": 0.1}

    def load(self, data_dir):
        x = torch.linspace(-1, 1, self.examples)[:, None]
        return Split(x, 3 * x), Split(x, 3 * x)

    def model(self):
        return torch.nn.Linear(1, 1)

    def batch(self, split, indices, key):
        return Batch(split.inputs[indices], split.targets[indices])

    def loss(self, outputs, targets):
        return ((outputs - targets) ** 2).mean()

    def correct(self, outputs, targets):
        return None


@dataclass(frozen=True)
class EF21(Memory):
    """Richtarik et al. 2021: the difference to an estimate is sent, which follows what was sent."""

    buffers: ClassVar[tuple[str, ...]] = ("estimate", "difference")
    joint: ClassVar[tuple[str, ...]] = ("estimate",)
    feedback = True

    def offer(self, gradient, ctx):
        return torch.sub(gradient, ctx.state["estimate"], out=ctx.state["difference"])

    def keep(self, offered, sent, ctx):
        ctx.state["estimate"] += sent

    def apply(self, mean, ctx):
        return ctx.joint["estimate"].add_(mean)


class Lines(Sink):
    """The steps of the records, a line each, and the process that heard of them."""

    def open(self, folder, config, provenance):
        self.path = folder / "lines"
        self.path.write_text("")

    def record(self, record):
        with self.path.open("a") as file:
            file.write(f"{record['kind']} {record['step']} {os.environ.get('RANK')}\\n")
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the installed package, to be put on PYTHONPATH."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "somebodys.py").write_text(MODULE)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *offline, "--target", str(target), str(source)], check=True)
    return str(target)


@pytest.fixture(scope="module")
def listed(site):
    done = gcbench("list", "compressors", "--json", path=site)
    return {row["name"]: row for row in done.json}, done.err


def test_their_method_task_and_sink_run_in_every_engine(site, third_party, tmp_path):
    third_party(site)
    words = ("--task", "theirs", "--compressor", "theirs", "--workers", 2, "--set", "steps=32")
    words = (*words, "--sink", "lines")
    command = ("run", *words, "--engine", "simulate,spawn", "--results", tmp_path, "--json")
    here, there = invoke(*command).json
    assert here["compressor"] == "Theirs(steps=32.0)"
    assert here["collective"] == "allgather"
    assert here["params"] == 2
    assert here["params_sha256"] == there["params_sha256"]
    # Two elements are two bytes; the sizes that no layout declares travel along, 8 bytes each.
    assert here["payload_bytes_up"] == there["payload_bytes_up"] == 20 * (2 + 8)
    assert here["test_loss"] < 1
    for summary, rank in ((here, None), (there, 0)):
        (received,) = tmp_path.glob(f"*-{summary['config_hash']}/lines/lines")
        assert received.read_text() == f"train 10 {rank}\ntrain 20 {rank}\neval 20 {rank}\n"


def test_their_memory_runs_resumes_and_finds_the_mean(site, third_party, tmp_path):
    """EF21 sends a quarter of the difference to its estimate: the error falls step by step."""
    third_party(site)
    words = ("run", "--task", "digits", "--compressor", "topk", "--set", "ratio=0.25")
    words = (*words, "--memory", "estimates", "--workers", 2, "--steps", 4, "--json")
    here, there = invoke(*words, "--engine", "simulate,spawn", "--results", tmp_path).json
    assert here["params_sha256"] == there["params_sha256"]
    plain = invoke(*words, "--memory", "none", "--results", tmp_path / "plain").json
    assert here["params_sha256"] != plain["params_sha256"]
    memory = registry.memory_class("estimates")()
    method = registry.compressor("topk", ratio=0.25)
    world = SimulatedWorld(2, torch.device("cpu"), Link(10, 50), 1, 1)
    clock = Clock(world.device)
    clock.start_step()
    exchange = Exchange(world, [Lane(method, "allgather", 0, Segments((0, 400)), memory)], 0, clock)
    xs = [torch.randn(400, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    mean = (xs[0] + xs[1]) / 2
    errors = [float((exchange.mean(xs, step) - mean).norm()) for step in range(4)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < 1e-6, "after four steps each quarter has been sent once"


def test_their_method_is_verified_like_ours(site, third_party):
    """A decode that takes any number of bytes breaks the contract; all else holds."""
    third_party(site)
    done = invoke("verify", "theirs", "--json")
    assert done.code == 1
    verdicts = {row["check"]: row["verdict"] for row in json.loads(done.out)}
    assert [check for check, verdict in verdicts.items() if verdict == "fails"] == [
        "corrupt payloads"
    ]
    assert verdicts["simulation = 3 processes"] == "holds"
    assert "1 fail" in done.err


def test_replicas_that_differ_fail_the_verification(site, third_party):
    third_party(site)
    done = invoke("verify", "drifting", "--json")
    assert done.code == 1
    (row,) = [row for row in json.loads(done.out) if row["check"] == "simulation = 3 processes"]
    assert (row["verdict"], row["note"]) == ("fails", "the replicas of three processes differ")


def test_their_field_is_checked_like_ours(site, third_party, tmp_path):
    third_party(site)
    words = ("--task", "theirs", "--compressor", "theirs", "--results", tmp_path)
    done = invoke("run", *words, "--set", "step=2")
    assert done.code == 2
    assert "Did you mean 'steps'? Known: steps" in done.err


def test_lists_name_the_package(listed):
    rows, _ = listed
    assert rows["theirs"]["source"] == "somebodys-methods"
    assert rows["theirs"]["what"] == "Every value rounded to halves, in bytes. Nobody publishes it."
    assert rows["theirs"]["collectives"] == ["allgather"]
    assert rows["none"]["source"] == "built-in"


def test_a_taken_name_stays_ours_and_is_said(listed):
    rows, message = listed
    assert rows["terngrad"]["source"] == "built-in"
    assert rows["terngrad"]["fields"]["clip"] == 2.5
    assert "'terngrad' of the package somebodys-methods is ignored" in message
    assert "taken by built-in" in message


def test_a_name_that_fits_no_folder_is_ignored(listed):
    rows, message = listed
    assert "up/there" not in rows
    assert "'up/there' of the package somebodys-methods is ignored" in message


def test_what_is_broken_matters_only_when_asked_for(site, third_party, listed, tmp_path):
    third_party(site)
    rows, _ = listed
    assert "'broken' of the package somebodys-methods cannot be loaded" in rows["broken"]["what"]
    assert "is not a subclass of gcbench's Compressor" in rows["number"]["what"]
    done = invoke("run", "--compressor", "broken", "--results", tmp_path)
    assert done.code == 1
    message = done.err.splitlines()[-1]
    assert message.startswith("gcbench: 'broken' of the package somebodys-methods cannot be loaded")
    assert "ModuleNotFoundError" in message


@dataclass(frozen=True)
class Needy(type(registry.compressor("none"))):
    bits: int


def test_a_method_whose_field_has_no_default_does_not_hide_the_others(monkeypatch):
    entries = {
        "needy": registry.Entry("needy", "theirs", lambda: Needy),
        "none": registry.compressors()["none"],
    }
    monkeypatch.setattr(registry, "compressors", lambda: entries)
    needy, none = listings.compressors()
    assert "'bits'" in needy["what"]
    assert none["collectives"][0] == "allreduce"


class Faulty(type(registry.compressor("none"))):
    @property
    def claims(self):
        raise ZeroDivisionError


@dataclass(frozen=True)
class Typed(type(registry.compressor("none"))):
    dtype: torch.dtype = torch.float16


@dataclass(frozen=True)
class Several(Memory):
    names: list[str] = field(default_factory=lambda: ["a"])


def test_a_faulty_plug_in_does_not_end_a_list(monkeypatch):
    """A claim that raises; a field of a type that JSON lacks; a default that is a factory's."""
    methods = {
        "faulty": registry.Entry("faulty", "theirs", lambda: Faulty),
        "none": registry.compressors()["none"],
        "typed": registry.Entry("typed", "theirs", lambda: Typed),
    }
    monkeypatch.setattr(registry, "compressors", lambda: methods)
    several = {"several": registry.Entry("several", "theirs", lambda: Several)}
    monkeypatch.setattr(registry, "memories", lambda: several)
    faulty, none, typed = invoke("list", "compressors", "--json").json
    assert "ZeroDivisionError" in faulty["what"]
    assert none["collectives"][0] == "allreduce"
    assert typed["fields"] == {"dtype": "torch.float16"}
    (row,) = invoke("list", "memories", "--json").json
    assert row["fields"] == {"names": ["a"]}


def test_replicas_that_really_drift_apart_are_found(site, third_party, tmp_path):
    third_party(site)
    words = ("--task", "theirs", "--compressor", "drifting", "--workers", 2)
    done = invoke("run", *words, "--engine", "spawn", "--results", tmp_path)
    assert done.code == 1
    assert "replicas differ at step 20: worker(s) [1] differ from worker 0" in done.err


def test_an_heir_has_a_name_of_its_own(site, third_party):
    third_party(site)
    assert registry.compressor("terngrad").name == "terngrad"
    assert registry.compressor("heir").name == "heir"
    assert registry.compressor("terngrad").name == "terngrad"


def test_a_package_may_be_open_in_an_editor(tmp_path, monkeypatch):
    """Emacs marks a file with unsaved changes by a link that leads nowhere, named .#mine.py."""
    package = tmp_path / "edited_methods"
    package.mkdir()
    (package / "__init__.py").write_text("class Mine:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("edited_methods").Mine
    entry = registry.Entry("mine", "edited-methods", lambda: mine)
    before = registry.origin(entry)
    (package / ".#__init__.py").symlink_to("author@host.1")
    assert registry.origin(entry) == before
