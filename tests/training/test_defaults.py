"""Runs that another version made with other defaults: the hash is the same, the run is not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from builders import reseal
from commands import Result, invoke
from gcbench.compressors.memories.residual import Residual

from gcbench.core import registry
from gcbench.training import configuration, engines

QUICK = ("--task", "quadratic", "--workers", 2, "--steps", 12, "--progress", "none", "--json")


def run(results: Path, *words: object) -> Result:
    return invoke("run", *QUICK, "--results", results, *words)


def with_default(cls: type[Any], field: str, value: object) -> pytest.MonkeyPatch:
    """Give a field another default, as another version has it, until `undo`."""
    names = [each.name for each in dataclasses.fields(cls)]
    local = [each.default for each in dataclasses.fields(cls)]
    local[names.index(field)] = value
    patch = pytest.MonkeyPatch()
    patch.setattr(cls.__init__, "__defaults__", tuple(local))
    return patch


@pytest.mark.parametrize(
    ("cls", "field", "value", "words"),
    [
        (registry.compressor_class("terngrad"), "clip", 2.0, ()),
        (registry.compressor_class("terngrad"), "clip", 2.0, ("--set", "share=0:true/6:false")),
        (registry.task_class("quadratic"), "noise", 0.5, ()),
        (Residual, "decay", 0.9, ("--memory", "forced-residual")),
    ],
)
def test_a_finished_run_of_other_defaults_is_not_reused(tmp_path, cls, field, value, words):
    collective = () if not words else ("--collective", "allgather")
    other = with_default(cls, field, value)
    try:
        before = run(tmp_path, *words, *collective).json
    finally:
        other.undo()
    done = run(tmp_path, *words, *collective)
    assert done.code == 1
    assert done.out == ""
    then, now = done.err.strip().split("now means")
    assert f"{tmp_path / 'quadratic-terngrad-'}{before['config_hash']} " in then
    assert f"{field}={value}" in then
    assert f"{field}={value}" not in now
    assert "--force" in now
    after = run(tmp_path, *words, *collective, "--force").json
    assert after["config_hash"] == before["config_hash"]
    assert after["params_sha256"] != before["params_sha256"]
    assert "finished before, skipped" in run(tmp_path, *words, *collective).err


def change(folder: Path, name: str, key: str, value: object = None) -> None:
    """Set an entry of a run's file, or take it out, as an older version left it."""
    held = json.loads((folder / name).read_text())
    inner = held["provenance"] if name == "summary.json" and key == "objects" else held
    inner.pop(key) if value is None else inner.update({key: value})
    (folder / name).write_text(json.dumps(held))
    if name == "summary.json":
        reseal(folder / name)


def test_a_run_whose_objects_are_unknown_is_not_reused(tmp_path):
    run(tmp_path)
    (folder,) = tmp_path.iterdir()
    change(folder, "summary.json", "objects")
    done = run(tmp_path)
    assert done.code == 1
    assert "unknown fields" in done.err


def test_a_run_of_another_default_setting_is_not_reused(tmp_path):
    """The hash leaves defaults out: the stored config shows that one was another."""
    run(tmp_path)
    (folder,) = tmp_path.iterdir()
    config = json.loads((folder / "summary.json").read_text())["config"]
    assert "skipped" in run(tmp_path).err
    change(folder, "summary.json", "config", {**config, "ema": 0.5})
    done = run(tmp_path)
    assert done.code == 1
    assert "ema=0.5" in done.err
    assert "ema=0" in done.err.split("now means")[1]


def test_an_edited_file_is_not_called_another_version_of_gcbench(tmp_path, forget):
    """A default of the user's method was edited; gcbench is the same."""
    path = tmp_path / "edited.py"
    source = (
        "from dataclasses import dataclass\n"
        "from gcbench.compressors.topk import TopK\n\n\n"
        "@dataclass(frozen=True)\nclass Edited(TopK):\n    extra: float = 1.0\n"
    )
    path.write_text(source)
    run(tmp_path / "runs", "--compressor", path)
    path.write_text(source.replace("1.0", "2.5"))
    done = run(tmp_path / "runs", "--compressor", path)
    assert done.code == 1
    then, now = done.err.split("now means")
    assert ("extra=1.0" in then, "extra=2.5" in now) == (True, True)
    assert "gcbench" not in then.removeprefix("gcbench: ")


def test_an_interrupted_run_does_not_go_on_with_other_defaults(tmp_path, monkeypatch):
    from gcbench.training.train import Trainer

    def fall(self, *words):
        raise OSError("a power cut")

    often = ("--checkpoint-seconds", 0, "--log-every", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", fall)
        assert run(tmp_path, *often).code == 1
    (folder,) = tmp_path.iterdir()
    assert (folder / "checkpoint.pt").exists()
    selected = (folder / "provenance.json").read_text()
    other = with_default(registry.compressor_class("terngrad"), "clip", 2.0)
    try:
        assert "TernGrad(clip=2.5, " in run(tmp_path, *often).err.split("now means")[0]
    finally:
        other.undo()
    change(folder, "provenance.json", "objects")
    assert "with unknown fields" in run(tmp_path, *often).err
    (folder / "provenance.json").write_text(selected)
    assert "resuming from checkpoint" in run(tmp_path, *often).err


def test_a_run_that_failed_alone_has_no_document(tmp_path):
    done = run(tmp_path, "--compressor", "none", "--lr", 1e30)
    assert (done.code, done.out) == (1, "")
    assert "non-finite gradient" in done.err
    both = run(tmp_path, "--compressor", "none", "--lr", "1e30,2e30")
    assert (both.code, json.loads(both.out)) == (1, [])  # as many documents as runs that are done


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """A run of one thread that fell at its end, and the words that go on with it."""
    from gcbench.training.train import Trainer

    def fall(self, *words):
        raise OSError("a power cut")

    often = ("--checkpoint-seconds", 0, "--log-every", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", fall)
        patch.setattr(configuration, "cores", lambda: 2)
        assert run(tmp_path, *often).code == 1
    return often


def test_a_run_goes_on_with_the_threads_that_it_began_with(tmp_path, monkeypatch, interrupted):
    """On eight cores the same command would have four threads per worker."""
    monkeypatch.setattr(configuration, "cores", lambda: 8)
    seen = []
    world = engines.SimulatedWorld

    def created(*words):
        seen.append(words[3])
        return world(*words)

    monkeypatch.setattr(engines, "SimulatedWorld", created)
    done = run(tmp_path, *interrupted)
    assert "resuming from checkpoint with 1 thread per worker" in done.err
    assert seen == [1]
    assert done.json["provenance"]["threads"] == 1
    assert run(tmp_path, *interrupted, "--force").json["provenance"]["threads"] == 4
    assert seen == [1, 4]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("versions", {"torch": "1.0"}, "torch 1.0 in the run, "),
        ("machine", {"isa": "NEON"}, "instruction set NEON in the run, "),
        ("machine", {"cpu": "Z80"}, "processor Z80 in the run, "),
        ("threads", "many", "threads 'many' in the run"),
    ],
)
def test_a_run_does_not_go_on_where_bits_are_others(tmp_path, interrupted, key, value, text):
    (folder,) = tmp_path.iterdir()
    before = json.loads((folder / "provenance.json").read_text())
    changed = {**before[key], **value} if isinstance(value, dict) else value
    change(folder, "provenance.json", key, changed)
    done = run(tmp_path, *interrupted)
    assert (done.code, done.out) == (1, "")
    assert f"({text}" in done.err
    assert "--force" in done.err
    change(folder, "provenance.json", key, before[key])
    assert "resuming from checkpoint" in run(tmp_path, *interrupted).err


THEIRS = """
import gcbench

class Theirs(type(gcbench.get_compressor("none"))):
    name = "theirs"
"""


def test_a_changed_plug_in_is_not_finished_before(tmp_path, third_party):
    """Its distribution, version and the digest of its source are part of the provenance."""
    info = tmp_path / "site" / "somebodys-1.0.dist-info"
    info.mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: somebodys\nVersion: {}\n"
    (info / "METADATA").write_text(metadata.format("1.0"))
    (info / "entry_points.txt").write_text("[gcbench.compressors]\ntheirs = somebodys:Theirs\n")
    source, results = info.parent / "somebodys.py", tmp_path / "runs"
    source.write_text(THEIRS)
    third_party(str(info.parent))
    words = ("--compressor", "theirs")
    before = run(results, *words).json["provenance"]["plugins"]
    assert {k: v for k, v in before["compressor"].items() if k != "sha256"} == {
        "distribution": "somebodys",
        "version": "1.0",
    }
    assert set(before) == {"compressor"}
    assert "finished before, skipped" in run(results, *words).err
    source.write_text(THEIRS + "# mended")
    done = run(results, *words)
    assert done.code == 1
    digest = before["compressor"]["sha256"][:10]
    assert f"compressor: somebodys 1.0 (source {digest}) in the run, somebodys 1.0" in done.err
    again = run(results, *words, "--force").json["provenance"]["plugins"]
    assert again["compressor"]["sha256"] != before["compressor"]["sha256"]
    assert "plugins" not in run(results).json["provenance"], "what is built in has the commit"
    (info / "METADATA").write_text(metadata.format("1.1"))
    third_party(str(info.parent))
    assert "in the run, somebodys 1.1 (source " in run(results, *words).err


def test_another_version_of_a_built_in_file_is_reported(tmp_path, monkeypatch):
    """It may differ only by a comment: the result stays, and a message names the difference."""
    before = run(tmp_path).json["provenance"]["source"]
    monkeypatch.setattr(registry, "source_digest", lambda name: "0123456789")
    done = run(tmp_path)
    assert done.code == 0
    message = f"skipped, made by another version of none.py ({before} in the run, 0123456789 now)"
    assert message.replace("none.py", f"{done.json['compressor_name']}.py") in done.err
    assert run(tmp_path, "--force").json["provenance"]["source"] == "0123456789"
